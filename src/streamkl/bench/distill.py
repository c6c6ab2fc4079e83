"""The cost of a distillation step beside the frozen model's forward, and with the loss as people write it today.

`run` starts ``python -m streamkl.bench.distill REQUEST`` to measure the memory of one call in a process of its own.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from streamkl.bench import baselines
from streamkl.bench.costs import Cost, check_agreement, random_ids
from streamkl.bench.isolated import extra_bytes, peak_resident, start_counting
from streamkl.bench.measure import alternate

FORWARD, WITH_HEAD, STEP, MATERIALISED = "forward", "forward with logits", "step", "materialised"
"""The frozen model without its head, as training runs it; with its head; a whole step of forward, losses, backward and
optimizer; the same step with the matrices of the loss in memory."""
GATE_TOKENS = 512
"""Where the two losses must agree, but for bfloat16's rounding."""


def run(
    model: str, lengths: list[int], materialised_up_to: int, seconds: float, heads: int, head_dim: int
) -> list[Cost]:
    """Measures, length by length; all calls of a length alternate in one process.

    Args:
        model: The folder of the model.
        lengths: Tokens of a sequence.
        materialised_up_to: The longest sequence for the materialised loss.
        seconds: Seconds of repetitions per call, at least five repetitions.
        heads: Index heads.
        head_dim: Width of an index head.

    Raises:
        RedGateError: The two losses disagree.
    """
    bench = Bench(model, heads, head_dim)
    bench.check()
    costs = []
    for tokens in lengths:
        names = [FORWARD, WITH_HEAD, STEP] + [MATERIALISED] * (tokens <= materialised_up_to)
        ids = bench.ids(tokens)
        calls: dict[str, Callable[[], Any]] = {name: bench.call(name, ids) for name in names}
        measured = alternate(calls, seconds, bench.ready)
        for name in names:
            request = {"model": model, "heads": heads, "head_dim": head_dim, "tokens": tokens, "call": name}
            costs.append(Cost(tokens, name, statistics.median(measured[name]), extra_bytes(__name__, request)))
    return costs


class Bench:
    """A frozen model in bfloat16 with new indexers."""

    def __init__(self, model: str, heads: int, head_dim: int) -> None:
        from transformers import AutoModelForCausalLM

        from streamkl.distillation.indexers import make_indexers
        from streamkl.distillation.model import Distiller
        from streamkl.distillation.settings import Settings
        from streamkl.integrations.transformers.families import family_of

        settings = Settings(model=model, text=["none"], output="none", heads=heads, head_dim=head_dim)
        self.backbone = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        self.frozen = {FORWARD: self.backbone.base_model, WITH_HEAD: self.backbone}
        family = family_of(self.backbone.config)
        self.distiller = Distiller(self.backbone, family, make_indexers(self.backbone, family, settings))
        trained = [p for p in self.distiller.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-4)

    def ids(self, tokens: int) -> Tensor:
        """A sequence of random tokens."""
        return random_ids(self.backbone, tokens)

    def ready(self, name: str) -> None:
        """Sets up the model for a call."""
        self.backbone.set_attn_implementation("sdpa" if name in self.frozen else "streamkl_distill")
        for layer in self.distiller.layers:
            layer.divergence = materialised_kl if name == MATERIALISED else None

    def call(self, name: str, ids: Tensor) -> Callable[[], Any]:
        """The call of a name."""
        return (lambda: self.forward(self.frozen[name], ids)) if name in self.frozen else (lambda: self.step(ids))

    @torch.no_grad()
    def forward(self, model: torch.nn.Module, ids: Tensor) -> None:
        """The frozen model, or the part of it that training runs."""
        model(input_ids=ids, use_cache=False)

    def step(self, ids: Tensor) -> None:
        """A whole step."""
        self.distiller(ids, backward=Tensor.backward)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def check(self) -> None:
        """Raises `RedGateError` if the two losses disagree."""
        found = {}
        for name in (STEP, MATERIALISED):
            self.ready(name)
            with torch.no_grad():
                found[name] = float(self.distiller(self.ids(GATE_TOKENS))["loss"])
        check_agreement(found, STEP, MATERIALISED, GATE_TOKENS)


def materialised_kl(
    teacher_q: Tensor,
    teacher_k: Tensor,
    index_q: Tensor,
    index_k: Tensor,
    index_w: Tensor | None,
    **options: Any,
) -> Tensor:
    """The loss of relu indexers with both matrices in memory, with the teacher's default scale."""
    (rows,) = baselines.eager_indexer(teacher_q, teacher_k, index_q, index_k.unsqueeze(1), index_w, causal=True)
    return rows.mean()


def _main(request: dict[str, Any]) -> None:
    bench = Bench(request["model"], request["heads"], request["head_dim"])
    name = request["call"]
    bench.ready(name)
    bench.call(name, bench.ids(64))()  # kernels are loaded, and the optimizer has its state
    call = bench.call(name, bench.ids(request["tokens"]))
    before = start_counting("cpu")
    call()
    sys.stdout.write(f"{peak_resident() - before}\n")


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
