"""The distillation state of one attention module: its indexer, and the loss of each call of the module."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from streamkl import api
from streamkl.distillation.figures import measure
from streamkl.distributed import ContextParallel, Gathered
from streamkl.indexer import Indexer
from streamkl.integrations.transformers.families import Family, Inputs
from streamkl.integrations.transformers.recording import Attended
from streamkl.sparse import IndexTensors

Loss = Callable[..., Tensor]
Backward = Callable[[Tensor], None]
"""Takes the loss of a layer while it has its graph, such as ``Tensor.backward``."""


@dataclass(eq=False)
class Batch:
    """One call of the distiller, on its way through the frozen model; dicts are keyed by the number of the layer.

    Attributes:
        row_weight: ``[B, N]``: the weight of each query.
        context: The share of this rank where several have one sequence: ``N`` are then its own tokens.
        selects: How many keys each query selects, which the frozen model attends to and the loss is over; 0 for all.
        by_heads: Whether the frozen model runs on all tokens all the same, with some heads on each rank.
        topk: How many selected keys recall and mass are measured with; 0 to measure nothing.
        backward: Called with the loss of each layer as soon as it is known; ``None`` for losses without gradients.
        inputs: The inputs of indexers, until the attention of the last layer that they select for has run.
        selected: The keys that were selected for a layer, until its attention runs.
        keys: The teacher's keys of all ranks, where several have one sequence, until the layer's loss is known.
        losses: Without their graph; NaN where a layer's activations were not finite.
        figures: ``recall`` and ``mass``, if they are measured.
    """

    row_weight: Tensor | None
    topk: int
    backward: Backward | None = None
    context: ContextParallel | None = None
    by_heads: bool = False
    selects: int = 0
    inputs: dict[int, Inputs] = field(default_factory=dict)
    selected: dict[int, Tensor] = field(default_factory=dict)
    keys: dict[int, Gathered] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)
    figures: dict[int, dict[str, float]] = field(default_factory=dict)


UNDER_WAY: ContextVar[Batch | None] = ContextVar("streamkl_batch", default=None)
"""The batch that this thread is running through a frozen model; ``None`` outside of training."""


class Layer:
    """One attention module of the frozen model, and its indexer. No batch changes it.

    Args:
        module: The attention module.
        family: Of its model.
        indexer: Its indexer.
        loss: Takes the arguments of `streamkl.indexer_kl`; the family's if not given.
        sharing: The layers after it that attend to the keys which its indexer selects.

    Attributes:
        divergence: Computes the loss, if it is not the family's.
        served: The layers that the indexer selects keys for. It learns the attention of each: its loss is their mean.
    """

    def __init__(
        self, module: nn.Module, family: Family, indexer: Indexer, loss: Loss | None = None, sharing: Sequence[int] = ()
    ) -> None:
        self.module, self.family, self.indexer = module, family, indexer
        self.number = int(module.layer_idx)  # pyright: ignore[reportArgumentType]
        self.divergence, self.served = loss, (self.number, *sharing)
        self._own = family.own(module)
        if self._own is not None:  # a model's own indexer is called inside of the module
            self._signature = inspect.signature(type(self._own).forward)
            self._own.forward = self._read_own
        else:
            module.register_forward_pre_hook(self._read, with_kwargs=True)

    def _read(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self._keep(self.family.inputs(module, args, kwargs))

    def _read_own(self, *args: Any, **kwargs: Any) -> Tensor:
        inputs = self.family.own_inputs(self._own, self._signature.bind(None, *args, **kwargs).arguments)
        self._keep(inputs)
        # None: the attention function finds the selected keys in the batch.
        return inputs.hidden.new_empty((*inputs.hidden.shape[:2], 0), dtype=torch.int64)

    def _keep(self, inputs: Inputs) -> None:
        batch = UNDER_WAY.get()
        if batch is None:
            return
        batch.inputs[self.number] = inputs if not batch.by_heads else _own_tokens(inputs, batch.context)
        if batch.selects:
            with torch.no_grad():
                index = self._project(inputs, inputs.hidden)
                selected = self.family.select(self.indexer, index, batch.selects)
            batch.selected.update(dict.fromkeys(self.served, selected))

    def _project(self, inputs: Inputs, like: Tensor) -> IndexTensors:
        """The indexer's tensors in the dtype of the teacher's."""
        with _half_precision(like):
            index = self.family.project(self.indexer, inputs)
            return index._replace(index_q=index.index_q.to(like.dtype), index_k=index.index_k.to(like.dtype))

    def _attended(self, index: IndexTensors, topk: int, tokens: int) -> Tensor:
        """The keys that queries would attend to by the indexer."""
        return self.family.attended(self.module, self.family.select(self.indexer, index, topk), tokens)

    def learn(self, batch: Batch, attended: Attended) -> None:
        """Computes the loss of a batch in one pass over the teacher, and its gradients.

        Nothing is kept for a later backward: where the indexer serves several layers, each projects again.

        Args:
            batch: The batch.
            attended: The attention that just ran, in one of the layers that the indexer serves, with its log-sum-exp.
        """
        call, context, number = attended.call, batch.context, attended.layer
        query, lse = call.q, call.lse
        key = call.k if context is None else batch.keys.pop(number)
        assert lse is not None, "the teacher's attention hands it out"
        inputs = batch.inputs.pop(self.number) if number == self.served[-1] else batch.inputs[self.number]
        with torch.set_grad_enabled(batch.backward is not None):
            index = self._project(inputs, query)
            is_finite = all_finite(lse, index.index_q, index.index_k, context=context)
            if is_finite:
                options: dict[str, Any] = {
                    "activation": self.indexer.activation, "teacher_scale": call.scale, "teacher_lse": lse,
                    "teacher_rest": call.rest, "topk_indices": attended.indices, "row_weight": batch.row_weight,
                }  # fmt: skip
                if self.indexer.key_span > 1:
                    options["key_span"] = self.indexer.key_span
                if self.divergence is not None and context is None:
                    loss = self.divergence(query, key, *index, **options)
                else:
                    loss = self.family.divergence(api if context is None else context, query, key, index, **options)
                loss = loss / len(self.served)
            else:  # a loss whose gradients are NaN for every parameter, so that all ranks skip the step
                loss = torch.stack([p.sum() for p in self.indexer.parameters()]).sum() * torch.nan
            if batch.backward is not None:
                with torch.autocast(query.device.type, enabled=False):  # a backward takes the dtypes of its forward
                    batch.backward(loss)
        before = batch.losses.get(self.number)
        batch.losses[self.number] = loss.detach() if before is None else before + loss.detach()
        if batch.topk and is_finite:
            figures = batch.figures.setdefault(self.number, {})
            select = functools.partial(self._attended, topk=batch.topk, tokens=query.shape[2])
            found = measure(select, attended, key, index, context, self.indexer.key_span)
            for name, value in found.items():
                figures[name] = figures.get(name, 0.0) + value / len(self.served)


def _own_tokens(inputs: Inputs, context: ContextParallel | None) -> Inputs:
    """The inputs of this rank's tokens, from those of all tokens."""
    assert context is not None, "ranks share a sequence"
    tables = inputs.position_embeddings
    if tables is not None:
        tables = context.shard(tables[0], tables[0].dim() - 2), context.shard(tables[1], tables[1].dim() - 2)
    latent = None if inputs.latent is None else context.shard(inputs.latent, 1)
    positions = None if inputs.positions is None else context.shard(inputs.positions, 1)
    return Inputs(context.shard(inputs.hidden, 1), tables, latent, positions=positions)


@torch.no_grad()
def all_finite(*tensors: Tensor, context: ContextParallel | None = None) -> bool:
    """Whether all numbers are finite, by their sums: a number that is not finite makes its sum not finite.

    Ranks that share a sequence have the same answer: their next step is to exchange keys, or not.
    """
    total = torch.stack([x.sum(dtype=torch.promote_types(x.dtype, torch.float32)) for x in tensors]).sum()
    return bool((total if context is None else context.total(total)).isfinite())


def _half_precision(query: Tensor) -> AbstractContextManager:
    """Projects in the teacher's dtype, so that the backward keeps hidden states in that dtype."""
    if query.dtype not in (torch.bfloat16, torch.float16):
        return nullcontext()
    return torch.autocast(query.device.type, query.dtype)
