"""Records survive the file, and the last one of a key counts."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from streamkl.bench.cells import Cell
from streamkl.bench.records import Record, append, read

RECORD = Record(
    "forward", Cell.square(8, 4096, 64), "streamkl", 2, "cpu", [0.3, 0.1, 0.2, 0.4], 1000, 2000, 1e-7, 0.5, None,
    {"device": "a CPU", "commit": "abc"}, "2025-01-01T00:00:00+00:00",
)  # fmt: skip


def test_a_record_survives_the_file(tmp_path: Path) -> None:
    path = tmp_path / "results" / "bench.jsonl"
    skipped = replace(RECORD, implementation="eager", seconds=[], skipped="too large")
    append(path, RECORD)
    append(path, skipped)
    assert read(path) == [RECORD, skipped]


def test_a_line_has_the_median_and_the_spread_for_others_to_read() -> None:
    line = json.loads(RECORD.to_json())
    assert line["median"] == RECORD.median == 0.25
    assert abs(line["spread"] - 0.15) < 1e-12


def test_of_two_about_the_same_the_later_holds(tmp_path: Path) -> None:
    path = tmp_path / "bench.jsonl"
    for seconds in ([1.0], [2.0]):
        append(path, replace(RECORD, seconds=seconds))
    append(path, replace(RECORD, threads=1))
    assert [record.seconds for record in read(path)] == [[2.0], RECORD.seconds]


@pytest.mark.parametrize("line", ["{", "{}", '{"cell": 1}', "[]"])
def test_a_line_that_is_no_record_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "bench.jsonl"
    path.write_text(f"{RECORD.to_json()}\n{line}\n")
    with pytest.raises(ValueError, match=r"bench\.jsonl, line 2: not a record"):
        read(path)
