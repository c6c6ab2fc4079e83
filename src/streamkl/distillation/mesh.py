"""How the ranks of a run are laid out: which of them share a sequence, and which train on different ones."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from streamkl.distillation import ranks
from streamkl.distributed import ContextParallel
from streamkl.integrations.transformers.families import Family

ATTENTION = {"full_attention", "sliding_attention", "indexed_attention"}
"""Kinds of layers whose attention can be shared: to all keys before a query, or to the last of them."""


class Mesh:
    """The ranks in rows: those of a row share a sequence, and every row has sequences of its own.

    Attributes:
        context: How many ranks share the loss of a sequence.
        data: How many groups of them there are.
        by_heads: Whether each of them runs the frozen model on all tokens with some of its heads, as tensor parallelism
            does, and not on some tokens with all heads.

    Args:
        context: How many ranks share a sequence; 1 for whole sequences.
        tensor: How many ranks share the heads of the frozen model; 1 for all heads. One of the two is 1.

    Raises:
        ValueError: The ranks are not a multiple of it.
    """

    def __init__(self, context: int = 1, tensor: int = 1) -> None:
        count, self.by_heads = ranks.count(), tensor > 1
        name, context = ("tensor_parallel", tensor) if self.by_heads else ("context_parallel", context)
        if count % context:
            raise ValueError(
                f"{name} = {context} needs {context} processes, or a multiple of them: got {count}; start them with "
                f"torchrun --nproc-per-node"
            )
        self.context, self.data = context, count // context
        self._ranks = None
        if context > 1:
            self._ranks = init_device_mesh(device_type(), (self.data, context), mesh_dim_names=("dp", "cp"))["cp"]

    def share(self, tokens: int) -> ContextParallel | None:
        """The share of this rank in a sequence of so many tokens; ``None`` if it has the whole of it."""
        return None if self._ranks is None else ContextParallel(self._ranks, tokens)


def device_type() -> str:
    """Where tensors are that ranks exchange."""
    accelerator = None if dist.get_backend() == "gloo" else torch.accelerator.current_accelerator()
    return "cpu" if accelerator is None else accelerator.type


def check_heads(config: Any, tensor: int) -> None:
    """Refuses to share heads among ranks of which some would have more than others.

    Raises:
        ValueError: The ranks do not divide the heads.
    """
    text = config.get_text_config()
    heads = text.num_attention_heads, getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    if any(count % tensor for count in heads):
        raise ValueError(
            f"tensor_parallel = {tensor} does not divide the {heads[0]} query and {heads[1]} key heads of the model"
        )


def check_shared(backbone: Any, family: Family) -> None:
    """Refuses models that mix tokens in other ways than by softmax attention, where ranks share a sequence.

    Raises:
        ValueError: There are such layers, or layers that count positions themselves; the message names them.
    """
    modules, kind = family.attentions(backbone), backbone.config.model_type
    layers = set(range(backbone.config.get_text_config().num_hidden_layers))
    kinds = dict(enumerate(getattr(backbone.config.get_text_config(), "layer_types", None) or ()))
    other = {n: kind for n, kind in kinds.items() if n in modules and kind not in ATTENTION}
    mixed = any(isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) for module in backbone.modules())
    for numbers, what in (
        (sorted(layers - set(modules)), "no softmax attention but another way to mix tokens"),
        (sorted(layers) if mixed else [], "convolutions"),
        (sorted(other), " and ".join(sorted({*other.values()}))),
    ):
        if numbers:
            raise ValueError(
                f"context_parallel shards sequences whose tokens meet in softmax attention alone: this {kind} "
                f"model has {what} in layers {', '.join(map(str, numbers))}; leave it at 1"
            )
    for number, module in modules.items():
        if family.counts_positions(module):
            raise ValueError(
                f"layer {number} of this {kind} model counts positions itself, and not those of a rank's own tokens: "
                f"leave context_parallel at 1"
            )
