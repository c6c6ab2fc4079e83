"""Which implementation runs when, how often, and how an error is judged."""

import pytest
import torch

from streamkl import attention_kl
from streamkl.bench import measure
from streamkl.bench.cells import Cell, draw_inputs
from streamkl.testing import Heads


def test_implementations_alternate_and_run_equally_often(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 0.0
    order = []

    def take(name: str, seconds: float) -> None:
        nonlocal clock
        order.append(name)
        clock += seconds

    monkeypatch.setattr(measure.time, "perf_counter", lambda: clock)
    calls = {"quick": lambda: take("quick", 0.01), "slow": lambda: take("slow", 2.0)}
    seconds = measure.alternate(calls, budget=1.0)
    assert order[:8] == ["quick", "slow", "quick", "slow", "slow", "quick", "quick", "slow"], (
        "one to warm up, then turns"
    )
    assert len(seconds["slow"]) == len(seconds["quick"]) == measure.LEAST_ROUNDS
    assert seconds["slow"] == pytest.approx([2.0] * measure.LEAST_ROUNDS)
    del calls["slow"]
    assert len(measure.alternate(calls, budget=1.0)["quick"]) == measure.MOST_ROUNDS


@pytest.mark.parametrize("mask", ["causal", "full"])
def test_a_sample_of_rows_tells_an_error(mask: str) -> None:
    cell = Cell(150, Heads(6, 3, 2, 1), (32, 24), mask=mask, dtype="float32")
    inputs = draw_inputs(cell, "cpu")
    rows = attention_kl(**inputs, causal=cell.causal, reduction="none", backend="tiled")
    assert measure.sampled_error(rows, cell, inputs) < 1e-6
    assert measure.sampled_error(rows + 0.01 * rows.mean(), cell, inputs) == pytest.approx(0.01, rel=0.2)
    rows[:, -1, 149] = torch.nan
    assert not measure.sampled_error(rows, cell, inputs) < 1
