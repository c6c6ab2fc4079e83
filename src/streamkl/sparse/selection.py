"""Streaming top-k: the best keys of each query, by an indexer's scores or by a teacher's attention, tile by tile.

A block of rows keeps its best keys so far while the tiles of keys go by, so memory is ``O(Nq * topk)`` for the answer
and a constant beside it. Equal scores go to the lower index, so that the answer does not depend on tiles or devices'
ways to sort. Plain PyTorch, on any device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from streamkl.problem import Support, Tile
from streamkl.sparse.arguments import attention_arguments, check_count, index_arguments
from streamkl.sparse.scores import attention_tile, index_tile, mask_tile

BLOCK_Q, BLOCK_K = 256, 2048
"""Rows and keys of a tile: wide, because what is kept of a row is looked through again at every tile."""


@torch.no_grad()
def index_topk(
    index_q: Tensor,
    index_k: Tensor,
    index_w: Tensor | None = None,
    *,
    topk: int,
    activation: Literal["relu"] | None = "relu",
    index_scale: float | None = None,
    causal: bool = True,
    window: tuple[int, int] | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> Tensor:
    """The keys of the highest scores of an indexer, ``sum_m w[i, m] * relu(scale * <q[m, i], k[j]>)``, streaming.

    Args:
        index_q: ``[B, J, Nq, D]``, or packed ``[Tq, J, D]``.
        index_k: ``[B, Nk, D]``, or packed ``[Tk, D]``: one key for all ``J`` heads.
        index_w: ``[B, Nq, J]``, or packed ``[Tq, J]``: the heads' weights; 1 if not given.
        topk: How many keys a query gets.
        activation: ``"relu"``, or ``None`` for none.
        index_scale: Multiplies the products; ``1/sqrt(D)`` if not given.
        causal: Query ``i`` sees keys ``j <= i + Nk - Nq``.
        window: ``(left, right)`` keys around key ``i + Nk - Nq``; a negative side is unbounded.
        cu_seqlens_q: ``[sequences + 1]``: where each packed sequence's queries start, and the end.
        cu_seqlens_k: The same for the keys.

    Returns:
        ``[B, Nq, topk]``, packed ``[Tq, topk]``, int32, as ``indexer_kl`` takes ``topk_indices``: keys, in a packed
        batch counted from the sequence's first. Best first, so that the first columns are a smaller top-k. Equal
        scores go by lower index: a relu scores many keys 0. -1 fills up rows that see fewer than ``topk`` keys. A
        score of nan or ``-inf`` is never selected.

    Example:
        >>> import torch
        >>> from streamkl.sparse import index_topk
        >>> index_q, index_k = torch.ones(1, 1, 4, 1), torch.tensor([[[1.0], [3.0], [-2.0], [3.0]]])
        >>> index_topk(index_q, index_k, topk=2)[0]
        tensor([[ 0, -1],
                [ 1,  0],
                [ 1,  0],
                [ 1,  3]], dtype=torch.int32)
    """
    check_count(topk)
    arguments = index_arguments(
        index_q, index_k, index_w, index_scale, activation, causal, window, cu_seqlens_q, cu_seqlens_k
    )
    return _gathered(
        select(arguments.support, topk, lambda tile: index_tile(arguments, tile)),
        arguments.support, topk, arguments.packed, index_q.device,
    )  # fmt: skip


@torch.no_grad()
def oracle_topk(
    q: Tensor,
    k: Tensor,
    *,
    topk: int,
    scale: float | None = None,
    causal: bool = True,
    window: tuple[int, int] | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """The keys that attention attends to most, by the mean over heads of its softmax, streaming: the oracle.

    No selection of ``topk`` keys shared by all heads covers more of the attention's mass.

    Args:
        q: ``[B, H, Nq, D]``, or packed ``[Tq, H, D]``.
        k: ``[B, Hkv, Nk, D]``, or packed ``[Tk, Hkv, D]``, where ``Hkv`` divides ``H``.
        topk: How many keys a query gets.
        scale: Multiplies the products; ``1/sqrt(D)`` if not given.
        causal: Query ``i`` sees keys ``j <= i + Nk - Nq``.
        window: ``(left, right)`` keys around key ``i + Nk - Nq``; a negative side is unbounded.
        cu_seqlens_q: ``[sequences + 1]``: where each packed sequence's queries start, and the end.
        cu_seqlens_k: The same for the keys.
        lse: ``[B, H, Nq]``, packed ``[H, Tq]``: what `streamkl.attention_lse` returns; computed if not given.

    Returns:
        ``[B, Nq, topk]``, packed ``[Tq, topk]``, int32, in the order of `index_topk`.

    Example:
        >>> import torch
        >>> from streamkl.sparse import oracle_topk
        >>> q, k = torch.ones(1, 2, 3, 1), torch.tensor([[[[0.0], [2.0], [1.0]]]])
        >>> oracle_topk(q, k, topk=2)[0]
        tensor([[ 0, -1],
                [ 1,  0],
                [ 1,  2]], dtype=torch.int32)
    """
    check_count(topk)
    arguments = attention_arguments(q, k, scale, causal, window, cu_seqlens_q, cu_seqlens_k, lse)
    return _gathered(
        select(arguments.support, topk, lambda tile: attention_tile(arguments, tile)),
        arguments.support, topk, arguments.packed, q.device,
    )  # fmt: skip


class Selected(NamedTuple):
    """The best keys of a block of rows: ``keys [rows, topk]``, int32, best first, -1 for none."""

    batch: int
    rows: slice
    keys: Tensor


def select(support: Support, topk: int, tile_scores: Callable[[Tile], Tensor]) -> Iterator[Selected]:
    """Walks the blocks of rows that see a key; ``tile_scores`` gives ``[rows, keys]`` of a tile, before the mask."""
    for seq in support.sequences():
        for tiles in support.tiles(seq, BLOCK_Q, BLOCK_K):
            best = None
            for tile in tiles:
                candidates = Candidates.of_tile(mask_tile(tile_scores(tile), support, tile), tile, seq.k_start)
                best = candidates.best(topk) if best is None else best.and_then(candidates).best(topk)
            assert best is not None, "a block of live rows sees a tile"
            yield Selected(tiles[0].batch, tiles[0].rows, best.ordered(topk))


class Candidates(NamedTuple):
    """Scores and keys of a block of rows, each ``[rows, n]``, by rising key; a score of ``-inf`` is no candidate."""

    scores: Tensor
    keys: Tensor

    @classmethod
    def of_tile(cls, scores: Tensor, tile: Tile, k_start: int) -> Candidates:
        """All keys of a tile, counted from ``k_start``."""
        first, last = tile.keys.start - k_start, tile.keys.stop - k_start
        keys = torch.arange(first, last, dtype=torch.int32, device=scores.device)
        return cls(scores, keys.expand_as(scores))

    def and_then(self, later: Candidates) -> Candidates:
        """These and those of later keys."""
        return Candidates(torch.cat((self.scores, later.scores), -1), torch.cat((self.keys, later.keys), -1))

    def best(self, topk: int) -> Candidates:
        """The ``topk`` highest scores, still by rising key; of those that tie for the last places, the first keys.

        ``torch.topk`` alone may take any of them. It gives the lowest score that gets a place, and the rest follows.
        """
        if self.scores.shape[-1] <= topk:
            return self
        last = self.scores.topk(topk, -1, sorted=False).values.amin(-1, keepdim=True)
        above, level = self.scores > last, self.scores == last
        room = topk - above.sum(-1, keepdim=True)
        kept = above | (level & (level.cumsum(-1) <= room))
        at = kept.nonzero()[:, 1].view(-1, topk)  # every row keeps as many
        return Candidates(self.scores.gather(-1, at), self.keys.gather(-1, at))

    def ordered(self, topk: int) -> Tensor:
        """The keys by falling score, then rising key, filled up with -1: ``[rows, topk]``."""
        scores, order = self.scores.sort(dim=-1, descending=True, stable=True)
        keys = self.keys.gather(-1, order).masked_fill(scores == -torch.inf, -1)
        return torch.nn.functional.pad(keys, (0, topk - keys.shape[-1]), value=-1)


def _gathered(blocks: Iterator[Selected], support: Support, topk: int, packed: bool, device: torch.device) -> Tensor:
    out = torch.full((support.batch, support.nq, topk), -1, dtype=torch.int32, device=device)
    for batch, rows, keys in blocks:
        out[batch, rows] = keys
    return out[0] if packed else out
