"""The launches of each function of the engine where queries name their keys: what ``plans.py`` has for the others.

A program owns one query and, head by head, a unit of its heads that share a list and key heads; against a mean, one
distribution. Nothing is split or merged: queries are many where there are lists.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from streamkl.engines.triton.arguments import GradientRows, Trained, given, index_weights, known_rows, tensors
from streamkl.engines.triton.kernels.listed import listed_lse_kernel, listed_mixture_kernel, listed_paired_kernel
from streamkl.engines.triton.kernels.listed_backward import listed_gradient_kernel
from streamkl.engines.triton.launch import Launch, Sweep, new_rows
from streamkl.engines.triton.meta import padded
from streamkl.problem import Gradients, Inputs, Problem, Side, Support
from streamkl.state import RowStats

TOGETHER = 64
"""Head dims up to which the gradients of both sides fit the registers of one sweep."""


class ListedSweep(Sweep):
    """What all launches over the lists of one problem share.

    If ``head_summed``, the heads of ``b`` in the rows of a tile make one distribution: one head, or an indexer.
    """

    def __init__(
        self, problem: Problem, given: Sequence[Tensor], arch: str, kind: str, weighted: bool, head_summed: bool
    ) -> None:
        super().__init__(problem, given, arch, kind, weighted)
        assert problem.support.topk is not None
        self.topk = problem.support.topk
        self.heads_a_list = problem.distributions // self.topk.shape[1]
        if head_summed:
            self.b = self.b._replace(heads=max(1, self.b.heads))
        self.group = self.group._replace(pack=1 if head_summed else math.gcd(self.group.pack, self.heads_a_list))
        heads = self.b.heads if head_summed else self.group.pack
        self.rows, self.target_rows = (min(self.config.rows, padded(n)) for n in (heads, self.group.each))
        self.head_summed, self.parts = head_summed, math.ceil(heads / self.rows)

    def listed(self, kernel: Any, arguments: dict[str, Any], pieces: int | None = None, **constants: Any) -> Launch:
        """A launch with a program for each query, unit and part of its heads; of a gradient, for each piece of it.

        Where heads are summed, a forward goes through all of them.
        """
        parts = 1 if self.head_summed and pieces is None else self.parts
        blocks = self.blocks(self.support.nq, 1)
        arguments = arguments | {
            "topk": self.topk, "strides_t": self.topk.stride(), "columns": self.topk.shape[3],
            "per": self.heads_a_list, "cu": self.cu(), "extent": self.extent, "blocks": blocks, "units": self.units,
            "parts": parts,
        }  # fmt: skip
        constants = {"GROUP": self.group, "MASK": self.mask, "ROWS": self.rows, "KEYS": self.config.keys, **constants}
        programs = blocks * self.units * self.support.batch * parts * (pieces or 1)
        return self.launch(kernel, programs, arguments, constants)


def logsumexp(
    support: Support, side: Side, q: Tensor, k: Tensor, w: Tensor | None, arch: str
) -> tuple[list[Launch], tuple[Tensor, Tensor]]:
    """``(m, ln l)`` of one side, each ``[B, distributions, Nq]``."""
    sweep = ListedSweep(Problem(side, side, support), (q, k), arch, "lse_listed", w is not None, side.head_summed)
    m, ln_l = (new_rows(q, side.distributions, sweep.mask.packed, value) for value in (-torch.inf, 0.0))
    arguments = {
        "q": q, "k": k, "w": w, "strides_q": q.stride(), "strides_k": k.stride(),
        "strides_w": None if w is None else w.stride(), "scale": side.scale, "out_m": m, "out_ln_l": ln_l,
    }  # fmt: skip
    return [sweep.listed(listed_lse_kernel, arguments, SIDE=sweep.b)], (m, ln_l)


def paired_rows(problem: Problem, inputs: Inputs, arch: str) -> tuple[list[Launch], tuple[Tensor, Tensor, RowStats]]:
    """Divergence, mean and normalisers of each row, head by head."""
    sweep = ListedSweep(problem, inputs[:4], arch, "paired_listed", False, False)
    out = {
        f"out_{name}": new_rows(inputs.b_q, problem.distributions, sweep.mask.packed, value)
        for name, value in {"kl": 0.0, "mean": 0.0, "ma": -torch.inf, "la": 0.0, "mb": -torch.inf, "lb": 0.0}.items()
    }
    arguments = tensors(inputs) | out | _scales(problem)
    kl, mean, *stats = out.values()
    launch = sweep.listed(listed_paired_kernel, arguments, A=sweep.a, B=sweep.b)
    return [launch], (kl, mean, RowStats(*stats))


def mixture_rows(
    problem: Problem, inputs: Inputs, m_a: Tensor, ln_l_a: Tensor, arch: str
) -> tuple[list[Launch], tuple[Tensor, Tensor, Tensor, Tensor]]:
    """``(kl, m_b, ln l_b, s)`` of each row against the mean of its heads of ``a``."""
    sweep = ListedSweep(problem, inputs[:4], arch, "mixture_listed", inputs.b_w is not None, True)
    prepare, a = known_rows(m_a, ln_l_a, None, problem.head_group)
    out = {
        f"out_{name}": new_rows(inputs.b_q, problem.distributions, sweep.mask.packed, value)
        for name, value in {"kl": 0.0, "mb": -torch.inf, "lb": 0.0, "s": 0.0}.items()
    }
    arguments = tensors(inputs) | index_weights(inputs) | {"m_a": a.m, "l_a": a.l} | out | _scales(problem)
    launch = sweep.listed(listed_mixture_kernel, arguments, A=sweep.a, B=sweep.b, TARGET_ROWS=sweep.target_rows)
    kl, m_b, ln_l_b, s = out.values()
    return [prepare, launch], (kl, m_b, ln_l_b, s)


def backward(
    problem: Problem,
    inputs: Inputs,
    stats: RowStats,
    mean: Tensor | None,
    row_grad: Tensor,
    want_a: bool,
    want_b: bool,
    arch: str,
) -> tuple[list[Launch], Gradients]:
    """Gradients of ``sum(row_grad * kl)``; dK in float32, the rest in the inputs' dtypes."""
    gradient = _Gradient(problem, inputs, stats, mean, row_grad, arch, False)
    if want_a and want_b and gradient.apart:
        gradient.add(True, False)
        gradient.add(False, True)
    else:
        gradient.add(want_a, want_b)
    return gradient.launches, gradient.made


