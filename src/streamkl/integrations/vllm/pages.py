"""Keys and values in the pages of vLLM's caches."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

LAYOUTS = ("vec", "vec16")
"""The known layouts, by the instruction set that vLLM's CPU attention names: a page of a head holds its keys
transposed, ``[dim, tokens]``, and then its values, ``[tokens, dim]``. AMX, NEON and others have their own."""


def check_layout(name: str) -> None:
    """Refuses a layout that is not known.

    Raises:
        ValueError: It is not.
    """
    if name not in LAYOUTS:
        raise ValueError(
            f"the layout of vLLM's KV cache for {name!r} on this CPU is not known, only those for "
            f"{' and '.join(map(repr, LAYOUTS))}: serve with --dtype float32, or take 'streamkl' out of the config"
        )


class Pages(ABC):
    """A layer's KV cache.

    Attributes:
        cache: ``[pages, heads, tokens, 2 * dim]``, as vLLM shapes it.
    """

    def __init__(self, cache: Tensor) -> None:
        self.cache = cache

    @property
    @abstractmethod
    def keys(self) -> Tensor:
        """A view ``[pages, tokens, heads, dim]`` of the keys."""

    @property
    @abstractmethod
    def values(self) -> Tensor:
        """A view ``[pages, tokens, heads, dim]`` of the values."""

    def read_keys(self, pages: Tensor, length: int) -> Tensor:
        """The keys of a sequence, ``[length, heads, dim]``.

        Args:
            pages: ``[n]``: its pages.
            length: How many tokens it has.
        """
        return self.keys[pages.long()].flatten(0, 1)[:length]


class TransposedPages(Pages):
    """The layouts of CPUs that `check_layout` knows."""

    @property
    def keys(self) -> Tensor:
        """A view ``[pages, tokens, heads, dim]`` of the keys."""
        return self._half(0).unflatten(-1, (-1, self.cache.shape[2])).permute(0, 3, 1, 2)

    @property
    def values(self) -> Tensor:
        """A view ``[pages, tokens, heads, dim]`` of the values."""
        return self._half(1).unflatten(-1, (self.cache.shape[2], -1)).transpose(1, 2)

    def _half(self, which: int) -> Tensor:
        pages, heads, size, both = self.cache.shape
        return self.cache.view(pages, heads, 2, size * both // 2)[:, :, which]


class HalvedPages(Pages):
    """The layout of GPUs: a token's key and then its value, head by head.

    Heads or tokens may come first in memory (vLLM's HND and NHD): strides say which.
    """

    @property
    def keys(self) -> Tensor:
        """A view ``[pages, tokens, heads, dim]`` of the keys."""
        return self.cache.transpose(1, 2).chunk(2, -1)[0]

    @property
    def values(self) -> Tensor:
        """A view ``[pages, tokens, heads, dim]`` of the values."""
        return self.cache.transpose(1, 2).chunk(2, -1)[1]


def write_index_keys(cache: Tensor, slots: Tensor, index_k: Tensor) -> None:
    """Writes index keys to their pages.

    Args:
        cache: ``[pages, tokens, dim]``.
        slots: ``[T]``: where each token lies, counted over all pages; negative for none.
        index_k: ``[T, dim]``.
    """
    there = slots >= 0
    if not bool(there.all()):
        slots, index_k = slots[there], index_k[there]
    cache[slots // cache.shape[1], slots % cache.shape[1]] = index_k.to(cache.dtype)


def read_index_keys(cache: Tensor, pages: Tensor, length: int) -> Tensor:
    """The index keys of a sequence, ``[length, dim]``.

    Args:
        cache: ``[pages, tokens, dim]``.
        pages: ``[n]``: its pages.
        length: How many tokens it has.
    """
    return torch.index_select(cache, 0, pages.long()).flatten(0, 1)[:length]
