"""The mask arguments of transformers, kept as given; a mask of ``[Nq, Nk]`` is made only for dense layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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

VARLEN = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""The arguments by which flash attention is told where packed sequences are: all of them."""


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
        self._sequences: Sequences | None = None

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
        return self.sequences.layout(device)

    @property
    def sequences(self) -> Sequences:
        """The sequences of the batch, and the window."""
        if self._sequences is None:
            self._sequences = Sequences.of(**self._arguments)
        return self._sequences


class Sequences:
    """The sequences of a batch, as tensors.

    It is made inside of a model's forward, which ``torch.compile`` may be tracing; the layout, which depends on values,
    is made where it is read.

    Args:
        batch: Rows of the batch.
        rows: Queries in each.
        keys: Keys in each.
        padding: ``[B, Nk]`` of bool, False for padding; ``None`` for none.
        starts: ``[B, Nq]`` of bool, True where a query is the first of a packed sequence; ``None`` if none is.
        wrong: ``[3]`` of bool: whether a query sees too few keys, whether one sees too many, and whether a layer
            attends with another mask; ``None`` if none is.
        window: How many keys a query sees, its own included; ``None`` for all before it.
    """

    def __init__(
        self, batch: int, rows: int, keys: int, padding: Tensor | None = None, starts: Tensor | None = None,
        wrong: Tensor | None = None, window: int | None = None,
    ) -> None:  # fmt: skip
        self.batch, self.rows, self.keys = batch, rows, keys
        self.padding, self.starts, self.wrong, self.window = padding, starts, wrong, window
        self._layouts: dict[torch.device, Layout] = {}

    @classmethod
    def of(
        cls, *, batch_size: int, q_length: int, kv_length: int, q_offset: int | Tensor = 0, kv_offset: int = 0,
        mask_function: Callable = causal_mask_function, attention_mask: Tensor | None = None, use_vmap: bool = False,
        device: torch.device | str = "cpu", local_size: int | None = None, **others: Any,
    ) -> Sequences:  # fmt: skip
        """From the arguments of a mask, for ``AttentionMaskInterface``.

        The mask is a function of indices. A few pairs are enough to recognise causal attention within sequences: a
        query and its own key, the keys before and after it, the first key that it may see and the one before that.

        Raises:
            ValueError: The mask is a function of the model's own.
        """
        first = kv_offset
        keys = int(q_offset) - first + q_length  # a static cache has room for more
        padding = prepare_padding_mask(attention_mask, kv_length, first)
        if padding is not None:
            padding = padding[:, first : first + keys]
        if mask_function is causal_mask_function:
            return cls(batch_size, q_length, keys, padding)
        if use_vmap:
            raise _not_causal("a function of the model's own")
        batch = torch.arange(batch_size, device=device)[:, None]
        # Inductor of torch 2.13 writes C++ that does not compile for an arange that is shifted and indexed with.
        # Its running maximum is the same numbers, in a buffer that inductor does not see through.
        row = torch.arange(q_length, device=device)[None].cummax(-1).values + int(q_offset)

        def ask(key: Tensor) -> Tensor:
            return mask_function(batch, torch.zeros_like(batch[:1]), row, key).expand(batch_size, q_length)

        starts = ~ask((row - 1).clamp(min=first)) & (row > first)
        if local_size == 1:
            starts = torch.zeros_like(starts)  # each query sees its own key alone, wherever a sequence starts
        start = torch.where(starts, row, first).cummax(-1).values
        start = start if local_size is None else torch.maximum(start, row - local_size + 1)
        after = (row + 1).clamp(max=q_length - 1 + int(q_offset))
        few = ~(ask(row) & ask(start)).all()
        many = (ask(after) & (after > row)).any() | (ask((start - 1).clamp(min=first)) & (start > first)).any()
        wrong = torch.stack((few, many, torch.zeros_like(few)))
        return cls(batch_size, q_length, keys, padding, starts, wrong, local_size)

    def of_flash(self, arguments: Mapping[str, Any]) -> Sequences:
        """The same with the packed sequences that flash attention takes from its own arguments, without a mask.

        Args:
            arguments: Of the attention function. All of `VARLEN` say where sequences start; otherwise the
                ``position_ids`` of a batch of one row, with a cache, too. A larger batch is not packed.
        """
        positions, starts = arguments.get("position_ids"), None
        if all(arguments.get(name) is not None for name in VARLEN):
            ends = arguments["cu_seq_lens_q"].long()
            starts = torch.zeros(self.batch * self.rows + 1, dtype=torch.bool, device=ends.device)
            starts = starts.index_fill(0, ends, True)[:-1].unflatten(0, (self.batch, self.rows))
        elif self.batch == 1 and positions is not None and self.rows > 1:
            first = positions.min()
            packed = (positions != first + torch.arange(self.rows, device=positions.device)).any()
            starts = (positions == first) & packed
        if starts is not None:
            starts = starts & (torch.arange(self.rows, device=starts.device) > 0)
        return Sequences(self.batch, self.rows, self.keys, None, starts, self.wrong, self.window)

    def unless(self, other: Tensor) -> Sequences:
        """The same, refused where its layout is read if ``other``, a scalar of bool, says that the mask is another."""
        none = torch.zeros(3, dtype=torch.bool, device=other.device)
        wrong = torch.stack([*(none if self.wrong is None else self.wrong)[:2].to(other.device), other])
        return Sequences(self.batch, self.rows, self.keys, self.padding, self.starts, wrong, self.window)

    def layout(self, device: torch.device) -> Layout:
        """The layout as packed sequences.

        Raises:
            ValueError: The mask is not causal attention within sequences.
        """
        if device not in self._layouts:
            few, many, other = (False,) * 3 if self.wrong is None else self.wrong.tolist()
            if few:
                raise _not_causal("a query that does not see its own key, or not the first of its sequence")
            if many:
                raise _not_causal("a query that sees a key after it, or of another sequence")
            if other:
                raise _not_causal("been replaced by a layer's own")
            padding = None if self.padding is None or bool(self.padding.all()) else self.padding
            starts = None if self.starts is None or not bool(self.starts.any()) else self.starts
            self._layouts[device] = Layout.of(self.batch, self.rows, self.keys, padding, starts).to(device)
        return self._layouts[device]


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
        f"StreamKL takes causal attention over padded or packed sequences, and this model's mask has {what}; "
        f"run the model with attn_implementation='sdpa', and do not capture its attention"
    )
