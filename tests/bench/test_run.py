"""A suite is run whole, in turns, and not twice."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from streamkl.bench import gate, measure, records
from streamkl.bench import run as harness
from streamkl.bench.cells import Cell
from streamkl.bench.suites import Suite

CELLS = tuple(Cell.square(1, 64, 16, dtype="float32", direction=direction) for direction in ("forward", "training"))
SUITE = Suite("a question", CELLS, ("eager",))


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> harness.Options:
    monkeypatch.setattr(gate, "TOKENS", 61)
    monkeypatch.setattr(measure, "MOST_ROUNDS", 3)
    threads = torch.get_num_threads()
    return harness.Options("tiled", torch.device("cpu"), threads, 0.0, False, True, tmp_path / "bench.jsonl")


def run(suite: Suite, options: harness.Options) -> list[records.Record]:
    return harness.run("suite", suite, options, Console(file=io.StringIO()))


def test_both_directions_of_a_cell_take_turns(options: harness.Options, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = []
    alternate = measure.alternate
    monkeypatch.setattr(
        measure, "alternate", lambda calls, *rest: rounds.append(list(calls)) or alternate(calls, *rest)
    )
    run(SUITE, options)
    assert [[(key.cell.direction, key.implementation) for key in keys] for keys in rounds] == [
        [(direction, name) for direction in ("forward", "training") for name in ("streamkl", "eager")]
    ]


def test_student_gradients_and_all_gradients_have_one_time_of_attention(options: harness.Options) -> None:
    cells = tuple(replace(CELLS[1], direction=direction) for direction in ("training", "training-both"))
    found = run(Suite("a question", cells, ("sdpa",)), options)
    student, both = (r.seconds for r in found if r.implementation == "sdpa")
    ours, all_of_ours = (r.seconds for r in found if r.implementation == "streamkl")
    assert student == both
    assert ours != all_of_ours


def test_an_interrupted_run_is_resumed(options: harness.Options, monkeypatch: pytest.MonkeyPatch) -> None:
    longer = replace(SUITE, cells=(*CELLS, Cell.square(1, 96, 16, dtype="float32")))
    measured = []
    measure_cells = harness._measure

    def interrupted(name: str, suite: Suite, cells: list[Cell], given: harness.Options) -> list[records.Record]:
        measured.append(cells)
        if cells[0].tokens == 96 and len(measured) == 2:
            raise KeyboardInterrupt
        return measure_cells(name, suite, cells, given)

    monkeypatch.setattr(harness, "_measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(longer, options)
    assert len(records.read(options.output)) == 4
    results = run(longer, options)
    assert [cells[0].tokens for cells in measured] == [64, 96, 96]
    assert records.read(options.output) == results


def test_another_engine_is_measured_again(options: harness.Options) -> None:
    run(SUITE, options)
    results = run(SUITE, replace(options, backend="reference"))
    assert {record.engine for record in results} == {"reference", ""}
    assert len(options.output.read_text().splitlines()) == 8


def test_thread_counts_alternate(options: harness.Options) -> None:
    before = torch.get_num_threads()
    results = run(replace(SUITE, cells=CELLS[:1], threads=(1, 2)), options)
    assert [(r.implementation, r.threads) for r in results] == [
        ("streamkl", 1), ("eager", 1), ("streamkl", 2), ("eager", 2),
    ]  # fmt: skip
    assert torch.get_num_threads() == before
