"""The layout of a batch as packed (varlen) sequences: padding is left out, and packed rows are split."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from streamkl.sparse import IndexTensors


class Layout(NamedTuple):
    """A batch of ``[B, Nq]`` queries and ``[B, Nk]`` keys as packed sequences.

    Attributes:
        keys: How many keys a row of the batch has; a cache may have room for more.
        cu_seqlens_q: ``[sequences + 1]``: where each packed sequence's queries start, and the end; ``None`` if every
            row of the batch is one whole sequence, and nothing needs to be packed.
        cu_seqlens_k: The same for the keys.
        query_at: ``[Tq]``: where each packed query lies in the batch, counted row by row; ``None`` if all are packed.
        key_at: ``[Tk]``: the same for the keys.
    """

    keys: int
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    query_at: Tensor | None = None
    key_at: Tensor | None = None

    @classmethod
    def of(cls, batch: int, rows: int, keys: int, padding: Tensor | None, starts: Tensor | None) -> Layout:
        """From padding and the starts of sequences.

        Args:
            batch: Rows of the batch.
            rows: Queries in each, the last of its keys.
            keys: Keys in each.
            padding: ``[B, Nk]`` of bool, False for padding; ``None`` for none.
            starts: ``[B, Nq]`` of bool, True where a query is the first of a packed sequence.
        """
        if padding is None and starts is None:
            return cls(keys)
        given = padding if padding is not None else starts
        assert given is not None, "one of them is given"
        number = torch.zeros(batch, keys, dtype=torch.long, device=given.device)  # of a key's sequence, in its row
        if starts is not None:
            number[:, keys - rows :] = starts.cumsum(-1)
        number += torch.arange(batch, device=given.device)[:, None] * (int(number.max()) + 1)
        parts, sequences = (number[:, keys - rows :], number), int(number.max()) + 1
        if padding is None:
            at = (None, None)
            counted = tuple(part.flatten() for part in parts)
        else:
            at = tuple(part.flatten().nonzero()[:, 0] for part in (padding[:, keys - rows :], padding))
            counted = tuple(part.flatten()[where] for part, where in zip(parts, at, strict=True))
        starts_q, starts_k = (
            torch.nn.functional.pad(part.bincount(minlength=sequences).cumsum(0), (1, 0)).int() for part in counted
        )
        return cls(keys, starts_q, starts_k, *at)

    def to(self, device: torch.device) -> Layout:
        """The same on another device."""
        return Layout(self.keys, *(None if x is None else x.to(device) for x in self[1:]))

    @property
    def packed(self) -> bool:
        """Whether tensors are packed."""
        return self.cu_seqlens_q is not None

    def queries(self, x: Tensor) -> Tensor:
        """``x [B, H, Nq, D]`` as it is, or packed ``[Tq, H, D]``."""
        return _pack(x, self.query_at) if self.packed else x

    def all_keys(self, x: Tensor) -> Tensor:
        """``x [B, H, Nk, D]`` without the free room of a cache, or packed ``[Tk, H, D]``."""
        x = x[:, :, : self.keys]
        return _pack(x, self.key_at) if self.packed else x

    def index_tensors(self, index: IndexTensors) -> IndexTensors:
        """The tensors of an indexer, all keys among them, as they are or packed."""
        q, k, w = index
        w = None if w is None else self.queries(w.unsqueeze(1)).squeeze(1)
        return IndexTensors(self.queries(q), self.all_keys(k.unsqueeze(1)).squeeze(1), w)

    def back(self, x: Tensor, batch: int, rows: int) -> Tensor:
        """``x [B, H, Nq, D]`` or packed ``[Tq, H, D]`` as ``[B, Nq, H, D]`` for transformers; 0 for padding."""
        if not self.packed:
            return x.transpose(1, 2).contiguous()
        if self.query_at is not None:
            x = x.new_zeros(batch * rows, *x.shape[1:]).index_copy(0, self.query_at, x)
        return x.reshape(batch, rows, *x.shape[1:])


def _pack(x: Tensor, at: Tensor | None) -> Tensor:
    """``[B, H, N, D]`` as ``[B * N, H, D]``, or only the tokens ``at``."""
    x = x.transpose(1, 2).flatten(0, 1)
    return x if at is None else x[at]
