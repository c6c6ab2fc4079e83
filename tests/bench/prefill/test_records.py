"""Records of prefill: what stands beside what."""

from pathlib import Path

from streamkl.bench.prefill import records
from streamkl.bench.prefill.records import Prefill

ABOUT = {"model": "m", "random_weights": False, "layers": 2, "all_layers": 2, "tokens": 300, "query_block": 0}


def test_a_record_stands_beside_the_dense_one_of_its_threads_and_dtype(tmp_path: Path) -> None:
    written, dtypes = tmp_path / "prefill.jsonl", ("bfloat16", "float32")
    for threads, seconds in ((1, 8.0), (2, 4.0)):
        for dtype in dtypes:
            slower = seconds if dtype == "bfloat16" else 3 * seconds
            run = {**ABOUT, "threads": threads, "dtype": dtype}
            for method, topk, part in (("dense", 0, 1.0), ("indexer", 32, 0.5)):
                records.append(written, Prefill(**run, method=method, topk=topk, seconds=[part * slower]))
    found = records.read(written)
    assert len(found) == 8
    assert [records.faster(r, found) for r in found] == 4 * [None, 2.0]
    assert records.faster(found[1], found[2:]) is None
    assert [row[3] for row in records.table(found)] == 4 * ["", "2.00"]
