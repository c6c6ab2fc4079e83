"""The time of this checkout beside that of another commit, and beside PyTorch's, in one run.

    python benchmarks/beside_commit.py 7b85e99 forward training --seconds 3

Each cell of the suites (those of ``streamkl bench run``) runs in turns: on the commit, on this checkout, and as the
baselines that have none of this library's loss. Each has a process of its own, which keeps its tensors, and waits while
another one runs. The last lines are geometric means over the cells of a suite.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import geometric_mean, median, quantiles
from typing import Any

import torch

from streamkl.bench.cells import Cell, draw_inputs
from streamkl.bench.implementations import prepare, refusal
from streamkl.bench.machine import available_bytes, facts
from streamkl.bench.measure import alternate
from streamkl.bench.suites import SUITES

ROOT = Path(__file__).parents[1]
BASELINES = ("sdpa", "products", "student")


class Runner:
    """A process that runs calls with the sources in a folder, one when it is told to."""

    def __init__(self, sources: Path, threads: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--runner", "--threads", str(threads)], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(sources)},
        )  # fmt: skip

    def tell(self, **request: Any) -> None:
        """Sends a request, and waits until it is done."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        if self.process.stdout.readline() != "done\n":
            raise RuntimeError(f"{request} failed with exit code {self.process.wait()}")


def serve() -> None:
    """What the process of a `Runner` does."""
    call = None
    for line in sys.stdin:
        request = json.loads(line)
        if "cell" in request:
            call = None  # its tensors go before others come
            cell = Cell.of_dict(request["cell"])
            call = prepare(request["implementation"], cell, draw_inputs(cell, "cpu"))
        else:
            assert call is not None
            call()
        print("done", flush=True)


@contextmanager
def sources_of(commit: str) -> Iterator[Path]:
    """The sources of a commit, in a folder for the while."""
    packed = subprocess.run(["git", "-C", str(ROOT), "archive", commit, "src"], check=True, capture_output=True).stdout
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(packed)) as files:
        files.extractall(folder, filter="data")
        yield Path(folder) / "src"


def portable(cell: Cell) -> dict[str, Any]:
    """A cell as an earlier commit reads it, too: without what has its default."""
    defaults = {field.name: field.default for field in dataclasses.fields(Cell)}
    return {name: value for name, value in cell.to_dict().items() if value != defaults[name]}


def compare(runners: dict[str, Runner], cell: Cell, baselines: tuple[str, ...], seconds: float) -> dict[str, Any]:
    """Times of a cell by who ran it, in seconds, call by call."""
    free = available_bytes(torch.device("cpu"))
    here = ["before", "now", *(b for b in baselines if refusal(b, cell, torch.device("cpu"), free) is None)]
    for name in here:
        implementation = name if name in BASELINES else "streamkl"
        runners[name].tell(cell=portable(cell), implementation=implementation)
    return alternate({name: runners[name].tell for name in here}, seconds)


def ratios(times: dict[str, list[float]], beside: str) -> list[float]:
    """Our time over that of another, round by round."""
    return [ours / theirs for ours, theirs in zip(times["now"], times[beside], strict=True)]


def row(cell: Cell, times: dict[str, list[float]], columns: list[str]) -> str:
    """A line of the table: milliseconds, and ratios with the first and the third quartile."""
    cells = [f"{cell}" if not cell.label else cell.label]
    cells += [f"{1000 * median(times[name]):,.1f}" if name in times else "" for name in ("now", *columns)]
    for name in columns:
        if name in times:
            low, middle, high = quantiles(ratios(times, name), n=4)
            cells.append(f"{middle:.2f} [{low:.2f}, {high:.2f}]")
        else:
            cells.append("")
    return f"| {' | '.join(cells)} |"


def main(arguments: list[str] | None = None) -> None:
    """Prints a table per suite."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?", help="the other commit")
    parser.add_argument("suites", nargs="*", help=f"of {', '.join(SUITES)}")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each call of a cell, at least five rounds")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--most-tokens", type=int, default=2**40, help="leaves out the cells of more")
    parser.add_argument("--quick", action="store_true", help="few cells of few tokens: only shows that it works")
    parser.add_argument("--runner", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    if given.runner:
        serve()
        return
    if not given.suites or (unknown := set(given.suites) - set(SUITES)):
        parser.error(f"name suites, of {', '.join(SUITES)}" + (f", not {unknown}" if given.suites else ""))
    machine = facts(torch.device("cpu"))
    print(f"{machine['device']}, {machine['capability']}, torch {machine['torch']}, {given.threads} threads")
    with ExitStack() as stack:
        before = stack.enter_context(sources_of(given.commit))
        runners = {"before": Runner(before, given.threads)}
        for name in ("now", *BASELINES):
            runners[name] = Runner(ROOT / "src", given.threads)
        for runner in runners.values():
            stack.callback(runner.process.wait)
            stack.callback(runner.process.terminate)
        for name in given.suites:
            suite = SUITES[name].quick() if given.quick else SUITES[name]
            baselines = tuple(b for b in suite.baselines if b in BASELINES)
            columns = ["before", *baselines]
            print(f"\n{name}, {time.strftime('%Y-%m-%d')}, {given.commit}:\n")
            print(f"| cell | now (ms) | {' | '.join(f'{c} (ms)' for c in columns)} ", end="")
            print(f"| {' | '.join(f'now / {c}' for c in columns)} |\n|{' --- |' * (2 + 2 * len(columns))}")
            found: dict[str, dict[str, list[float]]] = {}
            for cell in (cell for cell in suite.cells if cell.tokens <= given.most_tokens):
                times = compare(runners, cell, baselines, given.seconds)
                print(row(cell, times, columns), flush=True)
                for column in set(columns) & set(times):
                    found.setdefault(cell.direction, {}).setdefault(column, []).append(median(ratios(times, column)))
            for direction, by_column in found.items():
                means = (f"{geometric_mean(values):.2f}x {column}" for column, values in sorted(by_column.items()))
                print(f"\n{direction}: {', '.join(means)} (worst {max(by_column['before']):.2f}x before)")


if __name__ == "__main__":
    main()
