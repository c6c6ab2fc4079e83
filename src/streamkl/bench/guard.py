"""The guard against regressions: a few ratios of times, measured in one run and held to a table of this package.

A ratio is StreamKL's time over that of attention by PyTorch, or of its bare products, on the same tensors, so that it
depends on the machine's instruction set much more than on its speed. The table has a row per instruction set.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch

from streamkl.bench import machine
from streamkl.bench.cells import Cell, draw_inputs
from streamkl.bench.implementations import prepare
from streamkl.bench.measure import alternate
from streamkl.testing import Heads

TABLE = Path(__file__).with_name("guard.json")
AGAIN = (5.0, 10.0, 20.0)
"""Seconds before a ratio that is beyond its band is measured again, time after time: noise comes in phases."""
UPDATES = 3
"""Measurements whose medians become the row of a machine."""


class Guarded(NamedTuple):
    """A cell, and the call that StreamKL's time is divided by.

    Attributes:
        cell: The cell.
        beside: ``"sdpa"``, attention on the teacher's tensors, or ``"products"``, the bare matrix products.
    """

    cell: Cell
    beside: str


def _indexer(heads: int, dim: int, topk: int = 0) -> Cell:
    return Cell(2048, Heads(16, 4, heads, 1), (128, dim), direction="training", indexer=True, topk=topk)


GUARDED = {
    "forward beside attention": Guarded(Cell.square(4, 2048, 64), "sdpa"),
    "forward beside its products": Guarded(Cell.square(4, 2048, 128), "products"),
    "student gradients beside attention's": Guarded(Cell.square(4, 2048, 64, direction="training"), "sdpa"),
    "all gradients beside attention's": Guarded(Cell.square(4, 2048, 64, direction="training-both"), "sdpa"),
    "indexer of 1 head beside attention": Guarded(_indexer(1, 128), "sdpa"),
    "indexer of 8 heads beside attention": Guarded(_indexer(8, 64), "sdpa"),
    "indexer on 256 keys beside attention": Guarded(_indexer(1, 128, topk=256), "sdpa"),
}
"""What is guarded, by name."""


class Verdict(NamedTuple):
    """A ratio beside that of the table.

    Attributes:
        name: One of `GUARDED`.
        ratio: The least that was measured.
        expected: That of the table.
        tries: How often it was measured.
    """

    name: str
    ratio: float
    expected: float
    tries: int

    def holds(self, band: float) -> bool:
        """Whether the ratio is within the band."""
        return self.ratio <= band * self.expected


def measure(names: Iterable[str], seconds: float) -> dict[str, float]:
    """The ratios, medians over rounds in which all calls alternate.

    Args:
        names: Of `GUARDED`.
        seconds: Of repetitions per call, at least five repetitions.
    """
    calls = {}
    for name in names:
        cell, beside = GUARDED[name]
        inputs = draw_inputs(cell, "cpu")
        calls[name, "streamkl"] = prepare("streamkl", cell, inputs)
        calls[name, beside] = prepare(beside, cell, inputs)
    taken = alternate(calls, seconds)
    ours = {name: times for (name, who), times in taken.items() if who == "streamkl"}
    theirs = {name: times for (name, who), times in taken.items() if who != "streamkl"}
    return {
        name: statistics.median(a / b for a, b in zip(ours[name], theirs[name], strict=True)) for name in ours
    }  # fmt: skip


def instruction_set() -> str:
    """That of this machine, by which the table is read."""
    most = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()  # of oneDNN, whose products these are
    amx = torch.cpu._is_amx_tile_supported() and (most in ("", "ALL", "DEFAULT") or "AMX" in most)
    return machine.capability(torch.device("cpu")) + (", AMX" if amx else "")


def read(table: Path) -> dict[str, dict[str, float]]:
    """The ratios by instruction set and name."""
    return json.loads(table.read_text(encoding="utf-8")) if table.exists() else {}


def check(expected: dict[str, float], band: float, seconds: float) -> list[Verdict]:
    """Measures what the table has; what is beyond the band is measured again, and its least ratio counts.

    Args:
        expected: The table's ratios, by name.
        band: By how much a ratio may be more.
        seconds: Of repetitions per call.
    """
    found: dict[str, list[float]] = {name: [] for name in GUARDED if name in expected}
    for pause in (0.0, *AGAIN):
        again = [name for name, ratios in found.items() if not ratios or min(ratios) > band * expected[name]]
        if not again:
            break
        time.sleep(pause)
        for name, ratio in measure(again, seconds).items():
            found[name].append(ratio)
    return [Verdict(name, min(ratios), expected[name], len(ratios)) for name, ratios in found.items()]


def update(table: Path, seconds: float) -> dict[str, float]:
    """Measures everything, and writes this machine's row of the table: the medians of `UPDATES` measurements.

    Args:
        table: The file.
        seconds: Of repetitions per call.
    """
    found = [measure(GUARDED, seconds) for _ in range(UPDATES)]
    row = {name: round(statistics.median(each[name] for each in found), 3) for name in GUARDED}
    table.write_text(json.dumps({**read(table), instruction_set(): row}, indent=2) + "\n", encoding="utf-8")
    return row
