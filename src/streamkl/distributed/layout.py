"""Which tokens of a sequence each rank holds, and the calls of an operator that cover its queries."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class HeadTail:
    """A sequence in ``2 * size`` chunks: rank ``r`` holds chunk ``r`` and chunk ``2 * size - 1 - r``, in this order.

    One chunk from the head and one from the tail: under a causal mask every rank has the same work. Chunks differ by
    at most one token, so any length is cut.

    Args:
        tokens: The length of the sequence.
        rank: This rank.
        size: How many ranks share the sequence.

    Examples:
        >>> from streamkl.distributed import HeadTail
        >>> HeadTail(16, rank=1, size=2).spans
        ((4, 8), (8, 12))
        >>> HeadTail(10, rank=0, size=2).positions().tolist()
        [0, 1, 7, 8, 9]
    """

    def __init__(self, tokens: int, rank: int, size: int) -> None:
        self.tokens, self.rank, self.size = tokens, rank, size
        self.bounds = [chunk * tokens // (2 * size) for chunk in range(2 * size + 1)]

    def spans_of(self, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """The two runs of tokens that a rank holds, each ``(start, end)``."""
        last = 2 * self.size - 1
        head, tail = (self.bounds[chunk : chunk + 2] for chunk in (rank, last - rank))
        return (head[0], head[1]), (tail[0], tail[1])

    @property
    def spans(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """The two runs of tokens of this rank."""
        return self.spans_of(self.rank)

    def length_of(self, rank: int) -> int:
        """How many tokens a rank holds."""
        return sum(end - start for start, end in self.spans_of(rank))

    @property
    def length(self) -> int:
        """How many tokens this rank holds."""
        return self.length_of(self.rank)

    @property
    def chunk(self) -> int:
        """The tokens of the longest chunk."""
        return -(-self.tokens // (2 * self.size))

    def shard(self, x: Tensor, dim: int) -> Tensor:
        """The tokens of this rank, of a tensor that has all of them along ``dim``."""
        if x.shape[dim] != self.tokens:
            raise ValueError(f"dimension {dim} must have all {self.tokens} tokens: got shape {list(x.shape)}")
        return torch.cat([x.narrow(dim, start, end - start) for start, end in self.spans], dim)

    def positions(self, device: torch.device | str | None = None) -> Tensor:
        """The positions of this rank's tokens in the sequence, int64."""
        return torch.cat([torch.arange(start, end, device=device) for start, end in self.spans])


class Segment(NamedTuple):
    """One call of an operator: a run of this rank's queries against a run of all keys, with the window between them.

    ``starts_q`` and ``starts_k`` delimit packed sequences, counted from the first query and key of the run.
    """

    rows: slice
    keys: slice
    left: int | None
    right: int | None
    starts_q: tuple[int, ...] | None = None
    starts_k: tuple[int, ...] | None = None


class _Piece(NamedTuple):
    """The part of a sequence that lies in a span: its rows, the keys they may see, and the window between the two."""

    q_end: int
    k_start: int
    k_end: int
    window: tuple[int | None, int | None]


def segments(
    queries: HeadTail,
    key_tokens: int,
    left: int | None,
    right: int | None,
    starts: tuple[Sequence[int], Sequence[int]] | None,
    cut_before: bool,
) -> list[Segment]:
    """The calls that cover the queries of a rank, in their order, each query in one.

    Operators are aligned bottom-right: the last query of a call lies on its last key, so a span takes the keys up to
    the last that it may see. Where that key is not the last query's own, the window moves by the distance between them.

    Args:
        queries: The layout of the queries.
        key_tokens: How many keys there are in all.
        left: Keys before a query's own that it sees; ``None`` for all.
        right: Keys after it; 0 is causal.
        starts: Where packed sequences of queries and of keys start, and the end.
        cut_before: Whether keys before the window are left out: not where keys are selected by their number.
    """
    found, first = [], 0
    for start, end in queries.spans:
        sequences = [(0, queries.tokens, 0, key_tokens)] if starts is None else _sequences(*starts, start, end)
        pieces = [_piece(sequence, start, end, left, right, cut_before) for sequence in sequences]
        begin = start
        for window, group in itertools.groupby(pieces, key=lambda piece: piece.window):
            run = list(group)
            stop = end if run[-1] is pieces[-1] else run[-1].q_end  # rows past the last sequence belong to the last
            rows, keys = slice(first, first + stop - begin), slice(run[0].k_start, run[-1].k_end)
            packed = (None, None)
            if starts is not None:
                packed = (0, *(p.q_end - begin for p in run)), (0, *(p.k_end - keys.start for p in run))
            found.append(Segment(rows, keys, *window, *packed))
            first, begin = rows.stop, stop
        if begin < end:  # no sequence at all: rows that see nothing
            found.append(Segment(slice(first, first + end - begin), slice(0, 0), left, right, (0,), (0,)))
            first += end - begin
    return [segment for segment in found if segment.rows.start < segment.rows.stop]


def _sequences(
    starts_q: Sequence[int], starts_k: Sequence[int], start: int, end: int
) -> list[tuple[int, int, int, int]]:
    """The packed sequences with queries in a span, and those without any between them: keys are one run."""
    every = [
        (*rows, *keys) for rows, keys in zip(itertools.pairwise(starts_q), itertools.pairwise(starts_k), strict=True)
    ]
    inside = [n for n, (first, last, *_) in enumerate(every) if first < last and first < end and last > start]
    return every[inside[0] : inside[-1] + 1] if inside else []


def _piece(
    sequence: tuple[int, int, int, int], start: int, end: int, left: int | None, right: int | None, cut_before: bool
) -> _Piece:
    q_first, q_last, k_first, k_last = sequence
    q_len, k_len = q_last - q_first, k_last - k_first
    begin, stop = max(start, q_first) - q_first, min(end, q_last) - q_first
    on_last = stop + k_len - q_len  # one past the key that the last row of the piece lies on
    last = k_len if right is None else min(k_len, max(0, on_last + right))
    first = 0
    if cut_before and left is not None and begin > 0:
        first = min(last, max(0, begin + k_len - q_len - left))
    moved = last - on_last if last > 0 else 0
    window = (None if left is None else left + moved, None if right is None else right - moved)
    return _Piece(q_first + stop, k_first + first, k_first + last, window)
