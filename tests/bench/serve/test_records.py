"""Records of served loads are read as they were written, and are summed up by length and kind."""

from pathlib import Path

import pytest

from streamkl.bench.serve.records import DENSE, SPARSE, Load, Served, append, read, rows

SHORT, LONG = Load(100, 4, 2, 1), Load(1000, 1, 2, 2)


def served(kind: str, number: int, load: Load, ttfts: list[float], itls: list[float]) -> Served:
    return Served({"model": "m"}, kind, number, load, ttfts, itls, 8.0 / sum(ttfts), {"device": "a CPU"})


def test_records_come_back_and_a_line_that_was_cut_off_does_not(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "serve.jsonl"
    assert read(path) == []
    kept = [served(DENSE, 0, SHORT, [1.0, 3.0], [0.1]), served(SPARSE, 0, SHORT, [1.0, 1.0], [0.2])]
    for record in kept:
        append(path, record)
    with path.open("a") as file:
        file.write('{"kind": "sparse"')
    assert read(path) == kept
    append(path, kept[0])
    assert read(path) == [*kept, kept[0]]


def test_rows_take_medians_over_rounds() -> None:
    records = [
        served(DENSE, 0, SHORT, [1.0, 3.0], [0.1, 0.2, 0.3]), served(DENSE, 1, SHORT, [3.0, 5.0], [0.4]),
        served(SPARSE, 0, LONG, [2.0, 2.0], []),
    ]  # fmt: skip
    dense, sparse = rows(records)
    assert (dense.kind, dense.prompt_tokens, dense.ttft, dense.ttft_range) == (DENSE, 100, 3.0, (2.0, 4.0))
    assert dense.itl == pytest.approx(0.25)
    assert dense.throughput == pytest.approx((2.0 + 1.0) / 2)
    assert (sparse.kind, sparse.prompt_tokens, sparse.itl) == (SPARSE, 1000, None)
