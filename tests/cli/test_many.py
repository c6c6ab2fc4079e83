"""Options of the command line: several values after one name, and names that are nearly right."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from streamkl.cli import app
from streamkl.cli.many import _repeated


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("--lengths 1 2", "--lengths 1 --lengths 2"),
        ("--lengths=1 2 3", "--lengths 1 --lengths 2 --lengths 3"),
        ("model --lengths=1 --seed 2", "model --lengths 1 --seed 2"),
        ("--seed=1 2", "--seed=1 2"),
        ("--lengths 1 -- 2", "--lengths 1 -- 2"),
    ],
)
def test_all_words_after_a_list_option_are_its_values(given: str, meant: str) -> None:
    assert _repeated(given.split(), {"--lengths"}) == meant.split()


def test_the_option_that_is_nearest_to_a_wrong_one_is_named_alone() -> None:
    result = CliRunner().invoke(app, ["distill", "--step", "1"])
    assert result.exit_code == 2
    said = result.output + result.stderr
    assert "--steps" in said
    assert "--set" not in said.replace("--settings", "")
    assert "--topk" not in said
