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
        self._starts: Tensor | None = None

    def tell(self, position_ids: Tensor | None, cu_seqlens: Tensor | None) -> None:
        """Takes up packed sequences that transformers leaves out of a mask where there is a cache.

        Args:
            position_ids: ``[B or 1, Nq]``: a position that does not follow the one before it starts a sequence.
            cu_seqlens: ``[sequences + 1]``: where the sequences of a batch of one row start, and the end.
        """
        a = self._arguments
        if self._told or a["attention_mask"] is not None:
            return
        self._told = True
        if int(a["q_offset"]) == 0:
            self._starts = _told_starts(a["batch_size"], a["q_length"], position_ids, cu_seqlens)

    def tensor(self, device: torch.device | None = None) -> Tensor | None:
        """``[B, 1, Nq, Nk]`` of bool, True for what is seen; ``None`` where ``is_causal`` says it all: SDPA's."""
        if not self._made:
            arguments = self._arguments
            if self._starts is not None:
                apart = packed_sequence_mask_function(self._starts.cumsum(-1))
                arguments = {
                    **arguments,
                    "mask_function": and_masks(arguments["mask_function"], apart),
                    "allow_is_causal_skip": False,
                }
            self._tensor, self._made = sdpa_mask(**arguments), True
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
            found = self._found_starts()
            starts = found if self._starts is None else self._starts
            self._layouts[device] = Layout.of(a["batch_size"], rows, keys, padding, starts).to(device)
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


class Unread:
    """A mask for a model that hands a part of it on to its indexer, which is ours and takes the mask itself."""

    def __init__(self, mask: Mask) -> None:
        self.mask = mask

    def __getitem__(self, index: Any) -> Mask:
        return self.mask


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


def _told_starts(batch: int, rows: int, position_ids: Tensor | None, cu_seqlens: Tensor | None) -> Tensor | None:
    """``[B, Nq]`` of bool, True where a caller says that a sequence starts; ``None`` if none does."""
    if cu_seqlens is not None and batch == 1:
        starts = torch.zeros(1, rows + 1, dtype=torch.bool, device=cu_seqlens.device)
        starts[0, cu_seqlens.long()] = True
        starts = starts[:, :rows]
        starts[0, 0] = False
    elif position_ids is not None and position_ids.dim() == 2 and position_ids.shape[1] == rows:
        starts = torch.zeros(batch, rows, dtype=torch.bool, device=position_ids.device)
        starts[:, 1:] = position_ids.diff(dim=-1) != 1
    else:
        return None
    return starts if bool(starts.any()) else None


def _not_causal(what: str) -> ValueError:
    return ValueError(
        f"sparse attention is causal, over padded or packed sequences, and this model's mask has {what}; "
        f"run the model with attn_implementation='sdpa'"
    )
