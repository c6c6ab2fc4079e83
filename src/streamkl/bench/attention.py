"""The cost of attention distillation between two models, beside that of the logits and with the matrices in memory.

`run` starts ``python -m streamkl.bench.attention REQUEST`` to measure the memory of one step in a process of its own.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from streamkl.bench.costs import Cost, check_agreement, random_ids
from streamkl.bench.isolated import extra_bytes, peak_resident, start_counting
from streamkl.bench.measure import alternate
from streamkl.testing.materialised import eager, materialised_losses

STUDENT, TEACHER, LOGITS, ATTENTION, BOTH, MATERIALISED = (
    "student", "teacher", "logits KL", "attention KL", "both KL", "materialised attention KL"
)  # fmt: skip
"""Forward and backward of the student's language-model loss; the teacher's forward without its head; the student's with
the KL of the logits, with that of attention in all layers, with both; and with attention by its matrices."""
GATE_TOKENS = 256
"""Where the two losses of attention must agree in float32: half dtypes round the probabilities of the matrices, by
which so small a divergence moves by a tenth."""


def run(
    model: str, timed: list[int], lengths: list[int], materialised_up_to: int, seconds: float, dtype: str,
    checkpointing: bool,
) -> list[Cost]:  # fmt: skip
    """Measures time and memory, length by length; all calls of a length alternate in one process.

    Args:
        model: The folder of the model; the student is the same with weights that are a little off.
        timed: Tokens of a sequence where time is measured.
        lengths: Where memory is measured.
        materialised_up_to: The longest sequence for the matrices.
        seconds: Seconds of repetitions per call, at least five repetitions.
        dtype: Of both models.
        checkpointing: Whether the student checkpoints its layers.

    Raises:
        RedGateError: The two losses disagree.
    """
    Bench(model, "float32", checkpointing).check()
    bench = Bench(model, dtype, checkpointing)
    costs = []
    for tokens in sorted({*timed, *lengths}):
        names = [STUDENT, TEACHER, LOGITS, ATTENTION, BOTH] + [MATERIALISED] * (tokens <= materialised_up_to)
        ids, medians = bench.ids(tokens), {}
        if tokens in timed:
            measured = alternate({name: partial(bench.call, name, ids) for name in names}, seconds)
            medians = {name: statistics.median(measured[name]) for name in names}
        for name in names:
            request = {"model": model, "dtype": dtype, "checkpointing": checkpointing, "tokens": tokens, "call": name}
            costs.append(Cost(tokens, name, medians.get(name), extra_bytes(__name__, request)))
    return costs


def summary(costs: list[Cost]) -> list[str]:
    """What attention KL adds: to the peak of a step with logits KL, and to the student's time beyond the teacher's."""
    lines = []
    for tokens in sorted({cost.tokens for cost in costs}):
        at = {cost.call: cost for cost in costs if cost.tokens == tokens}
        more = at[BOTH].extra_bytes / at[LOGITS].extra_bytes - 1
        lines.append(f"{tokens:,} tokens: attention KL adds {more:.1%} to the peak of a step with logits KL")
        seconds = {name: cost.seconds for name, cost in at.items() if cost.seconds is not None}
        if seconds:
            beyond = (seconds[ATTENTION] - seconds[STUDENT] - seconds[TEACHER]) / seconds[STUDENT]
            lines.append(f"{tokens:,} tokens: beyond the teacher's forward it adds {beyond:.2f}x of the student's step")
    return lines


class Bench:
    """A student, a teacher and a distiller of all layers."""

    def __init__(self, model: str, dtype: str, checkpointing: bool) -> None:
        from transformers import AutoModelForCausalLM

        from streamkl.integrations.transformers import AttentionDistiller
        from streamkl.integrations.transformers.checkpointing import checkpoint_activations

        self.student, self.teacher = (
            AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)) for _ in range(2)
        )
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for weight in self.student.parameters():
                noise = torch.randn(weight.shape, generator=generator, device="cpu").to(weight)
                weight += 0.05 * weight.float().std(correction=0).to(weight.dtype) * noise
        self.student.train()
        if checkpointing:
            checkpoint_activations(self.student)
        self.distiller = AttentionDistiller(self.student, self.teacher)

    def ids(self, tokens: int) -> Tensor:
        """A sequence of random tokens."""
        return random_ids(self.student, tokens)

    def call(self, name: str, ids: Tensor) -> float:
        """Runs a call, and returns its loss."""
        if name == TEACHER:
            with torch.no_grad():
                self.teacher.base_model(input_ids=ids, use_cache=False)
            return 0.0
        # Layers that are checkpointed run again in the backward, and must then be eager still.
        with eager(self.student) if name == MATERIALISED else contextlib.nullcontext():
            loss = self.loss(name, ids)
            loss.backward()
        self.student.zero_grad()
        return loss.item()

    def loss(self, name: str, ids: Tensor) -> Tensor:
        """The loss of a step, with its graph."""
        batch: dict[str, Any] = {"input_ids": ids, "labels": ids}
        if name == MATERIALISED:
            losses, outputs = materialised_losses(self.student, self.teacher, batch, self.distiller.pairs)
            return outputs.loss + torch.stack(list(losses.values())).mean()
        if name == STUDENT:
            return self.student(**batch, use_cache=False).loss
        if name == LOGITS:
            outputs = self.student(**batch, use_cache=False)
            with torch.no_grad():
                taught = self.teacher(input_ids=ids, use_cache=False).logits
            return outputs.loss + logits_kl(outputs.logits, taught)
        with self.distiller.step() as step:
            outputs = self.student(**batch, use_cache=False)
            taught = step.teach(input_ids=ids, logits=name == BOTH)
        loss = outputs.loss + step.loss()
        return loss if name == ATTENTION else loss + logits_kl(outputs.logits, taught.logits)

    def check(self) -> None:
        """Raises `RedGateError` if the two losses of attention disagree."""
        ids = self.ids(GATE_TOKENS)
        found = {}
        for name in (ATTENTION, MATERIALISED):
            found[name] = float((self.loss(name, ids) - self.loss(STUDENT, ids)).detach())
        check_agreement(found, ATTENTION, MATERIALISED, GATE_TOKENS)


def logits_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(teacher || student) per token."""
    log_q, log_p = (x.flatten(0, 1).log_softmax(-1) for x in (student, teacher))
    return functional.kl_div(log_q, log_p, reduction="batchmean", log_target=True)


def _main(request: dict[str, Any]) -> None:
    bench = Bench(request["model"], request["dtype"], request["checkpointing"])
    bench.call(request["call"], bench.ids(64))  # kernels are loaded
    ids = bench.ids(request["tokens"])
    before = start_counting("cpu")
    bench.call(request["call"], ids)
    sys.stdout.write(f"{peak_resident() - before}\n")


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
