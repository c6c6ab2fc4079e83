"""Which engine a call gets, and why."""

import sys
from types import SimpleNamespace
from typing import get_args

import pytest
import torch

from streamkl import api, engines, validation

CPU = torch.device("cpu")


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that comes first and cannot run."""
    module = SimpleNamespace(
        name="refusing", summary="never runs", unsupported=lambda device, problem: f"no compiler for {device}"
    )
    monkeypatch.setitem(sys.modules, "streamkl.engines.refusing", module)
    monkeypatch.setattr(engines, "PREFERENCE", ("refusing", "tiled"))


def test_auto_takes_the_first_engine_that_can_run_and_says_why_the_others_cannot(refusing: None) -> None:
    choice = engines.choose("auto", CPU)
    assert choice.engine.name == "tiled"
    assert choice.reason == "refusing: no compiler for cpu; tiled: plain PyTorch, runs on any device"


def test_a_named_engine_never_falls_back(refusing: None) -> None:
    assert engines.choose("tiled", CPU).reason == "named by the caller"
    with pytest.raises(RuntimeError, match="backend='refusing' cannot run on cpu: refusing: no compiler for cpu"):
        engines.choose("refusing", CPU)


def test_backends_are_named_alike_everywhere() -> None:
    names = ("auto", "reference", *engines.PREFERENCE)
    assert names == validation.BACKENDS == get_args(api.Backend)


def test_an_interpreter_is_taken_when_it_is_named_and_never_by_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert engines.choose("auto", CPU).engine.name != "triton"
    assert "triton: would be interpreted" in engines.choose("auto", CPU).reason
    assert engines.choose("triton", CPU).engine.name == "triton"
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(RuntimeError, match="runs on NVIDIA and AMD GPUs"):
        engines.choose("triton", CPU)
