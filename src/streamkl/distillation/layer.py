"""What is attached to one attention module: its indexer, and what it learns each time the module attends."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from streamkl.api import indexer_kl
from streamkl.indexer import Indexer
from streamkl.integrations.transformers.families import Family, Inputs
from streamkl.sparse import IndexTensors, attention_mass, index_topk, topk_recall

MEASURED_ROWS = 64
"""Recall and mass are measured for the last queries of a sequence, which see the most keys."""

Loss = Callable[..., Tensor]


class Layer:
    """Belongs to one attention module, as its attribute ``streamkl_distilled``.

    Attributes:
        row_weight: ``[B, N]``: of the batch under way, set by the model before it runs.
        topk: How many keys recall and mass of the batch under way are measured with; 0 for not at all.
        loss: Of the batch that ran last, with its graph; NaN if the layer's activations were not finite.
        divergence: Computes the loss; takes the arguments of `streamkl.indexer_kl`.
        figures: ``recall`` and ``mass`` of the last measured batch.
    """

    def __init__(self, module: nn.Module, family: Family, indexer: Indexer, loss: Loss = indexer_kl) -> None:
        self.module, self.family, self.indexer = module, family, indexer
        self.number = int(module.layer_idx)  # pyright: ignore[reportArgumentType]
        self.row_weight: Tensor | None = None
        self.topk = 0
        self.loss: Tensor | None = None
        self.figures: dict[str, float] = {}
        self.divergence = loss
        self._inputs: Inputs | None = None
        own: Any = module
        own.streamkl_distilled = self
        if getattr(module, "indexer", None) is not None:  # a model's own indexer is called inside of the module
            own.indexer.forward = self._read_own
        else:
            module.register_forward_pre_hook(self._read, with_kwargs=True)

    def _read(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        self._inputs = Inputs(hidden, kwargs["position_embeddings"])

    def _read_own(self, hidden: Tensor, latent: Tensor, position_embeddings: Any, *rest: Any, **kwargs: Any) -> Tensor:
        self._inputs = Inputs(hidden, position_embeddings, latent)
        return hidden.new_empty(0)  # no lists: the teacher is dense

    def learn(self, query: Tensor, key: Tensor, scale: float | None, lse: Tensor) -> None:
        """Computes the loss, in one sweep over the teacher.

        Args:
            query: ``[B, H, N, D]``, of the attention that just ran.
            key: ``[B, Hkv, N, D]``.
            scale: Of its logits.
            lse: ``[B, H, N]``: of its logits.
        """
        inputs, self._inputs = self._inputs, None
        assert inputs is not None, "the module's hook ran before its attention"
        with torch.enable_grad(), _half_precision(query):
            index = self.family.project(self.indexer, inputs)
            index = index._replace(index_q=index.index_q.to(query.dtype), index_k=index.index_k.to(query.dtype))
        if not all_finite(lse, index.index_q, index.index_k):
            # A loss that every parameter has a gradient of, as ranks that reduce gradients wait for.
            with torch.enable_grad():
                self.loss = torch.stack([p.sum() for p in self.indexer.parameters()]).sum() * torch.nan
            return
        with torch.enable_grad():
            self.loss = self.divergence(
                query, key, *index, activation=self.indexer.activation, teacher_scale=scale, teacher_lse=lse,
                row_weight=self.row_weight,
            )  # fmt: skip
        if self.topk:
            self.figures = measure(query, key, index, self.indexer, self.topk, scale, lse)


@torch.no_grad()
def measure(
    query: Tensor, key: Tensor, index: IndexTensors, indexer: Indexer, topk: int, scale: float | None, lse: Tensor
) -> dict[str, float]:
    """Recall of the oracle's keys and covered mass, of the last queries."""
    last = slice(max(0, query.shape[2] - MEASURED_ROWS), None)
    w = None if index.index_w is None else index.index_w[:, last]
    listed = index_topk(index.index_q[:, :, last], index.index_k, w, topk=topk, activation=indexer.activation)
    rows, rows_lse = query[:, :, last], lse[:, :, last]
    return {
        "recall": float(topk_recall(rows, key, listed, scale=scale, lse=rows_lse)),
        "mass": float(attention_mass(rows, key, listed, scale=scale, lse=rows_lse)),
    }


@torch.no_grad()
def all_finite(*tensors: Tensor) -> bool:
    """Whether all numbers are finite, by their sums: one that is not makes its sum so."""
    return bool(
        torch.stack([x.sum(dtype=torch.promote_types(x.dtype, torch.float32)) for x in tensors]).isfinite().all()
    )


def _half_precision(query: Tensor) -> AbstractContextManager:
    """Projects in the teacher's dtype, so that what the backward keeps of hidden states is what they are."""
    if query.dtype not in (torch.bfloat16, torch.float16):
        return nullcontext()
    return torch.autocast(query.device.type, query.dtype)
