"""``streamkl kernels``: what cannot be compiled is a message of the look and the exit code of all user errors."""

import os
import subprocess
import sys
from typing import Any

import pytest
from typer.testing import CliRunner

from streamkl.cli import app


def kernels(*arguments: str) -> Any:
    return CliRunner(env={"TRITON_INTERPRET": "0"}).invoke(app, ["kernels", *arguments])


def test_without_triton_it_says_how_to_get_it() -> None:
    script = "import sys; sys.modules['triton'] = None; from streamkl.cli import app; app(['kernels'])"
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=99, env=environment)
    assert result.returncode == 2, result.stderr
    assert "Triton compiles the kernels: pip install triton" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--target", "sm_1"), "--target is of sm_80"),
        (("--kind", "square"), "got square"),
        (("--dim", "7"), "no kernel is of these targets, kinds and dims"),
    ],
)
def test_what_it_does_not_know_is_refused(arguments: tuple[str, ...], message: str) -> None:
    pytest.importorskip("triton")
    import streamkl.engines.triton.inspect.table  # noqa: F401  # interpreted, for the tests that come after

    result = kernels(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Error" in result.stderr, "in the panel of all user errors"
    assert result.stdout == ""
