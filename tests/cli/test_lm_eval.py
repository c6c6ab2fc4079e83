"""``streamkl lm-eval``."""

import inspect

import pytest
from typer.testing import CliRunner

from streamkl.cli import app


def test_the_help_has_our_arguments_before_those_of_lm_eval() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("lm_eval")
    from streamkl.evaluation.harness import SparseLM

    result = CliRunner().invoke(app, ["lm-eval", "--help"])
    assert result.exit_code == 0
    ours, theirs = result.output.split("All other arguments are lm-eval's:")
    named = {word.split("=")[0] for word in ours.split() if "=" in word}
    assert set(inspect.signature(SparseLM.__init__).parameters) - {"self", "kwargs"} <= named
    assert "usage: lm-eval" in theirs
