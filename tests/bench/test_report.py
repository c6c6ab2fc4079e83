"""The figures are those of the records."""

from dataclasses import replace

import pytest

from streamkl.bench.cells import Cell
from streamkl.bench.records import Record
from streamkl.bench.report import by_cell, compact, detailed, skipped, speedups, summary
from streamkl.testing import Heads


def record(cell: Cell, implementation: str, seconds: float, threads: int = 2, **rest: object) -> Record:
    return Record("a suite", cell, implementation, threads, seconds=[seconds] * 3, **rest)  # type: ignore[arg-type]


def grid() -> list[Record]:
    """StreamKL takes 1 s at D = 64 and 2 s at 128, attention 2 s and 1 s, the products 0.5 s."""
    records = []
    for dim, ours, attention, products in ((64, 1.0, 2.0, 0.5), (128, 2.0, 1.0, 0.5)):
        cell = Cell.square(8, 4096, dim)
        times = {"streamkl": ours, "sdpa": attention, "products": products}
        records += [record(cell, name, seconds) for name, seconds in times.items()]
    return records


def test_geometric_mean_and_ends() -> None:
    lines = summary(grid())
    ends = "0.5 (4,096 x 8x64 causal) to 2 (4,096 x 8x128 causal)"
    assert f"forward, bfloat16: streamkl / sdpa: 1 in the geometric mean of 2 cells, {ends}" in lines
    assert any(line.startswith("forward, bfloat16: streamkl / products: 2.83 in the geometric mean") for line in lines)
    assert "forward, bfloat16: streamkl / products at D = 128: 4" in lines


PAIRS = Cell.square(8, 4096, 64)
INDEXER = Cell(4096, Heads(4, 2, 1, 1), (64, 64), direction="training", indexer=True)
STEADY, MOVED = [2.0] * 4 + [2.28] * 2, [2.0] * 4 + [2.4] * 2
"""Repetitions of 2 seconds, the last third of them 14% and 20% slower."""


@pytest.mark.parametrize(
    ("cells", "baseline", "titles"),
    [
        ([PAIRS], "sdpa", ["forward, bfloat16: streamkl / sdpa"]),
        ([PAIRS], "chunked", ["forward, bfloat16: chunked / streamkl"]),
        (
            [PAIRS, replace(PAIRS, direction="training")],
            "eager",
            [f"eager / streamkl, {part}, D = 64" for part in ("forward", "training")],
        ),
        ([INDEXER], "student", ["4,096 x 4/2x64 to indexer 1x64 causal: streamkl / student"]),
        ([INDEXER], "eager", ["4,096 x 4/2x64 to indexer 1x64 causal: eager / streamkl"]),
    ],
)
def test_a_baseline_that_moves_during_the_run_makes_no_headline(
    cells: list[Cell], baseline: str, titles: list[str]
) -> None:
    for seconds in (STEADY, MOVED):
        records = []
        for cell in cells:
            records += [record(cell, "streamkl", 1.0), Record("a suite", cell, baseline, 2, seconds=seconds)]
        lines = summary(records)
        assert [line.rsplit(": ", 1)[0] for line in lines] == titles
        for line in lines:
            assert (f"no headline, for {baseline} moved by 20% during the run" in line) == (seconds is MOVED), line


def test_a_backward_makes_no_headline_if_either_of_its_two_runs_moved() -> None:
    for moved in ("forward", "training", "neither"):
        records = []
        for direction, ours, eager in (("forward", 1.0, STEADY), ("training", 2.0, [x + 1 for x in STEADY])):
            cell, times = replace(PAIRS, direction=direction), eager[:4] + [1.3 * x for x in eager[4:]]
            records.append(record(cell, "streamkl", ours))
            records.append(Record("a suite", cell, "eager", 2, seconds=times if direction == moved else eager))
        (line,) = (line for line in summary(records) if "backward" in line)
        assert ("no headline, for eager moved" in line) == (moved != "neither"), line


def test_a_speed_up_by_threads_makes_no_headline_if_the_run_on_fewer_moved() -> None:
    for seconds, told in ((STEADY, "2"), (MOVED, "no headline, for sdpa moved by 20% during the run")):
        few = Record("a suite", PAIRS, "sdpa", 1, seconds=seconds)
        (line,) = summary([few, record(PAIRS, "sdpa", 1.0, threads=2)])
        assert line.startswith(f"forward, bfloat16: speed-up of sdpa by 2 threads instead of 1: {told}"), line


def test_memory_of_an_indexers_step_is_told_beside_its_time() -> None:
    ours, eager = record(INDEXER, "streamkl", 1.0, extra_bytes=10**7), record(INDEXER, "eager", 25.3, extra_bytes=10**9)
    assert summary([ours, eager]) == [
        "4,096 x 4/2x64 to indexer 1x64 causal: eager / streamkl: 25.3",
        "4,096 x 4/2x64 to indexer 1x64 causal: eager adds 1,000.0 MB, streamkl 10.0 MB, 100x less",
    ]


def test_a_backward_is_what_it_adds_to_the_forward() -> None:
    records = []
    for direction, ours, eager in (("forward", 1.0, 40.0), ("training", 3.0, 60.0)):
        cell = Cell.square(8, 4096, 128, direction=direction)
        records += [record(cell, "streamkl", ours), record(cell, "eager", eager)]
    (speedup,) = speedups(by_cell(records)).values()
    assert speedup == {"forward": 40.0, "training": 20.0, "backward": 10.0}
    assert "eager / streamkl, backward, D = 128: 10x at 4,096" in summary(records)


def test_threads_are_compared_with_themselves() -> None:
    cell = Cell.square(8, 4096, 64)
    records = [record(cell, name, s, n) for name in ("streamkl", "sdpa") for n, s in ((1, 1.8), (2, 1.0))]
    assert summary(records) == [
        "forward, bfloat16: speed-up of streamkl by 2 threads instead of 1: 1.8",
        "forward, bfloat16: speed-up of sdpa by 2 threads instead of 1: 1.8",
    ]


def test_what_ran_once_shows_how_time_and_memory_grow() -> None:
    records = []
    for tokens, seconds in ((1024, 1.0), (2048, 4.1)):
        cell = Cell.square(1, tokens, 64, direction="training")
        records.append(Record("long", cell, "streamkl", 2, seconds=[seconds], resident_bytes=500_000_000))
    first, second = summary(records)
    assert first.endswith("training: 1.0 s, 500.0 MB resident")
    assert second.endswith("4.1 s, 500.0 MB resident, 4.10x the time of 1,024 tokens for 4.00x the work")


def test_tables_have_every_cell_and_implementation() -> None:
    records = grid()
    records[1].seconds = [1.5, 2.0, 2.5]
    records.append(Record("a suite", records[0].cell, "eager", 2, skipped="too large"))
    (table,) = detailed(records)
    assert [row[1] for row in table.rows] == ["streamkl", "sdpa", "products", "eager", "streamkl", "sdpa", "products"]
    assert table.rows[1][2:5] == ["2,000", "500", "0.5"]
    (page,) = compact(records)
    assert page.rows[0] == ["4,096 x 8x64 causal", "1,000 (0)", "2,000 (500)", "500 (0)", "0.5", "2", ""]
    assert page.markdown().count("\n| ") == 4
    assert skipped(records) == ["eager left out of 4,096 tokens, 8x64, causal, bfloat16, forward: too large"]
    records.append(Record("a suite", records[3].cell, "eager", 2, skipped="too large"))
    assert skipped(records) == ["eager left out of 2 cells: too large"]
