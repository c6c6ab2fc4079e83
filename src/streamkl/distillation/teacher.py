"""The frozen model: loaded whole, or by shards over all ranks, of which none ever holds the whole."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from streamkl.distillation import ranks
from streamkl.integrations.transformers.families import Family


def load(model: str, dtype: torch.dtype, family: Family, *, shard: bool, tensor: int = 1) -> Any:
    """The frozen model.

    Args:
        model: A folder, or a name on the hub.
        dtype: Of its weights.
        family: Of the model.
        shard: Whether every rank holds a shard of each weight. Without other ranks there is nothing to shard.
        tensor: How many ranks share its heads and widths; the ranks of one number in each group shard the weights.
    """
    if ranks.count() == 1 or (not shard and tensor == 1):
        backbone = auto_class(AutoConfig.from_pretrained(model)).from_pretrained(model, dtype=dtype)
    else:
        backbone = _sharded(model, dtype, family, tensor)
    sparse: Any = getattr(backbone, "streamkl", None)
    if sparse is not None:  # saved as a sparse model; the teacher is dense
        sparse.remove()
    return backbone


def _sharded(model: str, dtype: torch.dtype, family: Family, tensor: int) -> Any:
    """A model of which each rank has read its own shards; a layer is gathered when it runs, and dropped after."""
    from torch.distributed.fsdp import FSDPModule, fully_shard
    from transformers.distributed.configuration_utils import DistributedConfig

    if dist.get_backend() == "gloo" and torch.accelerator.is_available():
        raise ValueError("a sharded model lies on the accelerator that torch finds: leave --device cpu out, or hide it")
    groups = ranks.count() // tensor
    try:
        config = DistributedConfig(fsdp_size=groups, tp_size=tensor)
    except TypeError as error:
        raise ValueError(f"this version of transformers does not load a model by shards ({error}): update it") from None
    loader = auto_class(AutoConfig.from_pretrained(model))
    backbone: Any = loader.from_pretrained(model, dtype=dtype, distributed_config=config)
    for attention in family.attentions(backbone).values():
        # Indexers are trained, whole on every rank. FSDP keeps its shards of those that the model was loaded with.
        if (own := family.own(attention)) is not None:
            family.holder(attention).indexer = whole(own)
    # The head does not run, so the model below it is the root: its layers are then gathered ahead of time.
    if groups > 1:
        fully_shard(backbone.base_model, mesh=backbone._device_mesh["fsdp"])
    for module in backbone.modules():
        if isinstance(module, FSDPModule):  # transformers keeps some of them gathered, for a backward
            module.set_reshard_after_forward(True, recurse=False)
    family.fingerprint(next(iter(family.attentions(backbone).values())))  # by all ranks: only one will save it
    return backbone


def auto_class(config: Any) -> Any:
    """The class that loads a model: some of those for images and text have no causal one."""
    causal = type(config) in AutoModelForCausalLM._model_mapping
    return AutoModelForCausalLM if causal else AutoModelForImageTextToText


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor is a DTensor."""
    return hasattr(tensor, "full_tensor")


def whole(module: nn.Module) -> nn.Module:
    """A copy of a module with whole parameters in place of shards. All ranks call it."""
    made = copy.copy(module)
    made._parameters = {name: None if p is None else _whole(p) for name, p in module._parameters.items()}
    made._modules = {name: None if child is None else whole(child) for name, child in module._modules.items()}
    return made


def _whole(parameter: Any) -> nn.Parameter:
    return nn.Parameter(parameter.full_tensor() if is_sharded(parameter) else parameter, parameter.requires_grad)
