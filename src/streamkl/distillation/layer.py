"""The distillation state of one attention module: its indexer, and the loss of each call of the module."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from streamkl.api import indexer_kl
from streamkl.indexer import Indexer
from streamkl.integrations.transformers.families import Family, Inputs
from streamkl.sparse import AttentionCall, IndexTensors, attention_mass, index_topk, topk_recall

MEASURED_ROWS = 64
"""Recall and mass are measured for the last queries of a sequence, which see the most keys."""

Loss = Callable[..., Tensor]


@dataclass(eq=False)
class Batch:
    """One call of the distiller, on its way through the frozen model; dicts are keyed by the number of the layer.

    Attributes:
        row_weight: ``[B, N]``: the weight of each query.
        topk: How many selected keys recall and mass are measured with; 0 to measure nothing.
        inputs: The inputs of indexers, until the attention of their layer has run.
        losses: With their graph; NaN where a layer's activations were not finite.
        figures: ``recall`` and ``mass``, if they are measured.
    """

    row_weight: Tensor | None
    topk: int
    inputs: dict[int, Inputs] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)
    figures: dict[int, dict[str, float]] = field(default_factory=dict)


UNDER_WAY: ContextVar[Batch | None] = ContextVar("streamkl_batch", default=None)
"""The batch that this thread is running through a frozen model; ``None`` outside of training."""


class Layer:
    """One attention module of the frozen model, and its indexer. No batch changes it.

    Attributes:
        divergence: Computes the loss; takes the arguments of `streamkl.indexer_kl`.
    """

    def __init__(self, module: nn.Module, family: Family, indexer: Indexer, loss: Loss = indexer_kl) -> None:
        self.module, self.family, self.indexer = module, family, indexer
        self.number = int(module.layer_idx)  # pyright: ignore[reportArgumentType]
        self.divergence = loss
        own: Any = module
        if getattr(module, "indexer", None) is not None:  # a model's own indexer is called inside of the module
            own.indexer.forward = self._read_own
        else:
            module.register_forward_pre_hook(self._read, with_kwargs=True)

    def _read(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        self._keep(Inputs(hidden, kwargs["position_embeddings"]))

    def _read_own(self, hidden: Tensor, latent: Tensor, position_embeddings: Any, *rest: Any, **kwargs: Any) -> Tensor:
        self._keep(Inputs(hidden, position_embeddings, latent))
        return hidden.new_empty(0)  # no selected keys: the teacher is dense

    def _keep(self, inputs: Inputs) -> None:
        batch = UNDER_WAY.get()
        if batch is not None:
            batch.inputs[self.number] = inputs

    def learn(self, batch: Batch, call: AttentionCall) -> None:
        """Computes the loss of a batch in one pass over the teacher.

        Args:
            batch: The batch.
            call: The attention that just ran, with its log-sum-exp.
        """
        query, key, scale, lse = call.q, call.k, call.scale, call.lse
        assert lse is not None, "the teacher's attention hands it out"
        inputs = batch.inputs.pop(self.number)
        with torch.enable_grad(), _half_precision(query):
            index = self.family.project(self.indexer, inputs)
            index = index._replace(index_q=index.index_q.to(query.dtype), index_k=index.index_k.to(query.dtype))
        if not all_finite(lse, index.index_q, index.index_k):
            # A loss with a gradient for every parameter: other ranks wait to reduce them.
            with torch.enable_grad():
                nothing = torch.stack([p.sum() for p in self.indexer.parameters()]).sum() * torch.nan
            batch.losses[self.number] = nothing
            return
        with torch.enable_grad():
            batch.losses[self.number] = self.divergence(
                query, key, *index, activation=self.indexer.activation, teacher_scale=scale, teacher_lse=lse,
                row_weight=batch.row_weight,
            )  # fmt: skip
        if batch.topk:
            batch.figures[self.number] = measure(query, key, index, self.indexer, batch.topk, scale, lse)


@torch.no_grad()
def measure(
    query: Tensor, key: Tensor, index: IndexTensors, indexer: Indexer, topk: int, scale: float | None, lse: Tensor
) -> dict[str, float]:
    """Recall of the oracle's keys and attention mass on the selected keys, of the last queries."""
    last = slice(max(0, query.shape[2] - MEASURED_ROWS), None)
    w = None if index.index_w is None else index.index_w[:, last]
    indices = index_topk(index.index_q[:, :, last], index.index_k, w, topk=topk, activation=indexer.activation)
    rows, rows_lse = query[:, :, last], lse[:, :, last]
    return {
        "recall": float(topk_recall(rows, key, indices, scale=scale, lse=rows_lse)),
        "mass": float(attention_mass(rows, key, indices, scale=scale, lse=rows_lse)),
    }


@torch.no_grad()
def all_finite(*tensors: Tensor) -> bool:
    """Whether all numbers are finite, by their sums: a number that is not finite makes its sum not finite."""
    return bool(
        torch.stack([x.sum(dtype=torch.promote_types(x.dtype, torch.float32)) for x in tensors]).isfinite().all()
    )


def _half_precision(query: Tensor) -> AbstractContextManager:
    """Projects in the teacher's dtype, so that the backward keeps hidden states in that dtype."""
    if query.dtype not in (torch.bfloat16, torch.float16):
        return nullcontext()
    return torch.autocast(query.device.type, query.dtype)