def train(problem: Problem, inputs: Inputs, stats: RowStats, weight: Tensor, arch: str) -> tuple[list[Launch], Trained]:
    """Loss sums and gradients to ``b``, unrounded, in one sweep over ``a``."""
    gradient = _Gradient(problem, inputs, stats, None, weight, arch, True)
    gradient.add(False, True)
    _, _, dq, dk, dw = gradient.made
    assert dq is not None
    assert dk is not None
    return gradient.launches, Trained(dq, dk, dw, gradient.sum_p, gradient.sum_acc, gradient.rows.b)


class _Gradient:
    """Collects the launches of a backward sweep, for one side or for both."""

    def __init__(
        self,
        problem: Problem,
        inputs: Inputs,
        stats: RowStats,
        mean: Tensor | None,
        weight: Tensor,
        arch: str,
        loss: bool,
    ) -> None:
        head_summed = problem.b.head_summed or problem.head_group > 1
        self.problem, self.inputs, self.loss = problem, inputs, loss
        self.sweep = ListedSweep(problem, inputs[:4], arch, "gradient_listed", inputs.b_w is not None, head_summed)
        self.rows = GradientRows.of(problem, inputs, stats, weight)
        self.launches = list(self.rows.launches)
        self.mean = None if mean is None else mean.contiguous()
        self.apart = max(problem.a.dim, problem.b.dim) > TOGETHER or self.sweep.a.chunked or self.sweep.b.chunked
        self.made = Gradients(None, None, None, None)
        self.sum_p = self.sum_acc = self.rows.b.m  # not read
        if loss:
            self.sum_p, self.sum_acc = (torch.zeros_like(self.rows.b.m) for _ in range(2))

    def add(self, want_a: bool, want_b: bool) -> None:
        """One sweep for the gradients of the sides that want them."""
        sweep, inputs, none = self.sweep, self.inputs, self.rows.b.m
        if want_a:
            self.made = self.made._replace(a_q=self._own(inputs.a_q), a_k=_added(inputs.a_k))
        if want_b:
            dw = None if inputs.b_w is None else self._own(inputs.b_w)
            self.made = self.made._replace(b_q=self._own(inputs.b_q), b_k=_added(inputs.b_k), b_w=dw)
        pieces = max(sweep.a.pieces if want_a else 1, sweep.b.pieces if want_b else 1)
        arguments = self.rows.arguments(self.problem, inputs, self.mean) | {
            "dq_a": given(self.made.a_q, none), "dk_a": given(self.made.a_k, none), "dq_b": given(self.made.b_q, none),
            "dk_b": given(self.made.b_k, none), "dw_b": self.made.b_w, "sum_p": self.sum_p, "sum_acc": self.sum_acc,
            "pieces": pieces,
        }  # fmt: skip
        launch = sweep.listed(
            listed_gradient_kernel, arguments, pieces, A=sweep.a, B=sweep.b, TARGET_ROWS=sweep.target_rows,
            WANT_A=want_a, WANT_B=want_b, LOSS=self.loss, HALF=self.rows.half,
        )  # fmt: skip
        self.launches.append(launch)

    def _own(self, x: Tensor) -> Tensor:
        """A gradient that each program writes its part of; zero where a query may belong to no sequence."""
        make = torch.zeros if self.sweep.mask.packed else torch.empty
        return make(x.shape, dtype=torch.float32 if self.loss else x.dtype, device=x.device)


def _added(k: Tensor) -> Tensor:
    """dK, which programs add to."""
    return torch.zeros(k.shape, dtype=torch.float32, device=k.device)


def _scales(problem: Problem) -> dict[str, Any]:
    return {"scale_a": problem.a.scale, "scale_b": problem.b.scale}
