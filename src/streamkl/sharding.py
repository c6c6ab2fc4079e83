"""DTensor sharding rules: the operators run on shards of the batch and of the heads without communication.

Loaded when a DTensor first turns up (``loss._load_sharding_rules``), because importing DTensor costs most of a second.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from streamkl.ops import SCHEMAS

_REPLICATED = ("cu_seqlens_q", "cu_seqlens_k", "upstream")


@functools.cache
def register() -> None:
    """Registers the rules of all operators, once."""
    for name in SCHEMAS:
        op = getattr(torch.ops.streamkl, name).default
        register_sharding(op)(functools.partial(_acceptable, op))


def _acceptable(op: torch._ops.OpOverload, *args: Any) -> list[tuple[list[Any], list[Any]]]:
    """The placements of outputs and inputs that need no communication, for one mesh dimension.

    Everything replicated; everything sharded by batch; everything sharded by heads, where each count divides, so that
    every key head stays with its query heads and every student head with its head group. The heads of an indexer stay
    together: they make one distribution.
    """
    names = [argument.name for argument in op._schema.arguments]
    given = dict(zip(names, args, strict=False))
    whole = [name for name in names if _is_tensor(given.get(name)) and name not in _REPLICATED]
    choices = [Replicate()]
    if given.get("cu_seqlens_q") is None:
        choices.append(Shard(0))
    mesh_size = given[whole[0]].mesh.size()
    divided = all(given[name].shape[1] % mesh_size == 0 for name in whole if not _is_shared_topk(name, given[name]))
    if divided and not (given.get("b_head_summed") or given.get("head_summed")):
        choices.append(Shard(1))
    return [(_outputs(op, given, choice), _inputs(names, given, choice)) for choice in choices]


def _inputs(names: list[str], given: dict[str, Any], choice: Any) -> list[Any]:
    placements = []
    for name in names:
        tensor = given.get(name)
        if not _is_tensor(tensor):
            placements.append(None)
        elif name in _REPLICATED or (choice == Shard(1) and _is_shared_topk(name, tensor)):
            placements.append(Replicate())
        else:
            placements.append(choice)
    return placements


def _outputs(op: torch._ops.OpOverload, given: dict[str, Any], choice: Any) -> list[Any]:
    unwanted = tuple(f"d_{side}" for side in "ab" if given.get(f"want_{side}") is False)
    if not _is_tensor(given.get("b_w")):
        unwanted += ("d_b_w",)
    placements = []
    for output in op._schema.returns:
        if output.name == "loss" and not isinstance(choice, Replicate):
            placements.append(Partial("sum"))
        elif output.name.startswith(unwanted):
            placements.append(Replicate())
        else:
            placements.append(choice)
    return placements


def _is_shared_topk(name: str, tensor: Any) -> bool:
    """Whether a tensor is the top-k of all heads, which has one top-k head."""
    return name == "topk" and tensor.shape[1] == 1


def _is_tensor(argument: Any) -> bool:
    return hasattr(argument, "placements")
