"""Answers of two engines are compared token by token; without vLLM the check is refused."""

import importlib.util

import pytest
from typer.testing import CliRunner

from streamkl.cli import app
from streamkl.selfcheck.serving import difference


def test_answers_are_compared_up_to_the_first_token_that_differs() -> None:
    one = [[{5: -0.1, 7: -2.0}, {3: -0.5, 4: -0.6}]]
    assert difference(one, one) == 0
    assert difference(one, [[{5: -0.1, 7: -2.5}, {3: -0.5, 9: -0.6}]]) == pytest.approx(0.5)
    later = [[{5: -0.2, 7: -2.0}, {4: -0.5, 3: -9.0}]]  # rounding may turn a token, and all after it differ
    assert difference(one, later) == pytest.approx(0.1)
    assert difference(one, [[{7: -0.1, 5: -0.2}, {3: -0.5, 4: -0.6}]]) == float("inf")


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="there is vLLM here")
def test_without_vllm_the_check_says_what_is_missing() -> None:
    result = CliRunner().invoke(app, ["selfcheck", "--vllm"])
    assert result.exit_code == 2
    assert "there is no vLLM in this environment" in result.stderr
