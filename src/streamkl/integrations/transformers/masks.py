"""What transformers says of a call's mask, kept as it was said; a mask of ``[Nq, Nk]`` is for dense layers alone."""

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

    A model makes it once a forward for all layers of a kind, and hands it to them as their attention mask. For a static
    cache ``generate`` makes it ahead, and asks of it what it would ask of a tensor.
    """

    ndim = 4

    def contiguous(self) -> Mask:
        """Itself."""
        return self

    def __init__(self, **arguments: Any) -> None:
        self._arguments = arguments
        self._tensor: Tensor | None = None
        self._made = self._told = False
        self._layouts: dict[torch.device, Layout] = {}

    def tell(self, cu_seqlens: Tensor | None) -> None:
        """Takes up the sequences of a packed row that a caller names, as flash attention does in transformers.

        Those that ``position_ids`` tell are in the mask already, where transformers reads them.

        Args:
            cu_seqlens: ``[sequences + 1]``: where the sequences of a batch of one row start, and the end.

        Raises:
            ValueError: There are several rows, or keys of earlier calls.
        """
        if self._told or cu_seqlens is None:
            return
        self._told, a = True, self._arguments
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
        """``[B, 1, Nq, Nk]`` of bool, True for what is seen; ``None`` where ``is_causal`` says it all: SDPA's."""
        if not self._made:
            self._tensor, self._made = sdpa_mask(**self._arguments), True
        return self._tensor if self._tensor is None or device is None else self._tensor.to(device)

    def __getitem__(self, index: Any) -> Tensor:
        """A part of the mask, for models that look into it."""
        tensor = self.tensor()
        assert tensor is not None, "a model that looks into its mask forbids to leave it out"
        return tensor[index]

    def layout(self, device: torch.device) -> Layout:
        """Where sequences lie, for sparse layers.

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

        The mask is a function of indices. The pairs that tell causal attention within sequences from all else are few:
        a query and its own key, those before and after it, and the first key of its sequence and the one before that.
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
    """The mask of every attention implementation of StreamKL, as ``AttentionMaskInterface`` wants it."""
    if isinstance(attention_mask, Mask):  # ``generate`` may have made it ahead of the model
        return attention_mask
    if isinstance(q_offset, Tensor):  # a static cache's own counter, which counts on
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
