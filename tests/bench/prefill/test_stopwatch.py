"""The time of each part of a pass: parts add up to the whole, and the innermost one counts."""

import time

import pytest
from torch import nn

from streamkl.bench.prefill.stopwatch import PARTS, Stopwatch


class Slow(nn.Module):
    def __init__(self, seconds: float, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.seconds, self.inner = seconds, inner

    def forward(self) -> None:
        time.sleep(self.seconds)
        if self.inner is not None:
            self.inner()


def test_the_innermost_part_counts_and_all_add_up_to_the_whole() -> None:
    linear, chosen = Slow(0.04), Slow(0.03, inner=Slow(0.02))
    attention = Slow(0.05, inner=linear)
    parts = {linear: "projections", chosen: "selection", chosen.inner: "projections", attention: "attention"}
    watch = Stopwatch()
    start = time.perf_counter()
    with watch.watching(parts):
        attention()
        chosen()
        time.sleep(0.01)
    whole = time.perf_counter() - start
    assert watch.seconds == pytest.approx(
        {"projections": 0.04, "selection": 0.05, "attention": 0.05, "rest": 0.01}, abs=0.02
    )
    assert sum(watch.seconds.values()) == pytest.approx(whole, abs=0.005)
    attention()
    assert sum(watch.seconds.values()) == pytest.approx(whole, abs=0.005), "hooks are gone"
    assert tuple(watch.seconds) == PARTS
