"""An indexer's scores as a dense matrix, for inspection and tests. Tensors are dense or packed (varlen)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from streamkl.problem import Support
from streamkl.sparse.arguments import check_sequences, index_arguments


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

    Examples:
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
    check_sequences(arguments.support)
    dtype = torch.promote_types(index_q.dtype, torch.float32)
    scores = arguments.q.to(dtype) @ arguments.k.to(dtype).mT[:, None] * arguments.scale  # [B, J, Nq, Nk]
    scores = scores.relu() if arguments.relu else scores
    if arguments.w is not None:
        scores = scores * arguments.w.to(dtype).transpose(1, 2)[..., None]
    scores = scores.sum(1).masked_fill(~_allowed(arguments.support, index_q.device), -torch.inf)
    return scores[0] if arguments.packed else scores


def _allowed(support: Support, device: torch.device) -> Tensor:
    """Which keys each row may see, ``[B, Nq, Nk]`` of bool."""
    allowed = torch.zeros(support.batch, support.nq, support.nk, dtype=torch.bool, device=device)
    for seq in support.sequences():
        for tiles in support.tiles(seq, max(seq.q_len, 1), max(seq.k_len, 1)):
            for tile in tiles:
                disallowed = support.disallowed(tile, device)
                allowed[tile.batch, tile.rows, tile.keys] = True if disallowed is None else ~disallowed
    return allowed
