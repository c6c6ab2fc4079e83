"""Index keys of earlier calls, kept in the KV cache's own layers, so that whatever happens to those happens to them.

Beam search reorders a cache, assisted decoding crops it, sampling repeats its batch, a chat resets it. A cache layer
that holds index keys becomes, in place, of a class of its own that does all of this to them too.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor


def extended(cache: Any, layer: int, new: Tensor, before: int) -> Tensor:
    """Appends index keys, and returns all.

    Args:
        cache: The KV cache, which has this call's keys already.
        layer: The number of the layer.
        new: ``[B, N, D]``: the index keys of this call.
        before: How many keys the layer had before it.

    Returns:
        ``[B, before + N, D]``.

    Raises:
        ValueError: The layer does not hold an index key for each of its keys.
    """
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
    """A class of cache layers that do to their index keys ``[B, N, D]`` what they do to their keys."""

    class WithIndexKeys(cls):
        _layer_type = None  # transformers would make layers of a named class for other caches
        index_keys: Tensor | None

        def reset(self) -> None:
            super().reset()
            self.index_keys = None

        def crop(self, tokens_to_remove: int) -> None:
            super().crop(tokens_to_remove)
            if self.index_keys is not None and tokens_to_remove:
                self.index_keys = self.index_keys[:, : -abs(tokens_to_remove)]

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
