"""The interface of a model family: its attention modules, and the inputs of their indexers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from streamkl.indexer import HeadIndexer, Indexer, LightningIndexer
from streamkl.indexer.base import Activation
from streamkl.indexer.rope import fewer_frequencies
from streamkl.sparse import AttentionCall, IndexTensors, Selector, index_topk

REFUSED = {"attn_logit_softcapping": "a soft cap on its logits", "sinks": "attention sinks"}
"""Attributes of attention modules that change the softmax. Sparse attention supports no soft cap, and sinks where a
family says that its modules hand them over (`Family.has_sinks`)."""

Attention = Any
"""An attention module of transformers, whose attributes no type checker knows."""


class Inputs(NamedTuple):
    """The inputs of an indexer.

    Attributes:
        hidden: ``[B, N, hidden_dim]``: the input of the attention module, after the layer's norm.
        position_embeddings: ``(cos, sin)``, each ``[B or 1, N, dim]``; ``None`` for a model without RoPE.
        latent: ``[B, N, query_dim]``: the input of the module's queries, where its own indexer uses it, too.
        cache: The model's KV cache, if there is one.
        positions: ``[B or 1, N]``: the positions of the tokens, where the model's own indexer is given them.
    """

    hidden: Tensor
    position_embeddings: tuple[Tensor, Tensor] | None
    latent: Tensor | None = None
    cache: Any = None
    positions: Tensor | None = None

    def detached(self) -> Inputs:
        """Without their graph."""
        return self._replace(hidden=self.hidden.detach(), latent=None if self.latent is None else self.latent.detach())

    @classmethod
    def of_own(cls, arguments: Mapping[str, Any]) -> Inputs:
        """From the arguments of the forward of a model's own indexer, by their names in transformers."""
        return cls(
            arguments["hidden_states"], arguments["position_embeddings"], arguments.get("q_resid"),
            positions=arguments.get("position_ids"),
        )  # fmt: skip


class Losses(Protocol):
    """Where losses are taken from: ``streamkl`` itself, or `streamkl.distributed.ContextParallel`."""

    def attention_kl(self, *args: Any, **options: Any) -> Tensor:
        """As `streamkl.attention_kl`."""
        ...

    def indexer_kl(self, *args: Any, **options: Any) -> Tensor:
        """As `streamkl.indexer_kl`."""
        ...


