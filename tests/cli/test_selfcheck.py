"""``streamkl selfcheck`` runs end to end here, and measures nothing where a check fails."""

import json
from importlib import import_module
from pathlib import Path

import pytest
import torch

from streamkl import engines
from streamkl.bench import gate
from streamkl.engines import tiled
from streamkl.selfcheck import checks

selfcheck = import_module("streamkl.cli.selfcheck")  # the command of that name hides it


@pytest.mark.slow
def test_a_report_of_checks_and_timings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests run with Triton's interpreter on, so that the Triton engine is among what is checked."""
    pytest.importorskip("triton", "3.7")
    monkeypatch.setattr(selfcheck, "INTERPRETED_SEEDS", 1)
    monkeypatch.setattr(checks, "REPEATS", 2)
    monkeypatch.setattr(gate, "TOKENS", 97)
    assert selfcheck.run(torch.device("cpu"), "auto", 3, True, tmp_path / "here") == 0
    report = json.loads((tmp_path / "here.json").read_text())
    names = [check["name"].split(",")[0] for check in report["checks"]]
    assert names == ["accuracy", "determinism", "accuracy", "determinism", "memory"]
    assert any(check["name"] == "accuracy, triton" for check in report["checks"])
    assert all(check["passed"] for check in report["checks"])
    assert report["machine"]["torch"] == torch.__version__
    assert report["timings"]
    page = (tmp_path / "here.md").read_text()
    assert "| accuracy, triton | passed |" in page
    assert "streamkl / sdpa" in page


@pytest.mark.slow
def test_a_wrong_engine_fails_and_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr(engines, "PREFERENCE", ("tiled",))
    monkeypatch.setattr(checks, "REPEATS", 2)
    same = checks.isolated.Measurement(1.0, 1 << 20, 0, None)  # processes of their own are measured above
    monkeypatch.setattr(checks.isolated, "run", lambda *_: same)
    logits = tiled._Operand.score
    monkeypatch.setattr(tiled._Operand, "score", lambda *args: logits(*args) * 1.001)
    assert selfcheck.run(torch.device("cpu"), "tiled", 2, True, tmp_path / "here") == 1
    report = json.loads((tmp_path / "here.json").read_text())
    assert report["timings"] == []
    assert "seed" in report["checks"][0]["failures"][0]
    assert "No timings: a check failed." in (tmp_path / "here.md").read_text()


def test_memory_that_grows_with_the_square_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    added = iter((10 << 20, 160 << 20))
    monkeypatch.setattr(checks.isolated, "run", lambda *_: checks.isolated.Measurement(1.0, next(added), 0, None))
    assert not checks.memory("tiled", torch.device("cpu"), 1024).passed
