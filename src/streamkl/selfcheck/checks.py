"""The checks: the fuzz by the accuracy rule, repeated calls, memory. They are the project's own, not a second set."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from streamkl import attention_kl, engines
from streamkl.bench import isolated
from streamkl.bench.cells import Cell
from streamkl.testing import STUDENT, TEACHER, Heads, check_accuracy, evaluate, make_case, random_case
from streamkl.testing.problems import DTYPES

REPEATS = 5


@dataclass
class Outcome:
    """One check: its name, whether it passed, a line that says so with a figure, and what failed."""

    name: str
    passed: bool
    figure: str
    failures: list[str] = field(default_factory=list)


def accuracy(backend: str, device: torch.device, seeds: range, max_tokens: int) -> Iterator[Outcome | int]:
    """Seeded problems over the whole contract, held to the rule; yields how many are done, and at last the outcome.

    Every other one runs without determinism, so that both paths of an engine are checked.
    """
    engine = engines.choose(backend, device).engine.name
    dtypes = DTYPES if engine == "tiled" and device.type != "mps" else DTYPES[1:]
    worst, failures = 0.0, []
    for n, seed in enumerate(seeds):
        case = random_case(seed, device=device, dtypes=dtypes, max_tokens=max_tokens)
        function = functools.partial(attention_kl, deterministic=seed % 2 == 0)
        errors = check_accuracy(case, backend, function)
        worst = max(worst, errors.worst)
        if not errors.worst <= 1:
            failures.append(f"{errors}; {case}")
        yield n + 1
    figure = f"{len(seeds)} problems, at worst {worst:.2f} of the error that the rule allows"
    yield Outcome(f"accuracy, {engine}", not failures, figure, failures)


def determinism(backend: str, device: torch.device, tokens: int) -> Outcome:
    """Repeated calls with ``deterministic=True`` give the same bits."""
    engine = engines.choose(backend, device).engine.name
    failures = []
    for heads, lse, wanted in (
        (Heads(4, 2, 4, 2), False, STUDENT + TEACHER), (Heads(4, 2, 4, 2), True, STUDENT),
        (Heads(8, 2, 2, 1), False, STUDENT),
    ):  # fmt: skip
        case = make_case(
            0, heads=heads, dtypes=(torch.bfloat16, torch.bfloat16), tokens=(tokens, tokens), causal=True,
            teacher_lse=lse, wanted=wanted, device=device,
        )  # fmt: skip
        runs = [
            evaluate(
                attention_kl, case.tensors, case, **case.options, teacher_lse=case.teacher_lse, deterministic=True,
                backend=backend,
            ).named()
            for _ in range(REPEATS)
        ]  # fmt: skip
        differing = {name for run in runs[1:] for name, x in run.items() if not torch.equal(x, runs[0][name])}
        failures += [f"{', '.join(sorted(differing))} of {case}"] if differing else []
    return Outcome(f"determinism, {engine}", not failures, f"{REPEATS} runs of 3 problems are bit-equal", failures)


def memory(backend: str, device: torch.device, tokens: int) -> Outcome:
    """Four times the tokens add at most four times the memory: nothing grows with queries times keys."""
    engine = engines.choose(backend, device).engine.name
    cells = [Cell.square(1, n, 64, dtype="bfloat16", direction="training") for n in (tokens, 4 * tokens)]
    short, long = (
        isolated.run(cell, "streamkl", backend, device, torch.get_num_threads()).extra_bytes for cell in cells
    )  # fmt: skip
    figure = f"{short / 1e6:,.1f} MB added at {tokens:,} tokens, {long / 1e6:,.1f} MB at {4 * tokens:,}"
    slack = 8 << 20  # what an allocator rounds up to, and tiles of constant size
    return Outcome(f"memory, {engine}", long <= 4 * short + slack, figure)
