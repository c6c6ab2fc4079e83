"""What ranks exchange: keys to all of them, gradients of keys back to their owners, and sums of scalars."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from streamkl.distributed.layout import HeadTail

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name since torch 2.13


class Gathered:
    """A tensor on its way from all ranks; `whole` waits for it. A constant: gradients do not flow through it.

    Args:
        layout: Which tokens each rank holds.
        group: The ranks.
        local: The tokens of this rank, along ``dim``.
        dim: The dimension of the tokens.
    """

    def __init__(self, layout: HeadTail, group: dist.ProcessGroup, local: Tensor, dim: int) -> None:
        if local.shape[dim] != layout.length:
            raise ValueError(
                f"dimension {dim} must have the {layout.length} of {layout.tokens} tokens that rank {layout.rank} of "
                f"{layout.size} holds: got shape {list(local.shape)}"
            )
        self.layout, self.local, self.dim = layout, local.detach(), dim
        self._whole: Tensor | None = self.local if layout.size == 1 else None
        self._parts: Tensor | None = None
        self._work: Any = None
        if self._whole is None:
            own = self._padded()
            self._parts = own.new_empty((layout.size, *own.shape))
            self._work = _all_gather(self._parts.flatten(0, 1), own, group=group, async_op=True)

    def _padded(self) -> Tensor:
        """Both chunks of this rank, each as long as the longest chunk of any: a gather takes equal parts."""
        chunk, (head, tail) = self.layout.chunk, self.layout.spans
        lengths = [head[1] - head[0], tail[1] - tail[0]]
        if lengths == [chunk, chunk]:
            return self.local.contiguous()
        shape = list(self.local.shape)
        shape[self.dim] = 2 * chunk
        own = self.local.new_zeros(shape)
        for n, part in enumerate(self.local.split(lengths, self.dim)):
            own.narrow(self.dim, n * chunk, lengths[n]).copy_(part)
        return own

    def whole(self) -> Tensor:
        """All tokens in their order."""
        if self._whole is None:
            assert self._parts is not None
            self._work.wait()
            layout, chunks = self.layout, []
            for n, ranks in enumerate((range(layout.size), reversed(range(layout.size)))):
                for rank in ranks:
                    start, end = layout.spans_of(rank)[n]
                    chunks.append(self._parts[rank].narrow(self.dim, n * layout.chunk, end - start))
            self._whole = torch.cat(chunks, self.dim)
            self._parts = self._work = None
        return self._whole


def heads_to_tokens(layout: HeadTail, group: dist.ProcessGroup, x: Tensor) -> Tensor:
    """The tokens of this rank with the heads of all ranks, from all tokens with the heads of this rank.

    Args:
        layout: Which tokens each rank gets.
        group: The ranks.
        x: ``[B, heads, N, D]``; every rank has as many heads, and they are in the order of ranks.

    Returns:
        ``[B, size * heads, n, D]``. A constant.
    """
    batch, heads, _, dim = x.shape
    parts = [
        torch.cat([x[:, :, start:end] for start, end in layout.spans_of(rank)], 2).detach().flatten()
        for rank in range(layout.size)
    ]
    own = (batch, heads, layout.length, dim)
    received = x.new_empty((layout.size, *own))
    sizes = [len(part) for part in parts]
    dist.all_to_all_single(
        received.view(-1), torch.cat(parts), [torch.Size(own).numel()] * layout.size, sizes, group=group
    )
    return received.transpose(0, 1).flatten(1, 2)


class KeyGradient:
    """The gradient of all keys ``[B, heads, N, D]``, added up here and then over all ranks, each getting its own keys.

    Args:
        layout: Which keys each rank holds.
        keys: Those of this rank, ``[B, heads, n, D]``.
        dtype: In which gradients are added.
    """

    def __init__(self, layout: HeadTail, keys: Tensor, dtype: torch.dtype) -> None:
        self.layout = layout
        self.shapes = [(*keys.shape[:2], layout.length_of(rank), keys.shape[3]) for rank in range(layout.size)]
        self.sizes = [torch.Size(shape).numel() for shape in self.shapes]
        self.flat = torch.zeros(sum(self.sizes), dtype=dtype, device=keys.device)
        self.parts = [part.view(shape) for part, shape in zip(self.flat.split(self.sizes), self.shapes, strict=True)]

    def add(self, gradient: Tensor, first: int) -> None:
        """Adds the gradient of a run of keys that starts at key ``first``."""
        last = first + gradient.shape[2]
        for rank, part in enumerate(self.parts):
            own = 0
            for start, end in self.layout.spans_of(rank):
                low, high = max(start, first), min(end, last)
                if low < high:
                    part[:, :, own + low - start : own + high - start] += gradient[:, :, low - first : high - first]
                own += end - start

    def reduce(self, group: dist.ProcessGroup) -> Tensor:
        """The gradient of this rank's keys, the contributions of all ranks added in the order of ranks."""
        size, rank = self.layout.size, self.layout.rank
        if size == 1:
            return self.parts[0]
        # An exchange and a sum, not a reduction: the order of additions is then the same everywhere.
        received = self.flat.new_empty(size * self.sizes[rank])
        dist.all_to_all_single(received, self.flat, [self.sizes[rank]] * size, self.sizes, group=group)
        self.parts, self.flat = [], received
        total, *others = received.view(size, *self.shapes[rank]).unbind(0)
        total = total.clone()
        for other in others:
            total += other
        return total


class _Total(torch.autograd.Function):
    """The sum of a scalar over ranks. All ranks have the same loss, so its gradient is the upstream one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = x.detach().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        return upstream[0], None


def total(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of a scalar over ranks."""
    return _Total.apply(x, group)  # pyright: ignore[reportReturnType]
