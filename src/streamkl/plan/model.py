"""The sizes of a model that its costs depend on, from the ``config.json`` of transformers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WITH_NORMS = ("qwen3", "qwen3_moe", "gemma3_text", "gemma3")
"""Models with norms on queries and keys."""
GLOBAL = ("full_attention", "indexed_attention")
"""Kinds of layers that see all keys: the teacher of a model with indexers is dense."""


@dataclass(frozen=True)
class Heads:
    """Queries, keys and values of an attention.

    Attributes:
        heads: Query heads.
        kv_heads: Key heads.
        key_dim: Width of a query and of a key.
        value_dim: Width of a value.
        values_in_keys: Whether the first dims of a key are its value.
    """

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    values_in_keys: bool = False

    @property
    def queries(self) -> int:
        """Numbers of a token's queries."""
        return self.heads * self.key_dim

    @property
    def keys(self) -> int:
        """Numbers of a token's keys."""
        return self.kv_heads * self.key_dim

    @property
    def values(self) -> int:
        """Numbers of a token's values, beside its keys."""
        return 0 if self.values_in_keys else self.kv_heads * self.value_dim

    @property
    def outputs(self) -> int:
        """Numbers of a token's attention, before the last projection."""
        return self.heads * self.value_dim


@dataclass(frozen=True)
class Model:
    """Sizes of a causal language model: grouped-query or latent attention, dense layers or experts.

    Attributes:
        name: ``model_type`` of the config.
        layers: How many layers it has.
        learning: How many of them see all keys, and so have an indexer that learns.
        window: Keys that a query of the other layers sees.
        hidden: Width of the hidden states.
        vocabulary: Tokens that it knows.
        tied: Whether its head is its embedding.
        heads: Query heads.
        kv_heads: Key heads, as they are handed to attention: of latent attention as many as query heads.
        key_dim: Width of a query and of a key.
        value_dim: Width of a value.
        rotated: Dims of a head that are rotated.
        head_norms: Whether queries and keys are normed.
        biases: Biases of the attention's projections.
        norms: Norms of a layer over the hidden states.
        query_latent: Width of the queries' latent; 0 without latent attention.
        key_latent: Width of the keys' latent.
        intermediate: Width of a dense layer's MLP.
        dense_layers: How many layers have a dense MLP; the others have experts.
        experts: Experts of a layer.
        chosen: Experts of a token.
        expert_intermediate: Width of an expert.
        shared_intermediate: Width of the shared experts together.
        positions: Tokens that it was made for; 0 if its config does not say.
        index_heads: Index heads of the model's own indexers; 0 if it has none.
        index_dim: Their width.
    """

    name: str
    layers: int
    learning: int
    window: int
    hidden: int
    vocabulary: int
    tied: bool
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    rotated: int
    head_norms: bool
    biases: bool
    norms: int
    query_latent: int
    key_latent: int
    intermediate: int
    dense_layers: int
    experts: int
    chosen: int
    expert_intermediate: int
    shared_intermediate: int
    positions: int
    index_heads: int
    index_dim: int

    @property
    def products(self) -> int:
        """Weights of a layer's attention that every token is multiplied with."""
        of = self.attended()
        if not self.query_latent:
            return self.hidden * (of.queries + of.keys + of.values + of.outputs)
        down = self.query_latent + self.key_latent + self.rotated
        expanded = of.keys - of.kv_heads * self.rotated + of.values
        return self.hidden * (down + of.outputs) + self.query_latent * of.queries + self.key_latent * expanded

    @property
    def attention_weights(self) -> int:
        """Weights of a layer's attention, without an indexer."""
        of = self.attended()
        if self.query_latent:
            biased = self.query_latent + self.key_latent + self.rotated + self.hidden
            return self.products + biased * self.biases + self.query_latent + self.key_latent
        biased = of.queries + of.keys + of.values + self.hidden * (self.name != "qwen2")  # whose output has no bias
        return self.products + biased * self.biases + 2 * self.key_dim * self.head_norms

    def mlp_products(self, dense: bool) -> int:
        """Weights of a layer's MLP that a token is multiplied with: of the experts only its own."""
        if dense:
            return 3 * self.hidden * self.intermediate
        width = self.chosen * self.expert_intermediate + self.shared_intermediate
        return self.hidden * (3 * width + self.experts)

    def layer_weights(self, dense: bool) -> int:
        """Frozen weights of a layer."""
        mlp = self.mlp_products(dense)
        if not dense:
            mlp += 3 * self.hidden * self.expert_intermediate * (self.experts - self.chosen)
        return self.attention_weights + mlp + self.norms * self.hidden

    @property
    def largest_layer(self) -> int:
        """Frozen weights of the largest layer."""
        return max(self.layer_weights(dense) for dense in {self.dense_layers > 0, self.dense_layers == self.layers})

    @property
    def embedding(self) -> int:
        """Weights of the embedding."""
        return self.vocabulary * self.hidden

    @property
    def weights(self) -> int:
        """All frozen weights: those of the model but for its own indexers."""
        sparse = self.layers - self.dense_layers
        layers = self.dense_layers * self.layer_weights(True) + (sparse * self.layer_weights(False) if sparse else 0)
        return layers + self.embedding * (1 if self.tied else 2) + self.hidden

    @property
    def active(self) -> int:
        """Weights that a token is multiplied with in a forward without the head."""
        sparse = self.layers - self.dense_layers
        mlps = self.dense_layers * self.mlp_products(True) + (sparse * self.mlp_products(False) if sparse else 0)
        return self.layers * self.products + mlps

    def indexer_weights(self, heads: int, dim: int) -> int:
        """Weights of one indexer: maps of queries and keys, the keys' norm, and with several heads their weights."""
        width = self.query_latent or self.hidden
        return heads * dim * width + dim * self.hidden + 2 * dim + (heads * self.hidden if heads > 1 else 0)

    def attended(self, latent: bool = False) -> Heads:
        """What attention and the loss read.

        Args:
            latent: Of latent attention the latent itself, as absorbed projections have it: one key head, whose first
                dims are the values. Otherwise keys and values of all heads, as transformers hands them to attention.

        Raises:
            ValueError: The model has no latent attention.
        """
        if not latent:
            return Heads(self.heads, self.kv_heads, self.key_dim, self.value_dim)
        if not self.query_latent:
            raise ValueError(f"a {self.name} model has no latent attention: leave --latent out")
        return Heads(self.heads, 1, self.key_latent + self.rotated, self.key_latent, True)


