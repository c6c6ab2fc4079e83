"""The servers and requests of a job; without vLLM."""

import json
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from streamkl.bench.serve import run as module
from streamkl.bench.serve.records import DENSE, SPARSE, Load
from streamkl.bench.serve.run import Job, run


def job(sparse: dict[str, Any], rounds: int = 2) -> Job:
    loads = (Load(64, 1, 2, 1), Load(128, 1, 2, 1))
    return Job("model", sparse, ("--dtype", "float32"), loads, rounds, Path("logs"))


@pytest.mark.parametrize("sparse", [{}, {"indexers": "run/indexers"}], ids=["saved", "by_flag"])
def test_the_dense_server_is_dense_whatever_the_model_was_saved_as(sparse: dict[str, Any]) -> None:
    assert json.loads(job(sparse).overrides(DENSE)[1]) == {"streamkl": None}
    assert [json.loads(each) for each in job(sparse).overrides(SPARSE)[1:]] == [{"streamkl": sparse}] * bool(sparse)


def test_no_two_loads_of_a_server_have_the_same_seed_and_both_servers_have_the_same(monkeypatch) -> None:
    """Prompts of one seed begin with the same tokens: a server would find them in its cache."""
    seeds: list[list[int]] = []

    @contextmanager
    def serving(*_: object) -> Any:
        seeds.append([])
        yield "http://127.0.0.1"

    def send(_address: str, _model: str, load: Load, seed: int) -> dict[str, Any]:
        seeds[-1].append(seed)
        return {"ttfts": [1.0], "itls": [[]], "output_throughput": 1.0}

    monkeypatch.setattr(module, "serving", serving)
    monkeypatch.setattr(module, "send", send)
    records = list(run(job({"indexers": "run/indexers"}), [], lambda _: None))
    assert len(records) == 8
    assert all(len(set(each)) == 4 for each in seeds)
    assert seeds[0] == seeds[1]
    assert seeds[2] == seeds[3] != seeds[0]
