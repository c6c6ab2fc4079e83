"""The plain PyTorch engine's selection: the best keys of each query block, tile by tile.

A block of rows keeps its best keys so far while it walks the tiles of keys, so memory is ``O(Nq * topk)`` for the
result and a constant beside it. Equal scores go to the lower key, so that the result depends neither on tiles nor on
how a device sorts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from streamkl.problem import Sequence, Side, Support, Tile

BLOCK_Q, BLOCK_K = 256, 2048
"""Rows and keys of a tile: wide, because the keys that a row keeps are ranked again at every tile."""


def index_topk_less_lse(
    support: Support,
    side: Side,
    q: Tensor,
    k: Tensor,
    w: Tensor | None,
    lse: Tensor | None,
    topk: int,
    query_block: int,
) -> Tensor:
    """The keys of an indexer's highest scores, ``[B, query_blocks, topk]``; ``w [B, J, Nq]``, ``lse [B, 1, Nq]``."""

    def scores(tile: Tile) -> Tensor:
        keys = k[tile.batch, 0, tile.keys].to(dtype)
        total = torch.zeros((), dtype=dtype, device=q.device)
        for head in range(side.heads):
            x = q[tile.batch, head, tile.rows].to(dtype) @ keys.mT * side.scale
            x = x.relu() if side.relu else x
            total = total + (x if w is None else x * w[tile.batch, head, tile.rows, None].to(dtype))
        return total if lse is None else total - lse[tile.batch, 0, tile.rows, None].to(dtype)

    dtype = torch.promote_types(q.dtype, torch.float32)
    return _best_keys(support, topk, query_block, scores, q.device)


def attention_topk(
    support: Support, side: Side, q: Tensor, k: Tensor, lse: Tensor, topk: int, query_block: int
) -> Tensor:
    """The keys of the highest head-mean attention, ``[B, query_blocks, topk]``; ``lse [B, H, Nq]``."""

    def scores(tile: Tile) -> Tensor:
        total = torch.zeros((), dtype=dtype, device=q.device)
        for head in range(side.heads):
            keys = k[tile.batch, side.kv_head(head), tile.keys].to(dtype)
            a = (q[tile.batch, head, tile.rows].to(dtype) @ keys.mT).mul_(side.scale)
            total = total + a.sub_(lse[tile.batch, head, tile.rows, None].to(dtype)).exp_()
        return total.div_(side.heads)

    dtype = torch.promote_types(q.dtype, torch.float32)
    return _best_keys(support, topk, query_block, scores, q.device)


def _best_keys(
    support: Support, topk: int, query_block: int, tile_scores: Callable[[Tile], Tensor], device: torch.device
) -> Tensor:
    """The best keys of every query block; ``tile_scores`` gives ``[rows, keys]`` of a tile, before the mask."""
    out = torch.full(
        (support.batch, support.query_block_count(query_block), topk), -1, dtype=torch.int32, device=device
    )
    step = max(1, BLOCK_Q // query_block) * query_block
    for seq, first_block in support.query_blocks(query_block):
        first, last = support.live_rows(seq)
        for i0 in range(first // query_block * query_block, last, step):
            start, end = max(i0, first), min(i0 + step, last)
            best = None
            for tile in support.row_tiles(seq, start, end, BLOCK_K):
                scores = _masked(tile_scores(tile), support, tile)
                if query_block > 1:
                    scores = _block_scores(scores, query_block, start - i0)
                    _favour_diagonal(scores, seq, tile, i0, start, end, query_block)
                candidates = Candidates.of_tile(scores, tile, seq.k_start)
                best = candidates.best(topk) if best is None else best.and_then(candidates).best(topk)
            assert best is not None, "a block of live rows sees a tile"
            at = first_block + i0 // query_block
            out[seq.batch, at : at + best.keys.shape[0]] = best.ordered(topk)
    return out


def _masked(x: Tensor, support: Support, tile: Tile) -> Tensor:
    """``x [rows, keys]`` with ``-inf`` at the pairs of the tile that are not allowed, and at nan."""
    disallowed = support.disallowed(tile, x.device)
    return x.masked_fill(x.isnan() if disallowed is None else x.isnan() | disallowed, -torch.inf)


def _block_scores(scores: Tensor, query_block: int, before: int) -> Tensor:
    """The highest score per query block, ``[query_blocks, keys]``; ``before`` rows of the first are missing."""
    after = -(before + scores.shape[0]) % query_block
    scores = torch.nn.functional.pad(scores, (0, 0, before, after), value=-torch.inf)
    highest = torch.finfo(scores.dtype).max  # inf is reserved for the diagonal
    return scores.unflatten(0, (-1, query_block)).amax(1).clamp_(max=highest)


def _favour_diagonal(
    scores: Tensor, seq: Sequence, tile: Tile, i0: int, start: int, end: int, query_block: int
) -> None:
    """Puts the keys on the diagonal of each query block before all others; rows are ``[start, end)``."""
    keys = torch.arange(tile.keys.start - seq.k_start, tile.keys.stop - seq.k_start, device=scores.device)
    row = torch.arange(scores.shape[0], device=scores.device)[:, None] * query_block + i0  # the first of each block
    first, last = row.clamp(min=start) + seq.diagonal, (row + query_block).clamp(max=end) + seq.diagonal
    scores.masked_fill_((keys >= first) & (keys < last), torch.inf)


class Candidates(NamedTuple):
    """Scores and keys of rows, each ``[rows, n]``, by rising key; a score of ``-inf`` is no candidate."""

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

        ``torch.topk`` alone may take any of a tie, so it only gives the lowest score that gets a place.
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
