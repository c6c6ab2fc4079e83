"""The launches of a selection: scores of some query blocks for some keys at a time, and the best keys so far."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from streamkl.engines.triton.kernels.groups import RankCounts, ScoreCounts
from streamkl.engines.triton.kernels.sparse.selection import best_keys_kernel, block_scores_kernel
from streamkl.engines.triton.launch import Launch, Tiling
from streamkl.engines.triton.meta import padded
from streamkl.engines.triton.plans.arguments import query_block_support, side_arguments
from streamkl.problem import Problem, Side, Support

SCORES = 1 << 24
"""Scores that are held at a time: 64 MB."""
RANKED = 2048
"""Columns of the result that are ranked at a time, at most: their ranks stay in registers."""
PIECE = 512
"""Scores of a row that are ranked at a time, at least."""


class _Tiles(NamedTuple):
    """How query blocks are tiled: ``blocks`` of them in a tile of ``rows``, ``each`` rows of a block at a time.

    A batch element has ``in_batch`` of them.
    """

    rows: int
    each: int
    in_batch: int

    @property
    def blocks(self) -> int:
        return self.rows // self.each

    @classmethod
    def of(cls, tiling: Tiling, query_block: int, query_blocks: int) -> _Tiles:
        each = 1 << (query_block - 1).bit_length()
        rows = min(tiling.config.rows, padded(max(1, query_blocks) * each))
        each = min(each, rows)
        cu_seqlens = tiling.support.cu_seqlens_q
        if cu_seqlens is None:
            return cls(rows, each, math.ceil(query_blocks * each / rows))
        sequences = cu_seqlens.shape[0] - 1  # each may have a ragged tile
        return cls(rows, each, query_blocks * each // rows + sequences if sequences else 0)


def index_topk(
    support: Support,
    side: Side,
    q: Tensor,
    k: Tensor,
    w: Tensor | None,
    lse: Tensor | None,
    topk: int,
    query_block: int,
    query_blocks: int,
    arch: str,
) -> tuple[list[Launch], Tensor]:
    """The best keys ``[B, query_blocks, topk]``; there are ``query_blocks`` in a batch element.

    Beside the result it takes the scores of some keys for some query blocks and, where there are more keys than those,
    a rank of 8 bytes for each key that these blocks select.
    """
    tiling = Tiling(Problem(side, side, support), (q, k), arch, "selection", w is not None)
    tiles = _Tiles.of(tiling, query_block, query_blocks)
    found, count = min(topk, support.nk), support.batch * tiles.in_batch
    ranked = min(RANKED, padded(max(1, found)))
    piece = max(PIECE, ranked)
    step = max(piece, tiling.config.keys)
    at_once = max(1, min(count, SCORES // (step * tiles.blocks)))  # tiles
    rows = at_once * tiles.blocks
    chunk = max(1, min(SCORES // (rows * step), math.ceil(support.nk / step))) * step
    chunks, parts = range(0, support.nk, chunk), range(0, found, ranked)

    # Nobody writes the blocks past the last packed sequence, nor columns beyond as many as there are keys.
    out = torch.empty((support.batch, query_blocks, topk), dtype=torch.int32, device=q.device)
    if tiling.mask.packed or len(parts) * ranked < topk:
        out.fill_(-1)
    scores = torch.empty((rows, chunk), dtype=torch.float32, device=q.device)
    row = torch.empty(rows, dtype=torch.int64, device=q.device)
    best = torch.empty((rows, ranked), dtype=torch.int64, device=q.device) if len(chunks) > 1 else None
    bound = torch.empty(rows, dtype=torch.int64, device=q.device) if len(parts) > 1 else None
    given = {
        "side": side_arguments(side, q, k, w), "lse": None if lse is None else lse.float().contiguous(),
        "support": query_block_support(tiling, query_block), "scores_ptr": scores, "row_ptr": row,
    }  # fmt: skip
    constants = {
        "SIDE": tiling.b, "MASK": tiling.mask, "ROWS": tiles.rows, "KEYS": tiling.config.keys,
        "QUERY_BLOCK": query_block, "EACH": tiles.each,
    }  # fmt: skip
    ranking = {"ROWS": max(1, RANKED // piece), "KEYS": piece, "TOPK": ranked}
    warps = tiling.warps_of("ranking")

    launches = []
    for first_tile in range(0, count, at_once):
        here = min(at_once, count - first_tile)
        for first_column in parts:
            for first_key in chunks:
                columns = min(chunk, support.nk - first_key)
                key_tiles = math.ceil(columns / tiling.config.keys)
                first_key_tile = first_key // tiling.config.keys
                if first_column == 0 or len(chunks) > 1:  # else they are still there
                    counts = ScoreCounts(tiles.in_batch, first_tile, key_tiles, first_key_tile, query_blocks, chunk)
                    arguments = {**given, "counts": counts}
                    launches.append(tiling.launch(block_scores_kernel, here * key_tiles, arguments, constants))
                counts = RankCounts(here * tiles.blocks, columns, chunk, first_key, topk, first_column)
                arguments = {
                    "scores_ptr": scores, "row_ptr": row, "best_ptr": best, "bound_ptr": bound,
                    "out_ptr": out if first_key + columns == support.nk else None, "counts": counts,
                }  # fmt: skip
                programs = math.ceil(counts.rows / ranking["ROWS"])
                launches.append(Launch(best_keys_kernel, programs, arguments, ranking, warps, multiplies=False))
    return launches, out
