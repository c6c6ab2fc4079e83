"""Index keys of earlier calls, kept in the layers of the KV cache, so that they follow every change of the cache.

Beam search reorders a cache, assisted decoding crops it, sampling repeats its batch, a chat resets it. A cache layer
with index keys gets, in place, a class that does all of this to its index keys, too.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor


def extended(cache: Any, layer: int, new: Tensor, before: int) -> Tensor:
    """Appends index keys, and returns all.

    Args:
        cache: The KV cache, which already has the keys of this call.
        layer: The number of the layer.
        new: ``[B, N, D]``: the index keys of this call.
        before: How many keys the layer had before it.

    Returns:
        ``[B, before + N, D]``.

    Raises:
        ValueError: The cache has no such layer, or it does not hold an index key for each of its keys.
    """
    if layer >= len(cache.layers):
        raise ValueError(
            f"the cache has no layer {layer}, which attends to the keys of another: its index keys have no place; call "
            f"the model with use_cache=False"
        )
    holder = cache.layers[layer]
    if not hasattr(holder, "index_keys"):
        holder.__class__ = _with_index_keys(type(holder))
        holder.index_keys = None
    held = holder.index_keys
    there = 0 if held is None else held.shape[1]
    if there != before:
        raise ValueError(
            f"layer {layer} of the cache has {before} keys but {there} index keys: it was filled without this indexer, "
            f"or changed by other means than its own methods; start from an empty cache"
        )
    if held is not None and held.shape[0] != new.shape[0]:
        raise ValueError(
            f"layer {layer} of the cache has index keys of {held.shape[0]} sequences: got {new.shape[0]} sequences"
        )
    holder.index_keys = new if held is None else torch.cat((held.to(new.device), new), 1)
    return holder.index_keys


@functools.cache
def _with_index_keys(cls: Any) -> type:
    """A class of cache layers whose index keys ``[B, N, D]`` follow the changes of their keys."""

    class WithIndexKeys(cls):
        _layer_type = None  # transformers would make layers of a named class for other caches
        index_keys: Tensor | None

        def reset(self) -> None:
            super().reset()
            self.index_keys = None

        def crop(self, tokens: int) -> None:
            super().crop(tokens)  # how many to take away, or in earlier versions how many to leave
            if self.index_keys is None:
                return
            if hasattr(self, "get_seq_length"):
                left = self.get_seq_length()
            else:  # a layer that attends to the keys of another has none itself
                left = tokens if tokens > 0 else self.index_keys.shape[1] + tokens
            self.index_keys = self.index_keys[:, :left]

        def reorder_cache(self, beam_idx: Tensor) -> None:
            super().reorder_cache(beam_idx)
            if self.index_keys is not None:
                self.index_keys = self.index_keys.index_select(0, beam_idx.to(self.index_keys.device))

        def batch_repeat_interleave(self, repeats: int) -> None:
            super().batch_repeat_interleave(repeats)
            if self.index_keys is not None:
                self.index_keys = self.index_keys.repeat_interleave(repeats, 0)

        def batch_select_indices(self, indices: Tensor) -> None:
            super().batch_select_indices(indices)
            if self.index_keys is not None:
                self.index_keys = self.index_keys[indices]

        def offload(self) -> None:
            super().offload()
            if self.index_keys is not None:
                self.index_keys = self.index_keys.to("cpu", non_blocking=True)

    return WithIndexKeys
