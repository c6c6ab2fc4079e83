"""``streamkl selfcheck``: the checks with their progress, then the timings, then the two files."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress

from streamkl.bench import machine
from streamkl.bench import run as bench
from streamkl.bench.gate import RedGateError
from streamkl.bench.records import Record
from streamkl.bench.suites import SUITES
from streamkl.cli.errors import UserError, require_vllm
from streamkl.selfcheck import checks, report
from streamkl.selfcheck.checks import Outcome

INTERPRETED_SEEDS, INTERPRETED_TOKENS = 10, 16
"""Problems for Triton's interpreter, which takes a second for a small one."""


def run(device: torch.device, backend: str, seeds: int, quick: bool, output: Path) -> int:
    """Checks, measures, writes; returns 1 if a check failed, in which case nothing is measured."""
    console = Console()
    outcomes = _checks(device, backend, seeds, quick, console)
    records: list[Record] = []
    if all(outcome.passed for outcome in outcomes) and not _only_interpreted(device, backend):
        records, red = _timings(device, backend, quick, output.with_suffix(".jsonl"), console)
        outcomes += [Outcome("timings", False, red)] if red else []
    for outcome in outcomes:
        _say(outcome, console)
    return _report(output, device, outcomes, records, console)


def run_vllm(backend: str, output: Path) -> int:
    """Checks the plugin for vLLM on the device and with the dtypes that vLLM has there; returns the exit code."""
    require_vllm()
    from streamkl.selfcheck import serving

    console, outcomes = Console(), []
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtypes = ("float16", "bfloat16") if device.type == "cuda" else ("float32",)
    for dtype in dtypes:
        with console.status(f"vLLM: a tiny model in {dtype}, dense and sparse, six engines ..."):
            try:
                for outcome in serving.checks(dtype, backend):
                    outcomes.append(outcome)
                    _say(outcome, console)
            except RuntimeError as error:
                raise UserError(str(error)) from None
    return _report(output, device, outcomes, [], console)


def _say(outcome: Outcome, console: Console) -> None:
    verdict = "[green]passed[/]" if outcome.passed else "[bold red]failed[/]"
    console.print(f"{verdict} {outcome.name}: {outcome.figure}", highlight=False)
    for failure in outcome.failures[:5]:
        console.print(f"  {failure}", highlight=False, markup=False)


def _report(
    output: Path, device: torch.device, outcomes: list[Outcome], records: list[Record], console: Console
) -> int:
    """Writes the two files; returns the exit code."""
    data, page = report.write(output, machine.facts(device), outcomes, records)
    console.print(f"The report is in {page} and {data}.", highlight=False)
    return 0 if all(outcome.passed for outcome in outcomes) else 1


def _checks(device: torch.device, backend: str, seeds: int, quick: bool, console: Console) -> list[Outcome]:
    outcomes = []
    runs = [(backend, seeds, 64 if quick else 96, 200)]
    if device.type == "cuda":  # tiles are larger there: problems of several of them
        runs.append((backend, seeds // 4, 300 if quick else 1000, 500))
    interpreted = ("triton", min(seeds, INTERPRETED_SEEDS), INTERPRETED_TOKENS, 20)
    if _only_interpreted(device, backend):
        runs = [interpreted]
    elif device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        runs.append(interpreted)
    with Progress(console=console, transient=True) as progress:
        for engine, count, max_tokens, tokens in runs:
            task = progress.add_task(f"{engine}: accuracy", total=count)
            for done in checks.accuracy(engine, device, range(count), max_tokens):
                if isinstance(done, Outcome):
                    outcomes.append(done)
                else:
                    progress.update(task, completed=done)
            task = progress.add_task(f"{engine}: determinism", total=None)
            outcomes.append(checks.determinism(engine, device, tokens))
            progress.remove_task(task)
        if not _only_interpreted(device, backend):
            progress.add_task(f"{backend}: memory", total=None)
            outcomes.append(checks.memory(backend, device, 2048 if quick else 8192))
    return outcomes


def _only_interpreted(device: torch.device, backend: str) -> bool:
    """Whether only the interpreter is asked for, whose time and memory mean nothing."""
    return device.type == "cpu" and backend == "triton"


def _timings(
    device: torch.device, backend: str, quick: bool, output: Path, console: Console
) -> tuple[list[Record], str]:
    """The records of the benchmark's own suites, or why its gate was red."""
    output.unlink(missing_ok=True)
    options = bench.Options(backend, device, torch.get_num_threads(), 0.2 if quick else 5.0, False, False, output)
    records: list[Record] = []
    for name in ("forward", "training"):
        suite = SUITES[name].quick() if quick else SUITES[name]
        try:
            records += bench.run(f"{name}-quick" if quick else name, suite, options, console)
        except RedGateError as error:
            return records, str(error)
    return records, ""
