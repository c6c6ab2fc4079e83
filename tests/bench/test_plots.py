"""Plots are written for the suites that there are records of, and for no other."""

from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from streamkl.bench import plots
from streamkl.bench.cells import Cell
from streamkl.bench.records import Record


def records() -> list[Record]:
    found = []
    for tokens in (2048, 4096):
        for direction in ("forward", "training"):
            cell = Cell.square(8, tokens, 64, direction=direction)
            for suite, others in ((direction, ("sdpa", "products")), ("eager", ("eager",))):
                found += [Record(suite, cell, name, 2, seconds=[0.1, 0.2]) for name in ("streamkl", *others)]
        cell = Cell.square(1, tokens, 64, direction="training")
        found += [
            Record("memory", cell, name, 2, seconds=[1.0], extra_bytes=tokens**2) for name in ("streamkl", "eager")
        ]
    return found


def test_pictures_are_written(tmp_path: Path) -> None:
    written = plots.draw(records(), tmp_path / "new")
    assert [path.name for path in written] == ["sdpa.png", "eager.png", "memory.png"]
    assert all(path.stat().st_size > 10_000 for path in written)


def test_times_beside_attention_have_a_panel_for_each_denominator() -> None:
    figure = plots.beside_attention(records())
    assert figure is not None
    assert [axes.get_xlabel() for axes in figure.axes] == [
        "time / time of attention's forward",
        "time / time of attention's forward and backward",
    ]


def test_nothing_is_drawn_of_nothing(tmp_path: Path) -> None:
    assert plots.draw([r for r in records() if r.suite == "memory"], tmp_path) == [tmp_path / "memory.png"]
    assert plots.draw([], tmp_path) == []
