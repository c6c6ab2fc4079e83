"""Runs a suite: the gate for all of its cells, then cell by cell all contestants, each result written as it comes."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from streamkl.bench import gate, isolated, machine, measure, records
from streamkl.bench.cells import Cell, draw_inputs
from streamkl.bench.contestants import engine_name, prepare, refusal, row_losses
from streamkl.bench.records import Record
from streamkl.bench.suites import Suite


@dataclass(frozen=True)
class Options:
    """How a suite is run.

    Attributes:
        backend: The engine of ours, or ``auto``.
        device: Where.
        threads: On how many threads, unless the suite says.
        budget: Seconds that each contestant of a cell may repeat itself for.
        memory: Whether the memory of each contestant is measured, in a process of its own.
        resume: Whether cells that the file has, from this commit and machine, are taken from it.
        output: The file.
    """

    backend: str
    device: torch.device
    threads: int
    budget: float
    memory: bool
    resume: bool
    output: Path


def run(name: str, suite: Suite, options: Options, console: Console) -> list[Record]:
    """Measures a suite and returns its records.

    Raises:
        RedGateError: The engine is wrong in one of the cells; then nothing is measured.
    """
    facts = machine.facts(options.device)
    results = _stored(name, suite, facts, options)
    cells = [cell for cell in suite.cells if cell not in {record.cell for record in results}]
    threads_before = torch.get_num_threads()
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    try:
        with Progress(*columns, console=console, transient=True) as progress:
            gates: dict[object, float] = {}
            for cell in progress.track(cells, description=f"{name}: is it right?"):
                if gate.key(cell) not in gates:
                    checks = (gate.check(cell, options.backend, options.device, n) for n in _threads(suite, options))
                    gates[gate.key(cell)] = max(checks)
            task = progress.add_task(name, total=len(cells))
            for cell in cells:
                progress.update(task, description=f"{name}: {cell}{_expected(results, cell) if suite.isolated else ''}")
                for record in _measure(name, suite, cell, options):
                    record.machine = facts
                    record.date = datetime.now(timezone.utc).isoformat(timespec="seconds")
                    record.gate = gates[gate.key(cell)] if record.contestant == "streamkl" else None
                    records.append(options.output, record)
                    results.append(record)
                progress.advance(task)
    finally:
        torch.set_num_threads(threads_before)
    return results


def _threads(suite: Suite, options: Options) -> tuple[int, ...]:
    return suite.threads or (options.threads,)


def _stored(name: str, suite: Suite, facts: dict[str, str], options: Options) -> list[Record]:
    """The records of cells that the file has in full, from this commit and machine."""
    if not options.resume or not options.output.exists():
        return []
    found = {r.key: r for r in records.read(options.output) if r.suite == name and r.machine == facts}
    stored = []
    for cell in suite.cells:
        keys = [records.Key(name, cell, c, n) for n in _threads(suite, options) for c in suite.contestants]
        if all(key in found for key in keys):
            stored += [found[key] for key in keys]
    return stored


def _expected(results: list[Record], cell: Cell) -> str:
    """How long ours should take, going by the last cell."""
    done = [record for record in results if record.contestant == "streamkl" and record.seconds]
    if not done:
        return ""
    seconds = done[-1].median * cell.pairs / done[-1].cell.pairs
    return f", about {seconds:.0f} s" if seconds < 120 else f", about {seconds / 60:.0f} min"


def _measure(name: str, suite: Suite, cell: Cell, options: Options) -> list[Record]:
    """One record for each contestant and number of threads."""
    threads = _threads(suite, options)
    available = machine.available_bytes(options.device)
    entries = {(c, n): Record(name, cell, c, n) for n in threads for c in suite.contestants}
    for (contestant, _), record in entries.items():
        record.skipped = refusal(contestant, cell, options.device, available)
        if contestant == "streamkl":
            record.engine = engine_name(cell, options.device, options.backend)
    running = {key: record for key, record in entries.items() if record.skipped is None}
    if not suite.isolated:
        _time(cell, running, options)
    for (contestant, n), record in running.items():
        if suite.isolated or (options.memory and n == threads[-1]):
            once = isolated.run(cell, contestant, options.backend, options.device, n)
            record.seconds = record.seconds or [once.seconds]
            record.extra_bytes, record.resident_bytes = once.extra_bytes, once.resident_bytes
    return list(entries.values())


def _time(cell: Cell, running: dict[tuple[str, int], Record], options: Options) -> None:
    """Fills in times, and errors where the cell is a forward."""
    inputs = draw_inputs(cell, options.device)
    prepared = {c: prepare(c, cell, inputs, options.backend) for c in dict.fromkeys(c for c, _ in running)}
    calls = {(c, n): prepared[c] for c, n in running}

    def ready(key: tuple[str, int]) -> None:
        if torch.get_num_threads() != key[1]:
            torch.set_num_threads(key[1])
            calls[key]()  # threads that have just been made are not timed
        finish()

    def finish() -> None:
        if options.device.type == "cuda":
            torch.cuda.synchronize()

    for key, seconds in measure.alternate(calls, options.budget, ready, finish).items():
        running[key].seconds = seconds
    for (contestant, n), record in running.items():
        torch.set_num_threads(n)
        rows = None if cell.wanted else row_losses(contestant, cell, inputs, options.backend)
        if rows is not None:
            record.error = measure.sampled_error(rows, cell, inputs)