def read(path: str | Path) -> Model:
    """The sizes of a model.

    Args:
        path: The folder of a model, or its ``config.json``.

    Raises:
        ValueError: There is no such config, or it is of a model that the formulas are not for.
    """
    path = Path(path).expanduser()
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise ValueError(f"there is no config {path}: give the folder of a model, or its config.json") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} must hold names and values of a config")
    return of_config(config)


def of_config(config: dict[str, Any]) -> Model:
    """The sizes of a model, from what its ``config.json`` holds.

    Examples:
        >>> from streamkl.plan.model import of_config
        >>> model = of_config({"model_type": "llama", "num_hidden_layers": 30, "hidden_size": 576,
        ...     "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 49152,
        ...     "tie_word_embeddings": True})
        >>> model.weights
        134515008

    Raises:
        ValueError: A size is missing, or the formulas are not for such a model.
    """
    outer = config
    config = config.get("text_config", config)
    name = str(config.get("model_type", "unknown"))
    layers, hidden, heads = (_size(config, key) for key in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    kinds = config.get("layer_types") or ["full_attention"] * layers
    other = sorted({*kinds} - {*GLOBAL, "sliding_attention"})
    if other:
        raise ValueError(f"the formulas are for softmax attention: this {name} model has layers of {', '.join(other)}")
    latent = "kv_lora_rank" in config
    rotated = _size(config, "qk_rope_head_dim") if latent else 0
    if latent:
        key_dim, value_dim = _size(config, "qk_nope_head_dim") + rotated, _size(config, "v_head_dim")
        kv_heads = heads
    else:
        key_dim = value_dim = config.get("head_dim") or hidden // heads
        kv_heads = config.get("num_key_value_heads") or heads
        rope = config.get("rope_parameters") or {}
        rotated = int(key_dim * rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)))
    experts = config.get("num_experts") or config.get("n_routed_experts") or config.get("num_local_experts") or 0
    shared = config.get("n_shared_experts", 0) * config.get("moe_intermediate_size", 0)
    own = "index_n_heads" in config
    learning = sum(kind in GLOBAL for kind in kinds)
    if own and config.get("indexer_types"):
        learning = config["indexer_types"].count("full")
    return Model(
        name=name,
        layers=layers,
        learning=learning,
        window=config.get("sliding_window") or 0,
        hidden=hidden,
        vocabulary=_size(config, "vocab_size"),
        tied=bool(config.get("tie_word_embeddings", outer.get("tie_word_embeddings", False))),
        heads=heads,
        kv_heads=kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        rotated=rotated,
        head_norms=name in WITH_NORMS,
        biases=bool(config.get("attention_bias", name == "qwen2")),
        norms=4 if name.startswith("gemma3") else 2,
        query_latent=_size(config, "q_lora_rank") if latent else 0,
        key_latent=_size(config, "kv_lora_rank") if latent else 0,
        intermediate=config.get("intermediate_size") or 0,
        dense_layers=_dense_layers(config, layers) if experts else layers,
        experts=experts,
        chosen=_size(config, "num_experts_per_tok") if experts else 0,
        expert_intermediate=_size(config, "moe_intermediate_size") if experts else 0,
        shared_intermediate=shared if experts else 0,
        positions=config.get("max_position_embeddings") or 0,
        index_heads=config["index_n_heads"] if own else 0,
        index_dim=config["index_head_dim"] if own else 0,
    )


def _dense_layers(config: dict[str, Any], layers: int) -> int:
    """Layers of a model with experts that have none."""
    if config.get("mlp_layer_types"):
        return config["mlp_layer_types"].count("dense")
    return min(layers, config.get("first_k_dense_replace") or len(config.get("mlp_only_layers") or ()))


def _size(config: dict[str, Any], name: str) -> int:
    found = config.get(name)
    if not isinstance(found, int) or found < 1:
        raise ValueError(f"the config must have {name}, a number above 0: got {found!r}")
    return found
