"""The command: flags and a YAML file mean the same."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from streamkl.cli import app
from streamkl.cli import distill as command
from streamkl.distillation import Settings

FILE = """
model: a-model
text: [one.txt, two.jsonl]
output: a-folder
lr: 0.01
answer-weight: 4
temperature: true
report_to: tensorboard
"""
FLAGS = [
    "--model", "a-model", "--text", "one.txt", "--text", "two.jsonl", "--output", "a-folder", "--lr", "0.01",
    "--answer-weight", "4", "--temperature", "--report-to", "tensorboard",
]  # fmt: skip


def shown(result: Any) -> str:
    """What a command printed, in one line without the borders of panels."""
    return " ".join(result.output.replace("│", " ").split())


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """The settings that the command would run with."""
    pytest.importorskip("yaml")
    found: list[Settings] = []
    monkeypatch.setattr(command, "run", found.append)
    return found


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["distill", *arguments])


def test_flags_and_a_yaml_file_mean_the_same_and_flags_come_first(told: list[Settings], tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(FILE)
    for arguments in (FLAGS, ["--config", str(file)], ["--config", str(file), "--lr", "0.5"]):
        result = call(*arguments)
        assert result.exit_code == 0, result.output
    assert told[0] == told[1]
    assert told[0].text == ["one.txt", "two.jsonl"]
    assert told[2].lr == 0.5
    told[2].lr = told[1].lr
    assert told[2] == told[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "must be given: model (a folder, or a name on the hub), text ("),
        (["--model", "m", "--output", "o"], "must be given: text ("),
        ([*FLAGS, "--init", "best"], "init must be one of plain, teacher, or a folder of indexers: got 'best'"),
        ([*FLAGS, "--length", "0"], "length must be at least 1: got 0"),
        ([*FLAGS, "--seed", "-1"], "seed must be at least 0: got -1"),
        ([*FLAGS, "--lr", "nan"], "lr must be above 0: got nan"),
        ([*FLAGS, "--device", "cuda:1"], "device must be one of auto, cpu: got 'cuda:1'"),
        ([*FLAGS, "--config", "nowhere.yaml"], "does not exist"),
    ],
)
def test_what_is_wrong_is_said(told: list[Settings], arguments: list[str], message: str) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    assert message in shown(result)
    assert not told


def test_arguments_of_the_trainer_may_be_a_mapping_in_a_file(told: list[Settings], tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"{FILE}set: {{adam_beta2: 0.95, bf16: true}}")
    result = call("--config", str(file))
    assert result.exit_code == 0, result.output
    assert told[0].set == ["adam_beta2=0.95", "bf16=true"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("step: 1", "run.yaml: there is no setting 'step'; did you mean 'steps'?"),
        ("steps: many", "run.yaml: steps must be a whole number: got 'many'"),
        ("lr: [1]", "run.yaml: lr must be a number: got [1]"),
        ("resume: 1", "run.yaml: resume must be true or false: got 1"),
        ("text: [1]", "run.yaml: text must be a list, each a word: got [1]"),
        ("- a", "must hold names"),
    ],
)
def test_a_file_that_does_not_do_is_refused(told: list[Settings], tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(content)
    result = call("--config", str(file))
    assert result.exit_code == 2
    assert message in shown(result)
    assert not told


@pytest.mark.parametrize(
    ("checkpoint", "said"), [(False, "Stopped before the first checkpoint"), (True, "checkpoint-4")]
)
def test_an_interrupted_run_says_how_to_resume(
    checkpoint: bool, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    def interrupted(settings: Settings) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("streamkl.distillation.run.distill", interrupted)
    last = tmp_path / "checkpoint-4" if checkpoint else None
    monkeypatch.setattr("streamkl.distillation.checkpoints.latest", lambda folder: last)
    (tmp_path / "t.txt").write_text("a text")
    flags = ("--model", "m", "--text", str(tmp_path / "t.txt"), "--output", str(tmp_path), "--resume")
    result = call(*flags, "--length", "64", "--topk", "70")
    assert result.exit_code == 130
    assert "There is no folder m here: it is looked for on the hub." in result.output
    assert "a top-k of 70 keys holds all of 64 tokens" in result.output
    assert said in result.output
    begun = f"checkpoint is {last}" if checkpoint else "has no complete checkpoint: starting at the first step"
    assert begun in result.output.replace("\n", "")


def test_a_text_that_is_not_there_is_said_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "streamkl.distillation.run", None)
    result = call("--model", str(tmp_path), "--text", "nowhere.txt", "--output", str(tmp_path / "run"))
    assert result.exit_code == 2
    assert "there is no file nowhere.txt" in shown(result)
