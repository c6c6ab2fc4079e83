"""The interface of a model family: its attention modules, and the inputs of their indexers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from streamkl.indexer import HeadIndexer, Indexer, LightningIndexer
from streamkl.indexer.base import Activation
from streamkl.sparse import IndexTensors, Selector

REFUSED = {"attn_logit_softcapping": "a soft cap on its logits", "sinks": "attention sinks"}
"""Attributes of attention modules that change the softmax, which sparse attention does not support."""

Attention = Any
"""An attention module of transformers, whose attributes no type checker knows."""


class Inputs(NamedTuple):
    """The inputs of an indexer.

    Attributes:
        hidden: ``[B, N, hidden_dim]``: the input of the attention module, after the layer's norm.
        position_embeddings: ``(cos, sin)``, each ``[B or 1, N, dim]``.
        latent: ``[B, N, query_dim]``: the input of the module's queries, where its own indexer uses it, too.
        cache: The model's KV cache, if there is one.
    """

    hidden: Tensor
    position_embeddings: tuple[Tensor, Tensor]
    latent: Tensor | None = None
    cache: Any = None


class Family(ABC):
    """Models whose attention modules have the same interface."""

    name: str
    model_types: tuple[str, ...]
    """``config.model_type`` of its models, and of their text models."""
    attention: str
    """The class of its attention modules."""
    decode: Literal["dense", "sparse"] = "dense"
    """How a single query attends by default."""

    def attentions(self, model: nn.Module) -> dict[int, Attention]:
        """The attention modules, by the number of their layer."""
        found = (m for m in model.modules() if any(cls.__name__ == self.attention for cls in type(m).__mro__))
        return {_number(module): module for module in found}

    def is_global(self, attention: Attention) -> bool:
        """Whether a module sees all keys before a query, and so can select keys."""
        return getattr(attention, "sliding_window", None) is None

    def check(self, attention: Attention, number: int) -> None:
        """Refuses a module whose attention differs from what sparse attention computes.

        Args:
            attention: The module.
            number: Of its layer.
        """
        for attribute, what in REFUSED.items():
            if getattr(attention, attribute, None) is not None:
                raise ValueError(
                    f"layer {number} of this {self.name} model has {what} ({attribute}), which sparse attention does "
                    f"not support"
                )
        if getattr(attention, "is_causal", True) is False:
            raise ValueError(f"layer {number} of this {self.name} model is not causal, and sparse attention is")

    def selector(self, config: Any) -> Selector | None:
        """The default selector: the model's own, if it has one."""
        return None

    @abstractmethod
    def indexer(self, attention: Attention) -> Indexer | None:
        """The indexer that the model itself has in a module, with its own weights; ``None`` for none."""

    @abstractmethod
    def new_indexer(
        self, attention: Attention, head_dim: int, activation: Activation, heads: int = 1, temperature: bool = False
    ) -> Indexer:
        """An untrained indexer for a module."""

    @abstractmethod
    def project(self, indexer: Indexer, inputs: Inputs) -> IndexTensors:
        """The tensors of an indexer from a module's inputs, which are constants."""

    @abstractmethod
    def fingerprint(self, attention: Attention) -> Tensor:
        """Some of a module's weights, to recognise a model; empty if they cannot be read."""


class GroupedQuery(Family):
    """Models with query and key heads and no indexer: they get a `HeadIndexer` with the same RoPE.

    For several index heads it is a `LightningIndexer`.
    """

    def indexer(self, attention: Attention) -> None:
        """None of these models has one."""

    def rotated(self, attention: Attention) -> int:
        """How many dims of a head are rotated."""
        rope = getattr(attention.config, "rope_parameters", None) or {}
        return int(attention.head_dim * rope.get("partial_rotary_factor", 1.0))

    def new_indexer(
        self, attention: Attention, head_dim: int, activation: Activation, heads: int = 1, temperature: bool = False
    ) -> Indexer:
        """Rotated as the model's heads, by as many of their frequencies as fit."""
        rotated = self.rotated(attention)
        rope_dim = min(head_dim, rotated)
        if rotated % rope_dim:
            raise ValueError(
                f"head_dim must divide the {rotated} rotated dims of {self.name}'s heads, or be no less: got {head_dim}"
            )
        width: int = attention.q_proj.in_features
        options: Any = {
            "head_dim": head_dim, "rope_dim": rope_dim, "activation": activation, "temperature": temperature
        }  # fmt: skip
        return HeadIndexer(width, **options) if heads == 1 else LightningIndexer(width, heads=heads, **options)

    def project(self, indexer: Indexer, inputs: Inputs) -> IndexTensors:
        """From the hidden states, in the indexer's dtype or autocast's."""
        if any(weight.device != inputs.hidden.device for weight in indexer.parameters()):
            indexer.to(inputs.hidden.device)  # another thread may be doing so, too
        cos, sin = (_fewer(table, indexer.rope_dim) for table in inputs.position_embeddings)
        hidden = inputs.hidden.detach()
        if not torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(next(indexer.parameters()).dtype)
        return indexer(hidden, position_embeddings=(cos, sin))

    def fingerprint(self, attention: Attention) -> Tensor:
        """Of the query projection."""
        return few(attention.q_proj)


def _number(attention: Attention) -> int:
    """The number of a module's layer."""
    return attention.layer_idx


def _fewer(table: Tensor, dim: int) -> Tensor:
    """A table of cosines or sines of ``dim`` dims: every n-th frequency of those that it has."""
    if table.shape[-1] == dim:
        return table
    half = table[..., : table.shape[-1] // 2][..., :: table.shape[-1] // dim]
    return torch.cat((half, half), -1)


def few(linear: Any) -> Tensor:
    """The first weights of a linear map; empty if they are quantised, or not in memory."""
    weight: Tensor = linear.weight.detach()
    if weight.is_meta or not weight.is_floating_point():
        return torch.empty(0, device="cpu")
    return weight.flatten()[:64].float().cpu()
