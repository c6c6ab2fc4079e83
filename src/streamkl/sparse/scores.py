"""What keys are ranked by, a tile at a time: an indexer's scores, or the mean attention of a teacher's heads."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from streamkl.problem import Support, Tile
from streamkl.sparse.arguments import AttentionArguments, IndexArguments, index_arguments


def index_scores(
    index_q: Tensor,
    index_k: Tensor,
    index_w: Tensor | None = None,
    *,
    activation: Literal["relu"] | None = "relu",
    index_scale: float | None = None,
    causal: bool = True,
    window: tuple[int, int] | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> Tensor:
    """Every score of an indexer, ``sum_m w[i, m] * relu(scale * <q[m, i], k[j]>)``, dense: for small inputs.

    Args:
        index_q: ``[B, J, Nq, D]``, or packed ``[Tq, J, D]``.
        index_k: ``[B, Nk, D]``, or packed ``[Tk, D]``: one key for all ``J`` heads.
        index_w: ``[B, Nq, J]``, or packed ``[Tq, J]``: the heads' weights; 1 if not given.
        activation: ``"relu"``, or ``None`` for none.
        index_scale: Multiplies the products; ``1/sqrt(D)`` if not given.
        causal: Query ``i`` sees keys ``j <= i + Nk - Nq``.
        window: ``(left, right)`` keys around key ``i + Nk - Nq``; a negative side is unbounded.
        cu_seqlens_q: ``[sequences + 1]``: where each packed sequence's queries start, and the end.
        cu_seqlens_k: The same for the keys.

    Returns:
        ``[B, Nq, Nk]``, packed ``[Tq, Tk]``, float32 (float64 if the inputs are), ``-inf`` at keys that a query may not
        see. Differentiable.

    Example:
        >>> import torch
        >>> from streamkl.sparse import index_scores
        >>> index_scores(torch.ones(1, 2, 3, 4), torch.ones(1, 3, 4))[0]
        tensor([[4., -inf, -inf],
                [4., 4., -inf],
                [4., 4., 4.]])
    """
    arguments = index_arguments(
        index_q, index_k, index_w, index_scale, activation, causal, window, cu_seqlens_q, cu_seqlens_k
    )
    support = arguments.support
    rows = []
    for batch in range(support.batch):
        whole = Tile(batch, slice(0, support.nq), slice(0, support.nk), 0, False)
        rows.append(index_tile(arguments, whole).masked_fill(~_allowed(support, batch, index_q.device), -torch.inf))
    scores = torch.stack(rows) if rows else index_q.new_zeros(0, support.nq, support.nk)
    return scores[0] if arguments.packed else scores


def index_tile(arguments: IndexArguments, tile: Tile) -> Tensor:
    """An indexer's scores of a tile, ``[rows, keys]``, before the mask."""
    dtype = _compute_dtype(arguments.q)
    k = arguments.k[tile.batch, tile.keys].to(dtype)
    w = None if arguments.w is None else arguments.w[tile.batch, tile.rows].to(dtype)
    total = None
    for head in range(arguments.q.shape[1]):
        x = arguments.q[tile.batch, head, tile.rows].to(dtype) @ k.mT * arguments.scale
        x = x.relu() if arguments.relu else x
        x = x if w is None else x * w[:, head, None]
        total = x if total is None else total + x
    assert total is not None, "an indexer has at least one head"
    return total


def attention_tile(arguments: AttentionArguments, tile: Tile) -> Tensor:
    """The mean over heads of the attention of a tile, ``[rows, keys]``, before the mask."""
    dtype = _compute_dtype(arguments.q)
    heads, group = arguments.q.shape[1], arguments.q.shape[1] // arguments.k.shape[1]
    total = None
    for head in range(heads):
        k = arguments.k[tile.batch, head // group, tile.keys].to(dtype)
        a = (arguments.q[tile.batch, head, tile.rows].to(dtype) @ k.mT).mul_(arguments.scale)
        p = a.sub_(arguments.lse[tile.batch, head, tile.rows, None].to(dtype)).exp_()
        total = p if total is None else total.add_(p)
    assert total is not None, "attention has at least one head"
    return total.div_(heads)


def mask_tile(x: Tensor, support: Support, tile: Tile) -> Tensor:
    """``x [rows, keys]`` with ``-inf`` at the pairs of the tile that are not allowed, and at nan."""
    disallowed = support.disallowed(tile, x.device)
    return x.masked_fill(x.isnan() if disallowed is None else x.isnan() | disallowed, -torch.inf)


def _allowed(support: Support, batch: int, device: torch.device) -> Tensor:
    """Which keys each row of a batch element may see, ``[Nq, Nk]`` of bool."""
    allowed = torch.zeros(support.nq, support.nk, dtype=torch.bool, device=device)
    for seq in support.sequences():
        if seq.batch != batch:
            continue
        for tiles in support.tiles(seq, max(seq.q_len, 1), max(seq.k_len, 1)):
            for tile in tiles:
                shape = (tile.rows.stop - tile.rows.start, tile.keys.stop - tile.keys.start)
                zeros = torch.zeros(shape, device=device)
                allowed[tile.rows, tile.keys] = mask_tile(zeros, support, tile) == 0
    return allowed


def _compute_dtype(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)
