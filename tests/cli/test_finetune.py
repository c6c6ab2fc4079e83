"""``streamkl finetune``: its flags, and what it says to a user."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from streamkl.cli import app
from streamkl.cli import finetune as command
from streamkl.distillation import FinetuneSettings


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["finetune", *arguments])


def shown(result: Any) -> str:
    """What a command printed, in one line without the borders of panels."""
    return " ".join(result.output.replace("│", " ").split())


def test_flags_and_a_yaml_file_mean_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    told: list[FinetuneSettings] = []
    monkeypatch.setattr(command, "run", told.append)
    file = tmp_path / "run.yaml"
    file.write_text("model: m\ntext: t.txt\noutput: o\nindexers: run/indexers\nindex-lr: 1e-3\nlora: 8\n")
    flags = ["--model", "m", "--text", "t.txt", "--output", "o", "--indexers", "run/indexers"]
    for arguments in (["--config", str(file)], [*flags, "--index-lr", "1e-3", "--lora", "8"]):
        result = call(*arguments)
        assert result.exit_code == 0, result.output
    assert told[0] == told[1]
    assert told[0].index_lr == 1e-3
    assert told[0].dtype == "float32"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--index-lr", "0"], "index_lr must be above 0: got 0.0"),
        (["--lora", "-1"], "lora must be at least 0: got -1"),
        (["--heads", "2"], "No such option: --heads"),
    ],
)
def test_settings_that_do_not_do_are_refused(flags: list[str], message: str) -> None:
    result = call("--model", "m", "--text", "t.txt", "--output", "o", *flags)
    assert result.exit_code == 2
    assert message in shown(result)


def test_a_run_says_where_its_model_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from streamkl.distillation.finetune import Result

    monkeypatch.setattr("streamkl.distillation.finetune.finetune", lambda _: Result(tmp_path / "model", None, 3))
    (tmp_path / "t.txt").write_text("a text")
    result = call("--model", "m", "--text", str(tmp_path / "t.txt"), "--output", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "The sparse model is in" in shown(result)
    assert "3 steps were skipped because their gradients were not finite." in shown(result)
