"""``streamkl bench``: a red gate prints no figure; what is printed is what was measured and is kept."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from streamkl.bench import gate
from streamkl.bench import run as harness
from streamkl.bench.suites import SUITES
from streamkl.cli import app
from streamkl.cli.bench import SUITE_NAMES
from streamkl.engines import tiled

SHAPE = ("--shape", "1x2x130x32", "--backend", "tiled", "--dtype", "float32", "--seconds", "0.02", "--no-memory")


@pytest.fixture(autouse=True)
def _few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "TOKENS", 97)


def bench(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", *arguments])


def shown(result: Any) -> str:
    """What a command printed, in one line without the borders of panels."""
    return " ".join(result.output.replace("│", " ").split())


def test_a_red_gate_prints_no_figure_and_exits_with_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    logits = tiled._Operand.score
    monkeypatch.setattr(tiled._Operand, "score", lambda *args: logits(*args) * 1.01)
    monkeypatch.setattr(harness, "_measure", lambda *_: pytest.fail("nothing is measured behind a red gate"))
    result = bench("run", *SHAPE, "--output", str(tmp_path / "bench.jsonl"))
    assert result.exit_code == 1
    assert "Wrong results, so no figures: 130 tokens" in result.output
    assert " ms" not in result.output
    assert not (tmp_path / "bench.jsonl").exists()


def test_a_shape_is_measured_shown_drawn_and_kept(tmp_path: Path) -> None:
    output = tmp_path / "bench.jsonl"
    arguments = ("run", *SHAPE, "--baselines", "eager", "sdpa", "composed", "--output", str(output))
    result = bench(*arguments)
    assert result.exit_code == 0, result.output
    assert "forward, float32: streamkl / sdpa: " in result.output
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["implementation"] for line in lines] == ["streamkl", "eager", "sdpa", "composed"]
    assert lines[0]["engine"] == "tiled"
    assert 0 < lines[0]["gate"] <= 1
    assert 0 < lines[0]["error"] < 1e-5
    assert all(line["median"] > 0 and len(line["seconds"]) >= 3 and line["machine"]["torch"] for line in lines)

    again = bench(*arguments, "--resume")
    assert again.exit_code == 0, again.output
    assert len(output.read_text().splitlines()) == 4, "measured already"
    assert "streamkl / sdpa" in bench("show", str(output)).output
    assert "| 130 x 2x32 causal |" in bench("table", str(output)).output
    assert bench("plot", str(output), "--output", str(tmp_path)).output == f"{tmp_path / 'sdpa.png'}\n"


@pytest.mark.slow
@pytest.mark.parametrize("suite", [name for name in SUITES if name not in ("eager", "memory")])
def test_every_suite_runs(suite: str, tmp_path: Path) -> None:
    result = bench("run", suite, "--quick", "--no-memory", "--output", str(tmp_path / "bench.jsonl"))
    assert result.exit_code == 0, result.output


@pytest.mark.slow
def test_memory_is_measured_beside_time(tmp_path: Path) -> None:
    output = tmp_path / "bench.jsonl"
    result = bench("run", *SHAPE[:-1], "--memory", "--baselines", "none", "--output", str(output))
    assert result.exit_code == 0, result.output
    (line,) = (json.loads(line) for line in output.read_text().splitlines())
    assert line["median"] > 0
    assert line["extra_bytes"] > 0


@pytest.mark.slow
def test_memory_is_measured_apart_and_limited(tmp_path: Path) -> None:
    arguments = (*SHAPE, "--isolated", "--baselines", "none", "--output", str(tmp_path / "bench.jsonl"))
    result = bench("run", *arguments, "--limit-mb", "1")
    assert result.exit_code == 1
    assert "MB resident, more than 1" in result.output
    assert bench("run", *arguments, "--limit-mb", "4000").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name suites"),
        (("forward", "--shape", "1x1x8x8"), "or give a --shape"),
        (("nonsense",), "a suite is one of forward"),
        (("--shape", "8x8"), "a shape is BATCHxHEADSxTOKENSxDIM"),
        (("--shape", "1x1x8x8", "--mask", "causl"), "--mask is one of causal, full, not 'causl'"),
        (("forward", "--baselines", "us"), "a baseline (or none) is one of eager, compiled"),
        (("forward", "--baselines", "streamkl"), "not 'streamkl'"),
        (("forward", "--backend", "gpu"), "--backend is one of auto"),
        (("forward", "--mask", "full"), "suites have cells of their own"),
        (("forward", "--isolated"), "suites have cells of their own"),
        (("forward", "--limit-mb", "100", "--no-memory"), "--limit-mb needs the memory"),
    ],
)
def test_wrong_arguments_are_refused(arguments: tuple[str, ...], message: str) -> None:
    result = bench("run", *arguments)
    assert result.exit_code == 2
    assert message in shown(result)


def test_without_matplotlib_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bench.jsonl").write_text("")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "streamkl.bench.plots", raising=False)
    monkeypatch.delattr("streamkl.bench.plots", raising=False)
    result = bench("plot", str(tmp_path / "bench.jsonl"))
    assert result.exit_code == 2
    assert "pip install -e '.[bench]' in the checkout" in shown(result)


def test_a_model_that_is_not_there_is_said(tmp_path: Path) -> None:
    result = bench("distill", "--model", str(tmp_path / "nowhere"), "--length", "64", "128")
    assert result.exit_code == 2
    assert "nowhere" in shown(result)
    assert "Traceback" not in result.output


def test_a_step_of_distillation_needs_transformers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    result = bench("distill", "--model", str(tmp_path))
    assert result.exit_code == 2
    assert "pip install -e '.[hf]' in the checkout" in shown(result)


def test_the_help_names_every_suite_and_no_type_of_python() -> None:
    assert SUITE_NAMES.split(", ") == list(SUITES)
    for command in ("run", "prefill", "distill"):
        assert "list[" not in bench(command, "--help").output


def test_serving_a_model_that_has_no_indexers_is_refused_without_a_folder_of_them(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    result = bench("serve", str(tmp_path))
    assert result.exit_code == 2
    assert "was not saved sparse: name its indexers by --indexers" in shown(result)
