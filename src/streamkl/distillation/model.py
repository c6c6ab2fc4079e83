"""A frozen model and the indexers that learn from it, as one module for a trainer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from streamkl.distillation import attention
from streamkl.distillation.layer import UNDER_WAY, Backward, Batch, Layer, Loss
from streamkl.distillation.mesh import Mesh, check_shared
from streamkl.integrations.transformers.capture import capture_attention
from streamkl.integrations.transformers.families import Family
from streamkl.integrations.transformers.indexers import Indexers
from streamkl.integrations.transformers.probe import prompt, rounded, too_far


class Distiller(nn.Module):
    """Runs the frozen model without gradients; its loss is the sum of the layers' losses.

    A layer's indexer gets its gradients before the next layer runs, so that memory does not grow with the layers.

    Args:
        backbone: A causal language model of transformers.
        family: Its family.
        indexers: The indexers of its layers; for a family with indexers of its own, those of the model.
        loss: Takes the arguments of `streamkl.indexer_kl`; the family's own if not given.
        selects: How many keys each query selects by its indexer; the frozen model then attends to them, and the loss is
            over them. 0 for all keys.
        mesh: Which ranks share a sequence; none do if not given. All ranks of a group call the model together.

    Raises:
        ValueError: Ranks share sequences, and the model mixes tokens in a way that cannot be shared, or keys are
            selected.
    """

    def __init__(
        self,
        backbone: Any,
        family: Family,
        indexers: Indexers,
        *,
        loss: Loss | None = None,
        mesh: Mesh | None = None,
        selects: int = 0,
    ) -> None:
        super().__init__()
        self.mesh, self.selects = Mesh() if mesh is None else mesh, selects
        if selects and self.mesh.context > 1:
            raise ValueError("keys = selected takes whole sequences: leave context_parallel and tensor_parallel at 1")
        is_shared = self.mesh.context > 1 and not self.mesh.by_heads
        if is_shared:
            check_shared(backbone, family)
        attention.register()
        backbone.requires_grad_(False)
        backbone.eval()
        backbone.set_attn_implementation(attention.NAME)
        self.backbone = backbone
        self.family = family
        if is_shared and family.probed:
            self._probe()
        self.indexers = indexers.requires_grad_(True)
        modules = family.attentions(backbone)
        for module in modules.values():
            family.prepare(module, attention.Causal())
        serving = served(family, modules, indexers)
        self.layers = [
            Layer(modules[int(n)], family, indexers[n], loss, serving[int(n)])  # pyright: ignore[reportArgumentType]
            for n in indexers
        ]
        self.finite = torch.ones(len(self.layers), dtype=torch.bool, device="cpu")
        self._topk = 0
        self._figures: dict[int, dict[str, Any]] = {layer.number: {"kl": float("nan")} for layer in self.layers}

    def train(self, mode: bool = True) -> Distiller:
        """Leaves the frozen model in evaluation mode."""
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(
        self, input_ids: Tensor, row_weight: Tensor | None = None, backward: Backward | None = None
    ) -> dict[str, Tensor]:
        """Sum of the layers' KL divergences, without a graph.

        Args:
            input_ids: ``[B, N]``: whole sequences, without padding; those of all ranks that share them.
            row_weight: ``[B, N]``: the weight of each query; every sequence has the same sum.
            backward: Called with the loss of each layer as soon as it is known, before the next layer runs;
                ``Tensor.backward`` adds the gradients to those of the layer's indexer. ``None`` for the loss alone.
        """
        context = self.mesh.share(input_ids.shape[1])
        if context is not None and row_weight is not None:
            row_weight = context.shard(row_weight, 1)
        batch = Batch(row_weight, self._topk, backward, context, self.mesh.by_heads, self.selects)
        layers = {number: layer for layer in self.layers for number in layer.served}
        with capture_attention(self.backbone, layers, each=lambda a: layers[a.layer].learn(batch, a)):
            self._run(input_ids, batch)
        stacked = torch.stack([batch.losses[layer.number] for layer in self.layers])
        for layer, loss in zip(self.layers, stacked, strict=True):
            self._figures[layer.number].update(kl=loss, **batch.figures.get(layer.number, {}))
        self.finite = self.finite.to(stacked.device) & stacked.isfinite()
        return {"loss": stacked.sum()}

    @torch.no_grad()
    def _run(self, input_ids: Tensor, batch: Batch | None) -> Tensor:
        """Hidden states of the frozen model; of this rank's own tokens, if those of the batch share them."""
        inputs, context = {"input_ids": input_ids}, None if batch is None or batch.by_heads else batch.context
        if context is not None:
            inputs["input_ids"] = context.shard(input_ids, 1)
            inputs["position_ids"] = context.position_ids(input_ids.device)[None]
        before = UNDER_WAY.set(batch)
        try:
            return self.backbone.base_model(**inputs, use_cache=False)[0]
        finally:
            UNDER_WAY.reset(before)

    def _probe(self) -> None:
        """Refuses a model, known by its structure alone, whose hidden states change where ranks share a sequence."""
        ids = prompt(self.backbone)
        context = self.mesh.share(ids.shape[1])
        assert context is not None, "ranks share a sequence"
        dense = self._run(ids, None)
        with rounded(self.backbone):
            changed = self._run(ids, None)
        shared = self._run(ids, Batch(None, 0, context=context))
        eps = torch.finfo(self.backbone.dtype).eps
        far = too_far(shared, context.shard(dense, 1), context.shard(changed, 1), eps)
        if float(context.total(torch.tensor(float(bool(far)), device=ids.device))):  # on all ranks, or on none
            raise ValueError(
                f"hidden states of this {self.backbone.config.model_type} model differ where ranks share a sequence"
                f"{' ' if far else ''}{far}: its tokens meet elsewhere than in attention; leave context_parallel at 1"
            )

    def measure(self, topk: int) -> None:
        """Measures recall and mass with ``topk`` selected keys from the next batch on; 0 to stop."""
        self._topk = topk

    def figures(self) -> dict[int, dict[str, float]]:
        """KL of each layer's last batch, and recall and mass of the last batch that was measured."""
        return {number: {**figures, "kl": float(figures["kl"])} for number, figures in self._figures.items()}

    def overall(self) -> dict[str, float]:
        """Figures of the last batch that are of no layer: there are none."""
        return {}

    def trained(self) -> Iterator[Tensor]:
        """The weights that are trained, and buffers beside them: equal on all ranks."""
        yield from self.indexers.parameters()
        yield from self.indexers.buffers()

    def buckets(self) -> Iterator[list[nn.Parameter]]:
        """Trained weights whose gradients are summed over ranks in one buffer: those of a layer."""
        for layer in self.layers:
            yield [p for p in layer.indexer.parameters() if p.requires_grad]

    def take_broken(self) -> list[int]:
        """The layers that had a loss that was not finite since the last call."""
        broken = [layer.number for layer, finite in zip(self.layers, self.finite.tolist(), strict=True) if not finite]
        self.finite = torch.ones(len(self.layers), dtype=torch.bool, device="cpu")
        return broken


def served(family: Family, modules: dict[int, Any], indexers: Indexers) -> dict[int, list[int]]:
    """The layers after each indexer's own that share its top-k."""
    found: dict[int, list[int]] = {}
    last: list[int] | None = None
    for number, module in sorted(modules.items()):
        if str(number) in indexers:
            last = found[number] = []
        elif last is not None and family.shares(module):
            last.append(number)
    return found