class Family(ABC):
    """Models whose attention modules have the same interface."""

    name: str
    model_types: tuple[str, ...]
    """``config.model_type`` of its models, and of their text models."""
    attention: str
    """The class of its attention modules."""
    decode: Literal["dense", "sparse"] = "dense"
    """How a single query attends by default."""
    probed: bool = False
    """Whether each model is tried before it is used: see `streamkl.integrations.transformers.probe`."""
    has_sinks: bool = False
    """Whether its attention modules hand a logit per head that belongs to no key to their attention function."""
    windowed: bool = False
    """Whether all its attention is to a window of keys, with compressed keys and a sink in the same softmax."""
    selects_late: bool = False
    """Whether the model's own indexers are not given the mask: they hand their tensors to the attention function."""
    not_sparse: str | None = None
    """Why `sparsify` does not take its models, the end of a sentence; ``None`` if it does."""

    def attentions(self, model: nn.Module) -> dict[int, Attention]:
        """The attention modules, by the number of their layer."""
        found = (m for m in model.modules() if any(cls.__name__ == self.attention for cls in type(m).__mro__))
        return {_number(module): module for module in found}

    def is_global(self, attention: Attention) -> bool:
        """Whether a module sees all keys before a query, and so can select keys."""
        return getattr(attention, "sliding_window", None) is None

    def counts_positions(self, attention: Attention) -> bool:
        """Whether a module counts the positions of its tokens, in place of those that the model is given."""
        return False

    def check(self, attention: Attention, number: int) -> None:
        """Refuses a module whose attention differs from what sparse attention computes.

        Args:
            attention: The module.
            number: Of its layer.
        """
        for attribute, what in REFUSED.items():
            if getattr(attention, attribute, None) is not None and not (attribute == "sinks" and self.has_sinks):
                raise ValueError(
                    f"layer {number} of this {attention.config.model_type} model has {what} ({attribute}), which "
                    f"sparse attention does not support"
                )
        if getattr(attention, "is_causal", True) is False:
            raise ValueError(
                f"layer {number} of this {attention.config.model_type} model is not causal, and sparse attention is"
            )

    def selector(self, config: Any) -> Selector | None:
        """The default selector: the model's own, if it has one."""
        return None

    def inputs(self, attention: Attention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        """The inputs of an indexer, from the arguments of a call of the module.

        Args:
            attention: The module.
            args: Of its forward.
            kwargs: Of its forward.
        """
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        return Inputs(hidden, kwargs["position_embeddings"], cache=kwargs.get("past_key_values"))

    def holder(self, attention: Attention) -> Any:
        """The module that has the model's own indexer as ``indexer``: the attention module, or a part of it."""
        return attention

    def own(self, attention: Attention) -> Any:
        """The indexer of transformers in a module; ``None`` for none."""
        return getattr(self.holder(attention), "indexer", None)

    def own_inputs(self, own: Any, arguments: Mapping[str, Any]) -> Inputs:
        """The inputs of an indexer, from the arguments of the forward of the model's own.

        Args:
            own: The model's own indexer.
            arguments: Of its forward, by their names.
        """
        return Inputs.of_own(arguments)

    def key_span(self, attention: Attention) -> int:
        """How many tokens each of the keys stands for that a module's indexer scores."""
        return 1

    def prepare(self, attention: Attention, mask: Any) -> None:  # noqa: B027  # most build none
        """Makes a module hand ``mask`` to its attention function where it would build one of all queries and keys."""

    def attended(self, attention: Attention, selected: Tensor, tokens: int) -> Tensor:
        """The keys that queries attend to, from the keys that were selected for them: the same, in most models.

        Args:
            attention: The module.
            selected: What `select` returned.
            tokens: How many tokens there are; the queries are the last of them.
        """
        return selected

    def own_topk(self, config: Any) -> int | None:
        """How many keys a query selects by the model's own indexers; ``None`` if it has none."""
        return None

    def shares(self, attention: Attention) -> bool:
        """Whether a module has no indexer and attends to the keys that the one of an earlier layer selected."""
        return False

    def select(self, indexer: Indexer, index: IndexTensors, topk: int) -> Tensor:
        """The per-query top-k of an indexer, by the rule of the model.

        Args:
            indexer: The indexer.
            index: Its tensors, of all keys and of the last queries or all.
            topk: How many keys a query selects.

        Returns:
            ``[B, Nq, topk]``, or ``[B, R, Nq, K]`` if each of ``R`` head groups selects for itself; padded with -1.
        """
        return index_topk(*index, topk=topk, activation=indexer.activation)

    def check_selector(self, selector: Selector) -> None:  # noqa: B027  # most take any
        """Refuses a selector that the model's own indexers cannot follow."""

    def select_late(self, indexer: Indexer, call: AttentionCall, selector: Selector) -> Tensor:
        """The keys that a model's own indexer selects in an attention call, if the family `selects_late`.

        Args:
            indexer: The indexer.
            call: Of the module, with the indexer's tensors.
            selector: Says how many keys.

        Returns:
            As `streamkl.sparse.Selector.select`.
        """
        raise NotImplementedError(f"the indexers of {self.name} select before attention is called")

    def cached(self, cache: Any, layer: int, index_k: Tensor) -> Tensor:
        """Appends index keys ``[B, N, D]`` to those that the cache has for a layer, and returns all."""
        return cache.update_indexer(index_k, layer)

    def divergence(
        self, losses: Losses, q: Tensor, k: Any, index: IndexTensors, *, activation: Activation, **options: Any
    ) -> Tensor:
        """The loss of an indexer's tensors against the attention that they learn.

        Args:
            losses: Where losses are taken from.
            q: ``[B, H, N, D]``: the teacher's queries.
            k: ``[B, Hkv, N, D]``: the teacher's keys; of several ranks, as `losses` takes them.
            index: The indexer's tensors.
            activation: The indexer's activation.
            options: Other arguments that `streamkl.attention_kl` and `streamkl.indexer_kl` have in common.
        """
        return losses.indexer_kl(q, k, *index, activation=activation, **options)

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


class OwnIndexers(Family):
    """Models that have indexers themselves."""

    decode = "sparse"  # these models never attend densely

    def new_indexer(
        self, attention: Attention, head_dim: int, activation: Activation, heads: int = 1, temperature: bool = False
    ) -> Indexer:
        """Raises: these models have indexers."""
        raise ValueError(f"{self.name} has indexers of its own: train those, and leave `indexers` out")


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

    def width(self, attention: Attention) -> int:
        """The width of hidden states."""
        return attention.q_proj.in_features

    def new_indexer(
        self, attention: Attention, head_dim: int, activation: Activation, heads: int = 1, temperature: bool = False
    ) -> Indexer:
        """Rotated as the model's heads, by as many of their frequencies as fit."""
        rotated = self.rotated(attention)
        rope_dim = min(head_dim, rotated)
        if rotated % rope_dim:
            raise ValueError(
                f"head_dim must divide the {rotated} rotated dims of {attention.config.model_type}'s heads, or be no "
                f"less: got {head_dim}"
            )
        width = self.width(attention)
        options: Any = {
            "head_dim": head_dim, "rope_dim": rope_dim, "activation": activation, "temperature": temperature
        }  # fmt: skip
        return HeadIndexer(width, **options) if heads == 1 else LightningIndexer(width, heads=heads, **options)

    def project(self, indexer: Indexer, inputs: Inputs) -> IndexTensors:
        """From the hidden states, in the indexer's dtype or autocast's."""
        if any(weight.device != inputs.hidden.device for weight in indexer.parameters()):
            indexer.to(inputs.hidden.device)  # another thread may be doing so, too
        assert inputs.position_embeddings is not None, "these models have RoPE"
        cos, sin = (fewer_frequencies(table, indexer.rope_dim) for table in inputs.position_embeddings)
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


def few(linear: Any) -> Tensor:
    """The first weights of a linear map; empty if they are quantised, or not in memory.

    Those of a sharded one are kept: all ranks call it together the first time, and any rank may call it later.
    """
    weight: Any = linear.weight.detach()
    if hasattr(weight, "full_tensor"):
        if not hasattr(linear, "streamkl_first_weights"):
            linear.streamkl_first_weights = weight.full_tensor().flatten()[:64].float().cpu()
        return linear.streamkl_first_weights
    if weight.is_meta or not weight.is_floating_point():
        return torch.empty(0, device="cpu")
    return weight.flatten()[:64].float().cpu()
