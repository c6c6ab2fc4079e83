"""A frozen model and the indexers that learn from it, as one module for a trainer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from streamkl.api import indexer_kl
from streamkl.distillation import attention
from streamkl.distillation.layer import UNDER_WAY, Batch, Layer, Loss
from streamkl.integrations.transformers.capture import capture_attention
from streamkl.integrations.transformers.families import Family
from streamkl.integrations.transformers.indexers import Indexers


class Distiller(nn.Module):
    """Runs the frozen model without gradients; its loss is the sum of the layers' losses.

    Args:
        backbone: A causal language model of transformers.
        family: Its family.
        indexers: The indexers of its layers; for a family with indexers of its own, those of the model.
        loss: Takes the arguments of `streamkl.indexer_kl`.
    """

    def __init__(self, backbone: Any, family: Family, indexers: Indexers, *, loss: Loss = indexer_kl) -> None:
        super().__init__()
        attention.register()
        backbone.requires_grad_(False)
        backbone.eval()
        backbone.set_attn_implementation(attention.NAME)
        self.backbone = backbone
        self.family = family
        self.indexers = indexers.requires_grad_(True)
        modules = family.attentions(backbone)
        self.layers = [Layer(modules[int(n)], family, indexers[n], loss) for n in indexers]  # pyright: ignore[reportArgumentType]
        self.finite = torch.ones(len(self.layers), dtype=torch.bool, device="cpu")
        self._topk = 0
        self._figures: dict[int, dict[str, Any]] = {layer.number: {"kl": float("nan")} for layer in self.layers}

    def train(self, mode: bool = True) -> Distiller:
        """Leaves the frozen model in evaluation mode."""
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, input_ids: Tensor, row_weight: Tensor | None = None) -> dict[str, Tensor]:
        """Sum of the layers' KL divergences.

        Args:
            input_ids: ``[B, N]``: whole sequences, without padding.
            row_weight: ``[B, N]``: the weight of each query; every sequence has the same sum.
        """
        batch = Batch(row_weight, self._topk)
        before = UNDER_WAY.set(batch)
        layers = {layer.number: layer for layer in self.layers}
        learning = capture_attention(self.backbone, layers, each=lambda a: layers[a.layer].learn(batch, a.call))
        try:
            with torch.no_grad(), learning:
                self.backbone.base_model(input_ids=input_ids, use_cache=False)
        finally:
            UNDER_WAY.reset(before)
        stacked = torch.stack([batch.losses[layer.number] for layer in self.layers])
        for layer, loss in zip(self.layers, stacked.detach(), strict=True):
            self._figures[layer.number].update(kl=loss, **batch.figures.get(layer.number, {}))
        self.finite = self.finite.to(stacked.device) & stacked.detach().isfinite()
        return {"loss": stacked.sum()}

    def measure(self, topk: int) -> None:
        """Measures recall and mass with ``topk`` selected keys from the next batch on; 0 to stop."""
        self._topk = topk

    def figures(self) -> dict[int, dict[str, float]]:
        """KL of each layer's last batch, and recall and mass of the last batch that was measured."""
        return {number: {**figures, "kl": float(figures["kl"])} for number, figures in self._figures.items()}

    def take_broken(self) -> list[int]:
        """The layers that had a loss that was not finite since the last call."""
        broken = [layer.number for layer, finite in zip(self.layers, self.finite.tolist(), strict=True) if not finite]
        self.finite = torch.ones(len(self.layers), dtype=torch.bool, device="cpu")
        return broken
