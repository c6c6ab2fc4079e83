"""A step of vLLM's, split into the rows that attend to all keys and those that attend to selected ones."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Sequence(NamedTuple):
    """Tokens of one sequence in a step, whose keys are selected.

    Attributes:
        first: The row of the first of them in the step's tensors.
        start: The position of the first of them in the sequence.
        end: The length of the sequence, these tokens included.
        pages: ``[pages]``: which pages of the caches hold the sequence.
    """

    first: int
    start: int
    end: int
    pages: Tensor

    @property
    def rows(self) -> slice:
        """The rows of the step's tensors."""
        return slice(self.first, self.first + self.end - self.start)

    def segments(self, query_block: int) -> list[Sequence]:
        """Its tokens, cut where the first whole query block of the sequence starts.

        Chunks start with query blocks where `AlignedScheduler` made them; there is one segment then.
        """
        cut = min(-(-self.start // query_block) * query_block, self.end)
        return [
            Sequence(self.first + start - self.start, start, end, self.pages)
            for start, end in ((self.start, cut), (cut, self.end))
            if start < end
        ]


class Packed(NamedTuple):
    """Several sequences as a packed batch.

    Attributes:
        rows: ``[T]``: their rows of the step's tensors.
        cu_seqlens_q: ``[sequences + 1]``: where the rows of each start, and the end.
        cu_seqlens_k: ``[sequences + 1]``: where the keys of each start, and the end.
        page_table: ``[sequences, n]``: which pages hold each.
    """

    rows: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    page_table: Tensor

    @classmethod
    def of(cls, sequences: list[Sequence], device: torch.device) -> Packed:
        """Packs sequences, on a device."""
        rows = torch.cat([torch.arange(each.rows.start, each.rows.stop) for each in sequences])
        starts_q, starts_k = (
            torch.nn.functional.pad(torch.tensor(lengths).cumsum(0), (1, 0))
            for lengths in ([each.end - each.start for each in sequences], [each.end for each in sequences])
        )
        table = torch.nn.utils.rnn.pad_sequence([each.pages for each in sequences], batch_first=True)
        return cls(*(x.to(device) for x in (rows, starts_q, starts_k, table)))


class Split(NamedTuple):
    """The requests of a step.

    Attributes:
        sparse: Those whose keys are selected.
        dense: ``[requests]``: the numbers of the others.
    """

    sparse: list[Sequence]
    dense: Tensor


def split(
    starts: Tensor, lengths: Tensor, pages: Tensor, is_prompt: Tensor | None, page_size: int, sparse_decode: bool
) -> Split:
    """Splits a step.

    Args:
        starts: ``[requests + 1]``: the first row of each request, and the end.
        lengths: ``[requests]``: how long each sequence is, this step's tokens included.
        pages: ``[requests, pages]``: which pages hold each sequence.
        is_prompt: ``[requests]``: whether a request has tokens of its prompt in this step; if it is not given, those
            with several tokens have.
        page_size: Tokens per page.
        sparse_decode: Whether decoded tokens select keys, too.

    Returns:
        The sparse and the dense requests; those without tokens are in neither.
    """
    first, length = starts.tolist(), lengths.tolist()
    sparse, dense = [], []
    for n, end in enumerate(length):
        tokens = first[n + 1] - first[n]
        if tokens == 0:  # a request that pads the batch has no entry in is_prompt
            continue
        prompt = tokens > 1 if is_prompt is None else bool(is_prompt[n])
        if prompt or sparse_decode:
            held = pages[n, : -(-end // page_size)]
            sparse.append(Sequence(first[n], end - tokens, end, held))
        else:
            dense.append(n)
    return Split(sparse, torch.tensor(dense, dtype=torch.long))


def rows_of(starts: Tensor, requests: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of some requests, and where each of them starts among these.

    Args:
        starts: ``[all requests + 1]``: the first row of each request, and the end.
        requests: ``[requests]``: their numbers.

    Returns:
        ``[rows]``, and ``[requests + 1]`` in the dtype of ``starts``.
    """
    counts = (starts[1:] - starts[:-1])[requests]
    ends = counts.cumsum(0)
    own = torch.nn.functional.pad(ends, (1, 0)).to(starts.dtype)
    rows = torch.arange(int(own[-1])) + (starts[:-1][requests] - own[:-1]).repeat_interleave(counts)
    return rows.long(), own
