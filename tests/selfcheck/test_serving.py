"""Without vLLM the check of its plugin is refused. With it: ``tests/integrations/vllm/test_selfcheck.py``."""

import importlib.util

import pytest
from typer.testing import CliRunner

from streamkl.cli import app


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="there is vLLM here")
def test_without_vllm_the_check_says_what_is_missing() -> None:
    result = CliRunner().invoke(app, ["selfcheck", "--vllm"])
    assert result.exit_code == 2
    assert "there is no vLLM in this environment" in result.stderr
