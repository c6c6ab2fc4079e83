"""Which engine a call gets, and why."""

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import get_args

import pytest
import torch

from streamkl import api, engines, validation
from streamkl.problem import Problem, Side, Support

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


@pytest.mark.parametrize("name", engines.PREFERENCE)
def test_auto_finds_an_engine_for_indexers_and_named_keys_and_the_others_say_what_they_cannot(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    side = Side(4, 1, 16, torch.float32, 0.25)
    problems = {
        "does not sum index heads": Problem(side, replace(side, summed=True), Support(1, 8, 8)),
        "does not take topk_indices": Problem(
            side, side, Support(1, 8, 8, topk=torch.zeros(1, 1, 8, 1, dtype=torch.int64))
        ),
    }
    for sentence, problem in problems.items():
        refusal = engines.choose(name, CPU).engine.unsupported(CPU, problem)
        assert refusal in (None, sentence)
        assert engines.choose("auto", CPU, problem).engine.unsupported(CPU, problem) is None


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
