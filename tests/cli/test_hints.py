"""A dtype that the CPU has no instructions for is named before the work begins, and no other is."""

import pytest

from streamkl.cli.hints import say_slow_dtype
from streamkl.engines import cpu


@pytest.mark.parametrize("has_instructions", [False, True])
def test_a_dtype_without_instructions_is_called_slow(
    has_instructions: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cpu, "unsupported", lambda device: None)
    monkeypatch.setattr(cpu, "multiplies", lambda dtype: has_instructions)
    say_slow_dtype("bfloat16", "cpu")
    said = capsys.readouterr().err
    assert ("--dtype float32" in said) is not has_instructions
    for dtype, device in (("float32", "cpu"), ("bfloat16", "cuda")):
        say_slow_dtype(dtype, device)
        assert capsys.readouterr().err == ""


def test_a_machine_without_the_engine_says_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cpu, "unsupported", lambda device: "no compiler")
    say_slow_dtype("bfloat16", "cpu")
    assert capsys.readouterr().err == ""
