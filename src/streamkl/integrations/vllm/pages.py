"""Keys and values in the pages of vLLM's CPU caches."""

from __future__ import annotations

from typing import NamedTuple

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


class KeyValuePages(NamedTuple):
    """A layer's KV cache.

    Attributes:
        cache: ``[pages, heads, tokens, 2 * dim]``, as vLLM shapes it.
    """

    cache: Tensor

    @property
    def size(self) -> int:
        """Tokens per page."""
        return self.cache.shape[2]

    @property
    def keys(self) -> Tensor:
        """A view ``[pages, tokens, heads, dim]`` of the keys."""
        return self._half(0).unflatten(-1, (-1, self.size)).permute(0, 3, 1, 2)

    @property
    def values(self) -> Tensor:
        """A view ``[pages, tokens, heads, dim]`` of the values."""
        return self._half(1).unflatten(-1, (self.size, -1)).transpose(1, 2)

    def _half(self, which: int) -> Tensor:
        pages, heads, size, both = self.cache.shape
        return self.cache.view(pages, heads, 2, size * both // 2)[:, :, which]

    def read_keys(self, pages: Tensor, length: int) -> Tensor:
        """The keys of a sequence, ``[length, heads, dim]``.

        Args:
            pages: ``[n]``: its pages.
            length: How many tokens it has.
        """
        return self.keys[pages.long()].flatten(0, 1)[:length]


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
