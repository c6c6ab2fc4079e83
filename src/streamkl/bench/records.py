"""Results on disk: one line of JSON per implementation and cell. docs/benchmarks.md describes the fields."""

from __future__ import annotations

import itertools
import json
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from streamkl.bench.cells import Cell

PERIODS = 3
"""Parts of a run whose medians are compared, to see whether the machine changed its speed."""


class Key(NamedTuple):
    """The identity of a record: of two with the same key, the later one counts."""

    suite: str
    cell: Cell
    implementation: str
    threads: int


@dataclass
class Record:
    """The result of one implementation in one cell.

    Attributes:
        suite: The suite, or ``shape`` for a cell from the command line.
        cell: The problem.
        implementation: ``streamkl`` or a baseline.
        threads: The number of threads.
        engine: The engine that ``streamkl`` ran on; empty for baselines.
        seconds: Every repetition.
        extra_bytes: The memory that one call added to a process at its peak, gradients included.
        resident_bytes: The peak resident memory of that process.
        error: The largest error of sampled row losses against float64, relative to their mean.
        gate: The largest ratio of an error of StreamKL to the one that the accuracy rule allows.
        skipped: Why it did not run.
        machine: Device, capability, versions and commit.
        date: The time of measurement, in UTC.
    """

    suite: str
    cell: Cell
    implementation: str
    threads: int
    engine: str = ""
    seconds: list[float] = field(default_factory=list)
    extra_bytes: int | None = None
    resident_bytes: int | None = None
    error: float | None = None
    gate: float | None = None
    skipped: str | None = None
    machine: dict[str, str] = field(default_factory=dict)
    date: str = ""

    @property
    def key(self) -> Key:
        """The identity of the record."""
        return Key(self.suite, self.cell, self.implementation, self.threads)

    @property
    def median(self) -> float:
        """Seconds, the median of the repetitions."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Seconds between the first and the third quartile of the repetitions."""
        if len(self.seconds) < 2:
            return 0.0
        first, _, third = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return third - first

    @property
    def drift(self) -> float:
        """How far the median moved between the first, second and third part of the run: 0.15 for 15%."""
        count = len(self.seconds)
        if count < PERIODS:
            return 0.0
        cuts = [count * n // PERIODS for n in range(PERIODS + 1)]
        medians = [statistics.median(self.seconds[i:j]) for i, j in itertools.pairwise(cuts)]
        return max(medians) / min(medians) - 1

    def to_json(self) -> str:
        """One line, with the median and the spread added for readers."""
        values: dict[str, Any] = {**asdict(self), "cell": self.cell.to_dict()}
        if self.seconds:
            values |= {"median": self.median, "spread": self.spread}
        return json.dumps(values)

    @classmethod
    def of_json(cls, line: str) -> Record:
        """The record that `to_json` wrote."""
        values = json.loads(line)
        values = {name: value for name, value in values.items() if name not in ("median", "spread")}
        return cls(**{**values, "cell": Cell.of_dict(values["cell"])})


def append(path: Path, record: Record) -> None:
    """Appends a whole line, so that an interrupted run leaves a readable file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(record.to_json() + "\n")


def read(path: Path) -> list[Record]:
    """All records, the last one of each key, in the order of the file.

    Raises:
        ValueError: A line is not a record; the message names file and line.
    """
    records: dict[Any, Record] = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            record = Record.of_json(line)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{path}, line {number}: not a record of `streamkl bench run`") from None
        records[record.key] = record
    return list(records.values())
