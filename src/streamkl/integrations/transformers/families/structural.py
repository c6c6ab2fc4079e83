"""Standard decoders without a file of their own, recognised by the structure of their attention modules."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from streamkl.integrations.transformers.families.base import Attention, GroupedQuery, Inputs, few

PROJECTIONS = ("q_proj", "q_a_proj", "qkv_proj", "query_key_value", "Wqkv")
"""The maps that make queries of hidden states: alone, down to a latent, or fused with those of keys and values."""
INTERFACE = "ALL_ATTENTION_FUNCTIONS"
"""The name under which the modeling files of transformers find the function of an attention implementation."""
REASONS = (
    "has no layer_idx and config",
    "does not go through transformers' attention interface",
    "is not causal",
    f"has none of the projections {', '.join(PROJECTIONS)}",
    "gets no rotary position embeddings",
)
"""Why a module has not the structure, each the end of a sentence, from far to near."""


class Structural(GroupedQuery):
    """Causal attention with rotary position embeddings that goes through transformers' attention interface.

    It stands for every model without a file, and so it is probed: see `streamkl.integrations.transformers.probe`.
    """

    name = "structural"
    model_types = ("*",)
    attention = "*"
    probed = True
    has_sinks = True

    def attentions(self, model: nn.Module) -> dict[int, Attention]:
        """The decoder's modules of that structure, by the number of their layer.

        Raises:
            ValueError: There are none, or two have the same number.
        """
        decoder: nn.Module = model.get_decoder() if hasattr(model, "get_decoder") else model  # pyright: ignore
        reasons = [(module, reason(module)) for module in decoder.modules()]
        found: dict[int, Attention] = {}
        for module in (module for module, why in reasons if why is None):
            number: Any = module.layer_idx
            if number in found:
                raise _unknown(model, f"two attention modules have the layer_idx {number}")
            found[number] = module
        if found:
            return found
        others = [(module, why) for module, why in reasons if "Attention" in type(module).__name__ and why]
        if not others:
            raise _unknown(model, "its get_decoder() has no attention modules")
        module, why = max(others, key=lambda other: REASONS.index(other[1]))
        raise _unknown(model, f"{type(module).__name__} {why}")

    def is_global(self, attention: Attention) -> bool:
        """By the type of its layer, else by the window of the module or of the whole model.

        A module may have the window of the model and not use it. One that has a window and says otherwise is refused
        where its mask is read.
        """
        config, number = attention.config, attention.layer_idx
        types = getattr(config, "layer_types", None)
        if types is not None and number < len(types):
            return types[number] not in ("sliding_attention", "chunked_attention")
        return super().is_global(attention) and getattr(config, "sliding_window", None) is None

    def counts_positions(self, attention: Attention) -> bool:
        """By what its forward calls."""
        return "arange" in _names(type(attention))

    def check(self, attention: Attention, number: int) -> None:
        """Refuses indexers of the model's own as well: which keys they leave out, only a file can say."""
        super().check(attention, number)
        inside = any("indexer" in type(module).__name__.lower() for module in attention.modules())
        if inside or hasattr(attention, "indexer"):
            raise ValueError(
                f"layer {number} of this {attention.config.model_type} model may have an indexer of its own, which "
                f"takes a family of its own; register_family adds one (docs/how-to/add-a-family.md)"
            )

    def rotated(self, attention: Attention) -> int:
        """By the rotary dims of a latent, else by the config's factor."""
        latent = getattr(attention, "qk_rope_head_dim", None)
        if latent is not None:
            return latent
        rope = getattr(attention.config, "rope_parameters", None) or {}
        types = getattr(attention.config, "layer_types", None) or []
        number = attention.layer_idx
        if number < len(types) and isinstance(rope.get(types[number]), dict):
            rope = rope[types[number]]
        width: int = attention.head_dim if hasattr(attention, "head_dim") else attention.head_size
        whole = rope.get("rope_type") == "proportional"  # the frequencies of other dims are 0
        return width if whole else int(width * rope.get("partial_rotary_factor", 1.0))

    def width(self, attention: Attention) -> int:
        """Of the projection that makes queries."""
        return projection(attention).in_features

    def inputs(self, attention: Attention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        """By the names in the module's signature, with tables whose second half repeats the first."""
        bound = inspect.signature(type(attention).forward).bind_partial(attention, *args, **kwargs)
        given = {**bound.arguments, **bound.kwargs}
        hidden, tables = given["hidden_states"], given.get("position_embeddings")
        if isinstance(tables, Tensor) and tables.is_complex():
            tables = tables.real, tables.imag
        number, rotated = attention.layer_idx, self.rotated(attention)
        if not isinstance(tables, tuple) or len(tables) != 2 or not all(isinstance(t, Tensor) for t in tables):
            raise ValueError(f"layer {number} gets no cosines and sines of positions, which an indexer needs")
        for table in tables:
            if table.dim() != 3 or table.shape[-1] not in (rotated, rotated // 2):
                raise ValueError(
                    f"layer {number} rotates {rotated} dims of a head, and gets tables of {list(table.shape)}, which "
                    f"an indexer cannot read"
                )
        cos, sin = (_halves(table, rotated) for table in tables)
        return Inputs(hidden, (cos, sin), cache=given.get("past_key_values", given.get("layer_past")))

    def fingerprint(self, attention: Attention) -> Tensor:
        """Of the projection that makes queries."""
        return few(projection(attention))


def reason(module: nn.Module) -> str | None:
    """Why a module is none of the structure, one of `REASONS`; ``None`` if it is."""
    number = getattr(module, "layer_idx", None)
    if not isinstance(number, int) or number < 0 or not hasattr(module, "config"):  # most modules of a model
        return REASONS[0]
    has = (
        INTERFACE in _names(type(module)),
        getattr(module, "is_causal", False) is True,
        projection(module) is not None,
        _is_rotary(type(module)),
    )
    return next((why for there, why in zip(has, REASONS[1:], strict=True) if not there), None)


@functools.cache
def _names(cls: type[nn.Module]) -> tuple[str, ...]:
    """The names that the forward of a class reads: modules, functions, attributes."""
    return getattr(getattr(inspect.unwrap(cls.forward), "__code__", None), "co_names", ())


@functools.cache
def _is_rotary(cls: type[nn.Module]) -> bool:
    """Whether a class gets rotary position embeddings."""
    return "position_embeddings" in inspect.signature(cls.forward).parameters


def projection(attention: Attention) -> Any:
    """The map that makes queries of hidden states; ``None`` if none of that name is there."""
    found = (getattr(attention, name, None) for name in PROJECTIONS)
    return next((each for each in found if hasattr(each, "in_features")), None)


def _halves(table: Tensor, rotated: int) -> Tensor:
    """A table of ``rotated`` dims whose second half repeats the first, from one of any layout.

    Tables have each frequency once, twice in halves, or twice in a row. Which, is read from their values, on their
    device.
    """
    if table.shape[-1] != rotated:
        half = table
    else:
        in_a_row = (table[..., 0::2] == table[..., 1::2]).all()
        half = torch.where(in_a_row, table[..., 0::2], table[..., : rotated // 2])
    return torch.cat((half, half), -1)


def _unknown(model: Any, why: str) -> ValueError:
    return ValueError(
        f"no family of models is known for model_type {model.config.model_type!r}, and it has not the structure of a "
        f"standard decoder: {why}; register_family adds a family (docs/how-to/add-a-family.md)"
    )
