"""Head groups that select keys for themselves: each group is a sequence of a larger batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class HeadGroups:
    """How the heads of a call are laid out as ``count`` times as many sequences, each with the heads of one group.

    Attributes:
        count: How many groups there are; a group has consecutive query heads, and its own key heads.
        packed: Whether tensors are packed, ``[T, H, D]``, or ``[B, H, N, D]``.
    """

    count: int
    packed: bool

    def check(self, **of_heads: Tensor) -> None:
        """Checks that the heads of tensors, by their names, can be cut into the groups."""
        for name, x in of_heads.items():
            if not isinstance(x, Tensor) or x.dim() < 2:
                raise ValueError(f"{name} must be a tensor with heads: got {type(x).__name__}")
            if self.count < 1 or x.shape[1] % self.count:
                raise ValueError(
                    f"head groups that select keys for themselves must divide the {x.shape[1]} heads of {name}: "
                    f"got {self.count}"
                )

    def split(self, x: Tensor) -> Tensor:
        """``[B * count, H / count, N, D]`` of ``[B, H, N, D]``, ``[count * T, H / count, D]`` of ``[T, H, D]``."""
        if not self.packed:
            return x.unflatten(1, (self.count, -1)).flatten(0, 1)
        return x.unflatten(1, (self.count, -1)).transpose(0, 1).flatten(0, 1)

    def join(self, x: Tensor) -> Tensor:
        """The inverse of `split`."""
        x = x.unflatten(0, (self.count, -1) if self.packed else (-1, self.count))
        return x.transpose(0, 1).flatten(1, 2) if self.packed else x.flatten(1, 2)

    def split_rows(self, x: Tensor) -> Tensor:
        """``[B, H, N]`` as ``[B * count, H / count, N]``; packed ``[H, T]`` as ``[H / count, count * T]``."""
        if not self.packed:
            return self.split(x)
        return x.unflatten(0, (self.count, -1)).transpose(0, 1).flatten(1, 2)

    def join_rows(self, x: Tensor) -> Tensor:
        """The inverse of `split_rows`."""
        return self.join(x) if not self.packed else x.unflatten(1, (self.count, -1)).transpose(0, 1).flatten(0, 1)

    def sequences(
        self, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, queries: int, keys: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """``cu_seqlens_q`` and ``cu_seqlens_k`` of all groups, one after another.

        Queries past the last sequence of a group are one without keys, and so are such keys without queries.

        Args:
            cu_seqlens_q: Of one group.
            cu_seqlens_k: The same for the keys.
            queries: How many queries a group has, with those past its last sequence.
            keys: How many keys.
        """
        if cu_seqlens_q is None or cu_seqlens_k is None:
            return cu_seqlens_q, cu_seqlens_k
        of_q = torch.cat((cu_seqlens_q, cu_seqlens_q.new_full((1,), queries)))
        of_k = torch.cat((cu_seqlens_k, cu_seqlens_k[-1:]))
        starts = torch.arange(self.count, device=of_q.device)[:, None]
        return (starts * queries + of_q).flatten().to(of_q), (starts * keys + of_k).flatten().to(of_k)

    def split_indices(self, indices: Tensor) -> Tensor:
        """``[B * count, blocks, K]`` of ``[B, count, blocks, K]``; ``[count * blocks, K]`` of packed ones."""
        return indices.flatten(0, 1)

    def join_indices(self, indices: Tensor) -> Tensor:
        """The inverse of `split_indices`."""
        return indices.unflatten(0, (self.count, -1) if self.packed else (-1, self.count))
