"""The joint stage as one module for a trainer: a sparse model on its text, its indexers on the keys they selected."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from streamkl import api
from streamkl.distillation.figures import measure
from streamkl.distillation.layer import Backward, all_finite
from streamkl.distillation.mesh import Mesh
from streamkl.distillation.model import served
from streamkl.indexer import Indexer
from streamkl.integrations.transformers.capture import capture_attention
from streamkl.integrations.transformers.model import SparseModel
from streamkl.integrations.transformers.recording import Attended

BUCKET = 1 << 24
"""The most gradients that are summed over ranks in one buffer, unless one weight has more."""


class IndexedLayer(NamedTuple):
    """A layer whose indexer is trained, and the layers that it selects keys for, this one first."""

    number: int
    indexer: Indexer
    served: tuple[int, ...]


class JointModel(nn.Module):
    """Language-model loss of a sparse model, and the KL divergence of each layer's indexer on the selected keys.

    The model learns from its text, through sparse attention. A layer's indexer learns from the attention of its layer:
    its inputs are detached, so nothing of it reaches the model, and the selected keys have no gradient.

    Args:
        sparse: The sparse model, with indexers.
    """

    def __init__(self, sparse: SparseModel) -> None:
        super().__init__()
        self.mesh, self.sparse, self.family = Mesh(), sparse, sparse.family
        self.backbone: Any = sparse.model.requires_grad_(True)
        self.indexers = sparse.indexers.requires_grad_(True)
        sharing = served(self.family, self.family.attentions(self.backbone), self.indexers)
        self.layers = [
            IndexedLayer(number, self.indexers[str(number)], (number, *others))  # pyright: ignore[reportArgumentType]
            for number, others in sharing.items()
        ]
        self.finite = torch.ones(len(self.layers), dtype=torch.bool, device="cpu")
        self._topk, self._text = 0, torch.zeros(())
        self._figures: dict[int, dict[str, Any]] = {layer.number: {"kl": float("nan")} for layer in self.layers}

    def forward(
        self, input_ids: Tensor, row_weight: Tensor | None = None, backward: Backward | None = None
    ) -> dict[str, Tensor]:
        """The language-model loss and the sum of the layers' KL divergences, without a graph.

        Args:
            input_ids: ``[B, N]``: whole sequences, without padding.
            row_weight: ``[B, N]``: the weight of each query in the KL divergences.
            backward: Called once, with the sum of both. ``None`` for the loss alone.
        """
        numbers = [number for layer in self.layers for number in layer.served]
        with torch.set_grad_enabled(backward is not None):
            with capture_attention(self.backbone, numbers) as captured:
                text = self.backbone(input_ids=input_ids, labels=input_ids, use_cache=False).loss
            stacked = torch.stack([self._learn(layer, captured, row_weight) for layer in self.layers])
            loss = text + stacked.sum()
            if backward is not None:
                backward(loss)
        for layer, kl in zip(self.layers, stacked.detach(), strict=True):
            self._figures[layer.number]["kl"] = kl
        self._text = text.detach()
        self.finite = self.finite.to(stacked.device) & stacked.detach().isfinite()
        return {"loss": loss.detach()}

    def _learn(self, layer: IndexedLayer, captured: Mapping[int, Attended], row_weight: Tensor | None) -> Tensor:
        """The KL divergence of an indexer from the attention of the layers that it serves, over the selected keys."""
        index = captured[layer.number].call.index
        assert index is not None, "the layer has an indexer"
        losses, figures = [], []
        for number in layer.served:
            attended = captured[number]
            call, selected = attended.call, attended.indices
            assert selected is not None, "the model is sparse"
            query, key = call.q.detach(), call.k.detach()
            index = index._replace(index_q=index.index_q.to(query.dtype), index_k=index.index_k.to(query.dtype))
            if not all_finite(query, key, index.index_q, index.index_k):  # NaN for all: every rank then skips the step
                return torch.stack([p.sum() for p in layer.indexer.parameters()]).sum() * torch.nan
            if attended.query_block > 1:
                selected = selected.repeat_interleave(attended.query_block, 1)[:, : query.shape[2]]
            with torch.autocast(query.device.type, enabled=False):
                losses.append(self.family.divergence(
                    api, query, key, index, activation=layer.indexer.activation, teacher_scale=call.scale,
                    teacher_rest=call.rest, topk_indices=selected, row_weight=row_weight,
                ))  # fmt: skip
            if self._topk:
                select = functools.partial(self.family.select, layer.indexer, topk=self._topk)
                figures.append(measure(select, attended, key, index, None))
        for name in figures[0] if figures else ():
            self._figures[layer.number][name] = sum(found[name] for found in figures) / len(figures)
        return torch.stack(losses).mean()

    def measure(self, topk: int) -> None:
        """Measures recall and mass with ``topk`` selected keys from the next batch on; 0 to stop."""
        self._topk = topk

    def figures(self) -> dict[int, dict[str, float]]:
        """KL of each layer's last batch, and recall and mass of the last batch that was measured."""
        return {number: {**figures, "kl": float(figures["kl"])} for number, figures in self._figures.items()}

    def overall(self) -> dict[str, float]:
        """The language-model loss of the last batch."""
        return {"lm": float(self._text)}

    def trained(self) -> Iterator[Tensor]:
        """The weights that are trained: equal on all ranks."""
        return (p for p in self.parameters() if p.requires_grad)

    def buckets(self) -> Iterator[list[nn.Parameter]]:
        """Trained weights whose gradients are summed over ranks in one buffer, in the order of the model."""
        bucket: list[nn.Parameter] = []
        for parameter in self.parameters():
            if not parameter.requires_grad:
                continue
            if bucket and sum(p.numel() for p in bucket) + parameter.numel() > BUCKET:
                yield bucket
                bucket = []
            bucket.append(parameter)
        if bucket:
            yield bucket

    def take_broken(self) -> list[int]:
        """The layers that had a loss that was not finite since the last call."""
        broken = [layer.number for layer, finite in zip(self.layers, self.finite.tolist(), strict=True) if not finite]
        self.finite = torch.ones(len(self.layers), dtype=torch.bool, device="cpu")
        return broken
