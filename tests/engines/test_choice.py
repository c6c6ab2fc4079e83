"""Which engine a call gets, and why."""

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import get_args

import pytest
import torch

import streamkl
from streamkl import api, engines, validation
from streamkl.engines import cpu
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


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that comes first, should run on float32, and cannot."""

    def broken(device: torch.device, problem: Problem | None = None) -> str | None:
        return "the compiler failed\nand said much" if problem is None or problem.dtype == torch.float32 else None

    module = SimpleNamespace(
        name="failing", summary="never runs", broken=broken,
        unsupported=lambda device, problem=None: broken(device, problem) or "float32 alone",
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "streamkl.engines.failing", module)
    monkeypatch.setattr(engines, "PREFERENCE", ("failing", "tiled"))
    engines._warn.cache_clear()


def test_auto_warns_once_of_an_engine_that_should_run_and_does_not(failing: None) -> None:
    expected = (
        "the failing engine should run here and does not, so tiled runs instead, which is slower: the compiler failed "
        "(`streamkl doctor` says more; backend='tiled' takes it without this warning)"
    )
    with pytest.warns(RuntimeWarning) as caught:
        assert [engines.choose("auto", CPU).engine.name for _ in range(3)] == ["tiled"] * 3
    assert [str(warning.message) for warning in caught] == [expected]
    assert engines.broken(CPU) == {"failing": "the compiler failed\nand said much"}


def test_auto_does_not_warn_where_the_engine_is_not_for_the_problem_or_another_is_named(failing: None) -> None:
    side = Side(4, 1, 16, torch.float64, 0.25)
    assert engines.choose("auto", CPU, Problem(side, side, Support(1, 8, 8))).engine.name == "tiled"
    assert engines.choose("tiled", CPU).engine.name == "tiled"
    with pytest.raises(RuntimeError, match="and said much"):
        engines.choose("failing", CPU)


def test_torch_compile_traces_through_the_warning(failing: None) -> None:
    torch.compiler.reset()
    q = torch.randn(1, 2, 20, 16, requires_grad=True)
    compiled = torch.compile(streamkl.attention_kl, fullgraph=True, backend="aot_eager")
    with pytest.warns(RuntimeWarning, match="the failing engine should run"):
        compiled(q.detach(), q.detach(), q, q).backward()
    compiled(q.detach(), q.detach(), q, q).backward()  # a second warning would be an error


@pytest.mark.skipif(sys.platform != "linux", reason="the CPU engine is for Linux")
@pytest.mark.parametrize(("missing", "is_broken"), [("no compiler", False), (None, True)])
def test_the_cpu_engine_is_broken_if_its_build_fails_and_not_if_the_machine_lacks_something(
    missing: str | None, is_broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise cpu.build.BuildError("the compiler failed")

    monkeypatch.setattr(cpu.build, "missing", lambda: missing)
    monkeypatch.setattr(cpu.build, "load", fail)
    for name in ("_lacking", "_failure"):  # what this process found out is kept for the tests after
        monkeypatch.setattr(cpu, name, getattr(cpu, name).__wrapped__)
    assert cpu.broken(CPU) == ("the compiler failed" if is_broken else None)
    assert cpu.unsupported(CPU) == ("the compiler failed" if is_broken else "cannot be built: no compiler")
    assert cpu.broken(torch.device("meta")) is None
    side = Side(4, 1, 16, torch.float64, 0.25)
    assert cpu.broken(CPU, Problem(side, side, Support(1, 8, 8))) is None


def test_a_named_engine_never_falls_back(refusing: None) -> None:
    assert engines.choose("tiled", CPU).reason == "named by the caller"
    with pytest.raises(RuntimeError, match="backend='refusing' cannot run on cpu: refusing: no compiler for cpu"):
        engines.choose("refusing", CPU)


@pytest.mark.parametrize("name", engines.PREFERENCE)
def test_auto_finds_an_engine_for_indexers_and_selected_keys_and_the_others_say_what_they_cannot(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    if name == "triton":
        pytest.importorskip("triton", "3.7")
    side = Side(4, 1, 16, torch.float32, 0.25)
    problems = {
        "does not sum index heads": Problem(side, replace(side, head_summed=True), Support(1, 8, 8)),
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
    pytest.importorskip("triton", "3.7")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert engines.choose("auto", CPU).engine.name != "triton"
    assert "triton: would be interpreted" in engines.choose("auto", CPU).reason
    assert engines.choose("triton", CPU).engine.name == "triton"
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(RuntimeError, match="runs on NVIDIA and AMD GPUs"):
        engines.choose("triton", CPU)
