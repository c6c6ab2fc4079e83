"""``streamkl doctor`` says what works and what is missing, and works itself when torch does not."""

import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

import streamkl
from streamkl import engines
from streamkl.cli import app
from streamkl.cli.doctor import examine, minimum_torch
from streamkl.engines import cpu


def test_a_healthy_environment() -> None:
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    for expected in ("python", torch.__version__, "cpu", "exact to rounding", "streamkl works here"):
        assert expected in result.output


def test_without_torch_it_says_how_to_get_it() -> None:
    script = "import sys; sys.modules['torch'] = None; from streamkl.cli import app; app(['doctor'])"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert result.returncode == 1, result.stderr
    assert "torch does not import" in result.stdout
    assert f"pip install 'torch>={minimum_torch()}'" in result.stdout
    assert "Traceback" not in result.stderr


def test_a_torch_that_is_too_old_is_to_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.1.0")
    report = examine()
    assert report.errors == [
        (f"torch 2.1.0 is older than {minimum_torch()}", f"pip install --upgrade 'torch>={minimum_torch()}'")
    ]


def test_wrong_results_are_to_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    from streamkl.engines import tiled

    monkeypatch.setattr(engines, "PREFERENCE", ("tiled",))
    logits = tiled._Operand.score
    monkeypatch.setattr(tiled._Operand, "score", lambda *args: logits(*args) * 1.001)
    report = examine()
    assert "wrong results on cpu" in report.errors[0][0]


def test_a_failing_engine_is_to_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "choose", lambda *_: (_ for _ in ()).throw(RuntimeError("no engine today")))
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "no engine today" in result.output


def test_a_build_that_failed_is_a_hint_with_all_that_the_compiler_said(monkeypatch: pytest.MonkeyPatch) -> None:
    failure = "the compiler failed: g++ -c tile.cpp\nout of memory"
    monkeypatch.setattr(cpu, "_lacking", lambda: None)
    monkeypatch.setattr(cpu, "_failure", lambda: failure)
    monkeypatch.setattr(cpu.build, "missing", lambda: None)
    engines._warn.cache_clear()
    report = examine()
    assert report.errors == []
    assert ("the cpu engine should run on cpu and does not", failure) in report.hints
    device, engine, reason, check = report.devices[0]
    assert (device, engine, check) == ("cpu", "tiled", "[green]exact to rounding[/]")
    assert "cpu: should run here and does not, see below; tiled: " in reason


def test_a_compiler_that_is_missing_is_a_hint_and_a_machine_that_is_unfit_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu, "_lacking", lambda: "cannot be built: no compiler")
    monkeypatch.setattr(cpu.build, "missing", lambda: "no compiler; install one")
    monkeypatch.setattr(cpu.build, "unfit", lambda: None)
    hint = ("the cpu engine is faster than this one and could run here", "no compiler; install one")
    assert hint in examine().hints
    monkeypatch.setattr(cpu.build, "unfit", lambda: "no compiler; install one")
    assert hint not in examine().hints


def test_a_cache_that_cannot_be_used_is_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    if engines.choose("auto", torch.device("cpu")).engine.name != "cpu":
        pytest.skip("the CPU engine is not built here")
    monkeypatch.setattr(cpu.build, "passed_over", lambda: "/x can be written by every user; chmod o-w /x")
    assert "/x can be written by every user; chmod o-w /x" in [how for _, how in examine().hints]


def test_help_and_version() -> None:
    assert "doctor" in CliRunner().invoke(app, []).output
    assert CliRunner().invoke(app, ["--version"]).output == f"streamkl {streamkl.__version__}\n"
    result = subprocess.run([sys.executable, "-m", "streamkl", "--version"], capture_output=True, text=True, timeout=60)
    assert result.stdout == f"streamkl {streamkl.__version__}\n"
