"""Runs a suite: the gate for all of its cells, then all implementations cell by cell, each written once measured."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from itertools import groupby
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TimeElapsedColumn

from streamkl.bench import gate, isolated, machine, measure, records
from streamkl.bench.cells import Cell, draw_inputs
from streamkl.bench.implementations import engine_name, prepare, refusal, row_losses
from streamkl.bench.records import Key, Record
from streamkl.bench.suites import Suite


@dataclass(frozen=True)
class Options:
    """How a suite is run.

    Attributes:
        backend: The engine of StreamKL, or ``auto``.
        device: The device.
        threads: The number of threads, unless the suite sets it.
        budget: Seconds for the repetitions of each implementation of a cell.
        memory: Whether the memory of each implementation is measured, in a process of its own.
        resume: Whether cells that the file has, from this commit and machine, are taken from it.
        output: The file of results.
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

    Consecutive cells that differ only in their direction alternate, so that the two times whose difference is a
    backward are measured in the same period.

    Raises:
        RedGateError: The engine is wrong in one of the cells; then nothing is measured.
    """
    facts = machine.facts(options.device)
    results = _stored(name, suite, facts, options)
    cells = [cell for cell in suite.cells if cell not in {record.cell for record in results}]
    threads_before = torch.get_num_threads()
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(SpinnerColumn(), *columns, console=console, transient=True) as progress:
            gates: dict[object, float] = {}
            for cell in progress.track(cells, description=f"{name}: is it right?"):
                if gate.key(cell) not in gates:
                    checks = (gate.check(cell, options.backend, options.device, n) for n in _threads(suite, options))
                    gates[gate.key(cell)] = max(checks)
            task = progress.add_task(name, total=len(cells))
            for _, group in groupby(cells, lambda cell: replace(cell, direction="")):
                together = list(group)
                progress.update(task, description=f"{name}: {_announce(together, results, suite)}")
                for record in _measure(name, suite, together, options):
                    record.machine = facts
                    record.date = datetime.now(timezone.utc).isoformat(timespec="seconds")
                    record.gate = gates[gate.key(record.cell)] if record.implementation == "streamkl" else None
                    records.append(options.output, record)
                    results.append(record)
                progress.advance(task, len(together))
    finally:
        torch.set_num_threads(threads_before)
    return results


def _threads(suite: Suite, options: Options) -> tuple[int, ...]:
    return suite.threads or (options.threads,)


def _stored(name: str, suite: Suite, facts: dict[str, str], options: Options) -> list[Record]:
    """The records of cells that the file has in full, from this commit and machine, of the engine that would run."""
    if not options.resume or not options.output.exists():
        return []
    found = {r.key: r for r in records.read(options.output) if r.suite == name and r.machine == facts}
    stored = []
    for cell in suite.cells:
        engines = ("", engine_name(cell, options.device, options.backend))
        keys = [Key(name, cell, who, n) for n in _threads(suite, options) for who in suite.implementations]
        if all(key in found and found[key].engine in engines for key in keys):
            stored += [found[key] for key in keys]
    return stored


def _announce(cells: list[Cell], results: list[Record], suite: Suite) -> str:
    """The current measurement, and, if it runs once, an estimate of StreamKL's time from the last cell."""
    text = f"{cells[0]}{''.join(f' and {cell.direction}' for cell in cells[1:])}"
    done = [record for record in results if record.implementation == "streamkl" and record.seconds]
    if not suite.isolated or not done:
        return text
    seconds = done[-1].median * cells[0].pairs / done[-1].cell.pairs
    return f"{text}, about {seconds:.0f} s" if seconds < 120 else f"{text}, about {seconds / 60:.0f} min"


def _measure(name: str, suite: Suite, cells: list[Cell], options: Options) -> list[Record]:
    """One record per cell, implementation and number of threads."""
    threads = _threads(suite, options)
    available = machine.available_bytes(options.device)
    measured = [Record(name, cell, who, n) for cell in cells for n in threads for who in suite.implementations]
    for record in measured:
        record.skipped = refusal(record.implementation, record.cell, options.device, available)
        if record.implementation == "streamkl":
            record.engine = engine_name(record.cell, options.device, options.backend)
    running = {record.key: record for record in measured if record.skipped is None}
    if not suite.isolated:
        _time(running, options)
    for record in running.values():
        if suite.isolated or (options.memory and record.threads == threads[-1]):
            once = isolated.run(record.cell, record.implementation, options.backend, options.device, record.threads)
            if once.loss is not None and not math.isfinite(once.loss):
                raise gate.RedGateError(f"{record.cell}: {record.implementation} has a loss of {once.loss}")
            record.seconds = record.seconds or [once.seconds]
            record.extra_bytes, record.resident_bytes = once.extra_bytes, once.resident_bytes
    return measured


def _time(running: dict[Key, Record], options: Options) -> None:
    """Fills in times, and errors where the cell is a forward."""
    inputs = {cell: draw_inputs(cell, options.device) for cell in dict.fromkeys(key.cell for key in running)}
    timed_as = {key: same if (same := _same_work(key)) in running else key for key in running}
    calls = {
        key: prepare(key.implementation, key.cell, inputs[key.cell], options.backend)
        for key in dict.fromkeys(timed_as.values())
    }

    def ready(key: Key) -> None:
        if torch.get_num_threads() != key.threads:
            torch.set_num_threads(key.threads)
            calls[key]()  # not timed: it starts the threads
        finish()

    def finish() -> None:
        if options.device.type == "cuda":
            torch.cuda.synchronize()

    seconds = measure.alternate(calls, options.budget, ready, finish)
    for key, record in running.items():
        record.seconds = seconds[timed_as[key]]
    for key, record in running.items():
        torch.set_num_threads(key.threads)
        rows = None if key.cell.wanted else row_losses(key.implementation, key.cell, inputs[key.cell], options.backend)
        if rows is not None:
            record.error = measure.sampled_error(rows, key.cell, inputs[key.cell])


def _same_work(key: Key) -> Key:
    """The key that is timed for it: a step of attention is the same beside student gradients and beside all."""
    if key.implementation == "sdpa" and key.cell.direction == "training-both":
        return key._replace(cell=replace(key.cell, direction="training"))
    return key
