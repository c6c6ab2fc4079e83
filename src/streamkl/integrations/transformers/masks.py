"""The mask arguments of transformers, kept as given; a mask of ``[Nq, Nk]`` is made only for dense layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    packed_sequence_mask_function,
    prepare_padding_mask,
    sdpa_mask,
)

from streamkl.integrations.transformers.layout import Layout


class Mask:
    """The arguments of a mask, from which a layer takes the form that it needs.

    A model makes it once per forward for all layers of a kind, and passes it as their attention mask. For a static
    cache ``generate`` makes it ahead, and uses it like a tensor.
    """

    ndim = 4

    def contiguous(self) -> Mask:
        """Itself."""
        return self

    def __init__(self, **arguments: Any) -> None:
        self._arguments = arguments
        self._tensor: Tensor | None = None
        self._made = self._packed = False
        self._layouts: dict[torch.device, Layout] = {}

    def tell(self, cu_seqlens: Tensor | None) -> None:
        """Adds the packed (varlen) sequences of a row to the mask, as flash attention does in transformers.

        Sequences given by ``position_ids`` are in the mask already, where transformers reads them.

        Args:
            cu_seqlens: ``[sequences + 1]``: where the sequences of a batch of one row start, and the end.

        Raises:
            ValueError: There are several rows, or keys of earlier calls.
        """
        if self._packed or cu_seqlens is None:
            return
        self._packed, a = True, self._arguments
        if a["attention_mask"] is not None and not bool(a["attention_mask"].all()):
            return  # flash attention takes the sequences of a padded batch from its padding
        if a["batch_size"] != 1 or int(a["q_offset"]) != 0:
            raise ValueError(
                f"cu_seq_lens_q packs a batch of one row with an empty cache: got {a['batch_size']} rows, and a cache "
                f"of {int(a['q_offset'])} tokens"
            )
        starts = torch.zeros(1, a["kv_length"] + 1, dtype=torch.long, device=a["device"])
        starts[0, cu_seqlens.to(starts.device).long()] = 1
        apart = packed_sequence_mask_function(starts.cumsum(-1))
        a["mask_function"], a["allow_is_causal_skip"] = and_masks(a["mask_function"], apart), False

    def tensor(self, device: torch.device | None = None) -> Tensor | None:
        """SDPA's mask: ``[B, 1, Nq, Nk]`` of bool, True for seen keys; ``None`` where ``is_causal`` is enough."""
        if not self._made:
            self._tensor, self._made = sdpa_mask(**self._arguments), True
        return self._tensor if self._tensor is None or device is None else self._tensor.to(device)

    def __getitem__(self, index: Any) -> Tensor:
        """A part of the mask, for models that index it."""
        tensor = self.tensor()
        assert tensor is not None, "a model that indexes its mask does not allow to leave it out"
        return tensor[index]

    def layout(self, device: torch.device) -> Layout:
        """The layout of sequences, for sparse layers.

        Raises:
            ValueError: The mask is not causal attention within sequences.
        """
        if device not in self._layouts:
            a = self._arguments
            rows, first = a["q_length"], a["kv_offset"]
            keys = int(a["q_offset"]) - first + rows  # a static cache has room for more
            padding = prepare_padding_mask(a["attention_mask"], a["kv_length"], first)
            if padding is not None:
                padding = padding[:, first : first + keys]
                padding = None if bool(padding.all()) else padding
            self._layouts[device] = Layout.of(a["batch_size"], rows, keys, padding, self._found_starts()).to(device)
        return self._layouts[device]

    def _found_starts(self) -> Tensor | None:
        """``[B, Nq]`` of bool, True where a query is the first of a packed sequence; ``None`` if none is.

        The mask is a function of indices. A few pairs are enough to recognise causal attention within sequences: a
        query and its own key, the keys before and after it, the first key of its sequence and the one before that.
        """
        a = self._arguments
        seen: Callable[..., Tensor] = a["mask_function"]
        if seen is causal_mask_function:
            return None
        if a["use_vmap"]:
            raise _not_causal("a function of the model's own")
        first = a["kv_offset"]
        batch = torch.arange(a["batch_size"], device=a["device"])[:, None]
        row = torch.arange(a["q_length"], device=a["device"])[None] + int(a["q_offset"])

        def ask(key: Tensor) -> Tensor:
            return seen(batch, torch.zeros_like(batch[:1]), row, key).expand(len(batch), row.shape[1])

        starts = ~ask((row - 1).clamp(min=first)) & (row > first)
        start = torch.where(starts, row, first).cummax(-1).values
        after = (row + 1).clamp(max=int(row[0, -1]))
        if not (ask(row) & ask(start)).all():
            raise _not_causal("a query that does not see its own key, or not the first of its sequence")
        if (ask(after) & (after > row)).any() or (ask((start - 1).clamp(min=first)) & (start > first)).any():
            raise _not_causal("a query that sees a key after it, or of another sequence")
        return starts if bool(starts.any()) else None


def streamkl_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | Mask | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **arguments: Any,
) -> Mask:
    """The mask of all attention implementations of StreamKL, for ``AttentionMaskInterface``."""
    if isinstance(attention_mask, Mask):  # ``generate`` may have made it ahead of the model
        return attention_mask
    if isinstance(q_offset, Tensor):  # the counter of a static cache, which changes later
        q_offset = q_offset.clone()
    return Mask(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
        mask_function=mask_function, attention_mask=attention_mask, use_vmap=use_vmap, device=device, **arguments,
    )  # fmt: skip


def _not_causal(what: str) -> ValueError:
    return ValueError(
        f"sparse attention is causal, over padded or packed sequences, and this model's mask has {what}; "
        f"run the model with attn_implementation='sdpa'"
    )
