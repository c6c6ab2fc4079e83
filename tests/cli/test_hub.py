"""A model that cannot be on the hub is refused at once; of one that may be there, it is said that it is looked for."""

import os
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from streamkl.cli import app
from streamkl.cli.hub import check_model
from streamkl.hub import check_path

COMMANDS = {
    "distill": ("--model", "{model}", "--text", "{text}", "--output", "{output}"),
    "oracle": ("{model}", "--text", "{text}", "--output", "{output}"),
    "evaluate": ("{model}", "--text", "{text}", "--output", "{output}"),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("model", ["no/such/model", "./model", "/no/model", "~/no/model", "model/", "a model"])
def test_a_model_that_no_hub_can_have_is_refused_before_anything_is_loaded(
    command: str, model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    (tmp_path / "t.txt").write_text("a text")
    words = {"model": model, "text": str(tmp_path / "t.txt"), "output": str(tmp_path / "run")}
    result = CliRunner().invoke(app, [command, *(word.format(**words) for word in COMMANDS[command])])
    assert result.exit_code == 2
    place = os.path.expanduser(model) if command in ("distill", "finetune") else model
    assert f"there is no folder {place}, so no model" in result.stderr


def test_a_name_of_the_hub_is_looked_for_there_and_a_folder_is_not(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name in ("gpt2", "Qwen/Qwen3-0.6B"):
        check_model(name)
        assert capsys.readouterr().err == f"There is no folder {name} here: it is looked for on the hub.\n"
    check_model(str(tmp_path))
    assert capsys.readouterr().err == ""
    assert check_path(tmp_path)
    with pytest.raises(ValueError, match="there is no folder none, so no model"):
        check_path(Path("none"))
