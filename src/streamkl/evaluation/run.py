"""Runs all lengths, contexts and methods of a plan, and stores the results; existing results are not repeated."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rich.progress import Progress

from streamkl.evaluation.haystack import Haystack
from streamkl.evaluation.layers import look
from streamkl.evaluation.methods import DENSE, Method
from streamkl.evaluation.plan import Plan
from streamkl.evaluation.records import Record, Records
from streamkl.evaluation.subject import Subject
from streamkl.evaluation.tasks import Context, build, is_right

VERSION = 3
"""Of contexts, selections and records: a run does not resume from the results of another version."""

MORE = 1
"""How many tokens are generated beyond the length of the answer."""


class Step(NamedTuple):
    """One context with one method, or the layers of all methods on it."""

    task: str
    length: int
    number: int
    methods: tuple[Method, ...]


@dataclass
class Evaluation:
    """A plan, a model and text; ``identity`` holds what else results depend on, by name."""

    plan: Plan
    subject: Subject
    haystack: Haystack
    identity: dict[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Refuses an unsuitable plan, model or text before anything runs or is written.

        Raises:
            ValueError: A length is too long, all budgets are, or the model cannot attend to selected keys.
        """
        for length in self.plan.lengths:
            if self.plan.selectors and self.plan.methods(length) == [DENSE]:
                raise ValueError(f"no budget is below {length:,} tokens: a top-k of all keys is dense attention")
        longest = max(self.plan.lengths)
        self.subject.check_length(longest)
        for task, length in itertools.product(self.plan.tasks, (min(self.plan.lengths), longest)):
            build(task, length, 0, seed=self.plan.seed, haystack=self.haystack)
        for method in self.plan.methods(longest)[1:2]:  # sparsify refuses models that it does not know
            self.subject.use(method)
            self.subject.use(DENSE)

    def run(self, folder: Path, progress: Progress) -> Records:
        """Runs the steps whose results are not in the folder yet."""
        records = Records(folder, self.full_identity())
        steps = [step for step in (_left(step, records) for step in self.steps()) if step.methods]
        bar = progress.add_task("", total=len(steps))
        self._warm_up(steps)
        context: Context | None = None
        for step in steps:
            progress.update(bar, description=_description(step, records))
            if context is None or (context.task, context.length, context.number) != step[:3]:
                context = self.context(step)
            for record in self.do(step, context):
                records.add(record)
            progress.advance(bar)
        return records

    def steps(self) -> Iterator[Step]:
        """All steps, context by context, so that an interrupted run has all methods on its finished contexts."""
        plan = self.plan
        counts = {task: plan.segments if task == "perplexity" else plan.contexts for task in plan.tasks}
        for length, number in itertools.product(plan.lengths, range(max(counts.values(), default=0))):
            for task in plan.tasks:
                if number < counts[task]:
                    yield from (Step(task, length, number, (method,)) for method in plan.methods(length))
        for length, number in itertools.product(plan.lengths, range(plan.layer_segments)):
            sparse = tuple(method for method in plan.methods(length) if method != DENSE)
            if sparse:
                yield Step("layers", length, number, sparse)

    def context(self, step: Step) -> Context:
        """The context of a step; layers are measured on passages that are scored for perplexity."""
        task = "perplexity" if step.task == "layers" else step.task
        context = build(task, step.length, step.number, seed=self.plan.seed, haystack=self.haystack)
        return context._replace(task=step.task)

    def do(self, step: Step, context: Context) -> Iterator[Record]:
        """Runs a step."""
        if step.task == "layers":
            for method, layers in look(self.subject, context.ids, list(step.methods)).items():
                found = {name: {str(n): round(x, 5) for n, x in of.items()} for name, of in layers._asdict().items()}
                yield Record(*step[:3], method.name, {**found, "book": context.book})
            return
        (method,) = step.methods
        self.subject.use(method)
        if context.answer:
            yield Record(*step[:3], method.name, self._asked(context))
        else:
            yield Record(*step[:3], method.name, self._scored(context))

    def _warm_up(self, steps: list[Step]) -> None:
        """Runs every kind of method on a few tokens, so that no measured prefill waits for an engine to be built."""
        kinds = {(method.selector, method.query_block): method for step in steps for method in step.methods}
        for method in kinds.values():
            self.subject.use(method)
            self.subject.losses(self.haystack.encode(self.haystack.books[0].text[:64])[:16] * 2)

    def _asked(self, context: Context) -> dict[str, Any]:
        steps = len(self.haystack.encode(f" {context.answer}")) + MORE
        answer = self.subject.answer(context.ids, steps)
        return {
            "right": is_right(context, answer.text), "generated": answer.text, "answer": context.answer,
            "seconds": round(answer.seconds, 4), "book": context.book,
        }  # fmt: skip

    def _scored(self, context: Context) -> dict[str, Any]:
        losses = self.subject.losses(context.ids)
        rows = losses.rows.double()
        # No later query selects keys for the last query of a block.
        last = rows[self.plan.largest_query_block - 1 :: self.plan.largest_query_block]
        return {
            "nll": float(rows.sum()), "tokens": len(rows), "nll_last": float(last.sum()), "tokens_last": len(last),
            "seconds": round(losses.seconds, 4), "book": context.book,
        }  # fmt: skip

    def full_identity(self) -> dict[str, Any]:
        """All that a result depends on."""
        return {
            **self.identity, "weights": self.subject.fingerprint, "seed": self.plan.seed,
            "text": self.haystack.digest, "decode": self.subject.decode,
            "dtype": str(self.subject.model.dtype).removeprefix("torch."),
            "largest_query_block": self.plan.largest_query_block, "version": VERSION,
        }  # fmt: skip


def _left(step: Step, records: Records) -> Step:
    """The part of a step that is not done yet."""
    return step._replace(methods=tuple(m for m in step.methods if (*step[:3], m.name) not in records))


def _description(step: Step, records: Records) -> str:
    """The text of the progress bar."""
    if step.task == "layers":
        return f"layers {step.length:,} #{step.number}"
    method = step.methods[0].name
    same = [r for r in records if r[:2] == step[:2] and r.method == method and "right" in r.found]
    score = f" ({sum(r.found['right'] for r in same)}/{len(same)})" if same else ""
    return f"{step.task} {step.length:,} #{step.number} {method}{score}"
