"""Time, by alternating repetitions, and the error of a loss at full size."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor

from streamkl.bench.cells import Cell, Inputs

K = TypeVar("K", bound=Hashable)
LEAST_ROUNDS, MOST_ROUNDS = 5, 50
SAMPLED_ROWS = 64


def alternate(
    calls: dict[K, Callable[[], Any]],
    budget: float,
    ready: Callable[[K], None] = lambda _: None,
    finish: Callable[[], None] = lambda: None,
    rounds: int = LEAST_ROUNDS,
) -> dict[K, list[float]]:
    """Seconds of each call: they alternate, so that a machine that slows down slows them all.

    Every call runs once untimed. Rounds then run all calls, in alternating order, until their common budget is used up
    (but at least ``rounds``), or for fifty rounds.

    Args:
        calls: The calls to time.
        budget: Seconds per call, on average.
        ready: Called, untimed, before each call.
        finish: Called, timed, after each call: waits for an asynchronous device.
        rounds: The least number of rounds.
    """
    seconds: dict[K, list[float]] = {key: [] for key in calls}
    for key, call in calls.items():
        ready(key)
        call()
        finish()
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for turn in range(MOST_ROUNDS):
            if turn >= rounds and sum(map(sum, seconds.values())) >= budget * len(calls):
                break
            for key in calls if turn % 2 == 0 else reversed(calls):
                ready(key)
                start = time.perf_counter()
                calls[key]()
                finish()
                seconds[key].append(time.perf_counter() - start)
    finally:
        if collecting:
            gc.enable()
    return seconds


def sampled_error(rows: Tensor, cell: Cell, inputs: Inputs) -> float:
    """The largest error of some row losses of the last head against float64, relative to their mean.

    Args:
        rows: ``[B, R, N]``, the losses to judge.
        cell: The cell.
        inputs: Its tensors.
    """
    t = {name: x.detach() for name, x in inputs.items()}
    sample = torch.linspace(0, cell.tokens - 1, min(SAMPLED_ROWS, cell.tokens)).long().unique().to(rows.device)
    keys = torch.arange(cell.tokens, device=rows.device)
    hidden = keys > sample[:, None] if cell.causal else None
    h = cell.heads
    group = h.teacher // h.student

    def log_softmax(side: str, head: int, heads: int, kv_heads: int) -> Tensor:
        q = t[f"{side}_q"][-1, head, sample].double()
        k = t[f"{side}_k"][-1, head // (heads // kv_heads)].double()
        x = q @ k.mT * q.shape[-1] ** -0.5
        return (x if hidden is None else x.masked_fill(hidden, -math.inf)).log_softmax(-1)

    p = torch.zeros(len(sample), cell.tokens, dtype=torch.float64, device=rows.device)
    for head in range(h.teacher - group, h.teacher):
        p += log_softmax("teacher", head, h.teacher, h.teacher_kv).exp() / group
    log_q = log_softmax("student", h.student - 1, h.student, h.student_kv)
    exact = torch.where(p > 0, p * (p.log() - log_q), 0.0).sum(-1)
    return ((rows[-1, -1, sample].double() - exact).abs().max() / exact.mean()).item()
