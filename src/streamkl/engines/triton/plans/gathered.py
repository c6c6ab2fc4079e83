"""The launches of each function of the engine over selected keys; ``dense.py`` has those over all keys.

A program owns one query and a head pack of it: heads that share a top-k head and key heads, or, against a head mean,
one distribution. Nothing is split or merged: where keys are selected, there are many queries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from streamkl.engines.triton.kernels.gathered.backward import gathered_gradient_kernel
from streamkl.engines.triton.kernels.gathered.forward import (
    gathered_lse_kernel,
    gathered_mixture_kernel,
    gathered_paired_kernel,
)
from streamkl.engines.triton.kernels.groups import GatheredCounts, GradientOut, LseOut, Strided, TopkArguments
from streamkl.engines.triton.launch import Launch, Tiling, new_rows
from streamkl.engines.triton.meta import Want, padded
from streamkl.engines.triton.plans.arguments import (
    GradientRows,
    Trained,
    both_sides,
    known_rows,
    new_mixture_out,
    new_paired_out,
    side_arguments,
)
from streamkl.problem import Gradients, Inputs, Problem, Side, Support
from streamkl.state import RowStats

TOGETHER = 64
"""Head dims up to which the gradients of both sides fit the registers of one pass."""


class GatheredTiling(Tiling):
    """How a pass over selected keys is tiled.

    If ``head_summed``, the heads of ``b`` in the rows of a tile make one distribution: one head, or an indexer.
    """

    def __init__(
        self, problem: Problem, given: Sequence[Tensor], arch: str, kind: str, weighted: bool, head_summed: bool
    ) -> None:
        super().__init__(problem, given, arch, kind, weighted)
        assert problem.support.topk is not None
        self.topk = problem.support.topk
        self.heads_per_topk_head = problem.distributions // self.topk.shape[1]
        if head_summed:
            self.b = self.b._replace(heads=max(1, self.b.heads))
        self.group = self.group._replace(pack=1 if head_summed else math.gcd(self.group.pack, self.heads_per_topk_head))
        heads = self.b.heads if head_summed else self.group.pack
        self.rows, self.target_rows = (min(self.config.rows, padded(n)) for n in (heads, self.group.each))
        self.head_summed, self.parts = head_summed, math.ceil(heads / self.rows)

    def gathered_launch(
        self, kernel: Any, arguments: dict[str, Any], pieces: int | None = None, **constants: Any
    ) -> Launch:
        """A launch with a program per query, head pack and part of its heads, for a gradient per piece of it, too.

        In the forward of a head-summed side a program goes through all heads.
        """
        parts = 1 if self.head_summed and pieces is None else self.parts
        blocks = self.blocks(self.support.nq, 1)
        topk = TopkArguments(Strided(self.topk, *self.topk.stride()), self.topk.shape[3], self.heads_per_topk_head)
        arguments = arguments | {
            "topk": topk, "support": self.support_arguments(),
            "counts": GatheredCounts(blocks, self.head_packs, parts, pieces or 1),
        }  # fmt: skip
        constants = {"GROUP": self.group, "MASK": self.mask, "ROWS": self.rows, "KEYS": self.config.keys, **constants}
        programs = blocks * self.head_packs * self.support.batch * parts * (pieces or 1)
        return self.launch(kernel, programs, arguments, constants)


def logsumexp(
    support: Support, side: Side, q: Tensor, k: Tensor, w: Tensor | None, arch: str
) -> tuple[list[Launch], tuple[Tensor, Tensor]]:
    """``(m, ln l)`` of one side, each ``[B, distributions, Nq]``."""
    tiling = GatheredTiling(Problem(side, side, support), (q, k), arch, "lse_gathered", w is not None, side.head_summed)
    out = LseOut(*(new_rows(q, side.distributions, tiling.mask.packed, value) for value in (-torch.inf, 0.0)))
    arguments = {"side": side_arguments(side, q, k, w), "out": out}
    return [tiling.gathered_launch(gathered_lse_kernel, arguments, SIDE=tiling.b)], (out.m, out.ln_l)


def paired_rows(problem: Problem, inputs: Inputs, arch: str) -> tuple[list[Launch], tuple[Tensor, Tensor, RowStats]]:
    """Divergence, mean and row stats of each row, head by head."""
    tiling = GatheredTiling(problem, inputs[:4], arch, "paired_gathered", False, False)
    out = new_paired_out(problem, inputs.b_q, tiling.mask.packed)
    arguments = both_sides(problem, inputs) | {"out": out}
    launch = tiling.gathered_launch(gathered_paired_kernel, arguments, A=tiling.a, B=tiling.b)
    return [launch], (out.kl, out.mean, RowStats(*out[2:]))


def mixture_rows(
    problem: Problem, inputs: Inputs, m_a: Tensor, ln_l_a: Tensor, arch: str
) -> tuple[list[Launch], tuple[Tensor, Tensor, Tensor, Tensor]]:
    """``(kl, m_b, ln l_b, s)`` of each row against the mean of its heads of ``a``."""
    tiling = GatheredTiling(problem, inputs[:4], arch, "mixture_gathered", inputs.b_w is not None, True)
    prepare, stats_a = known_rows(m_a, ln_l_a, None, problem.head_group)
    out = new_mixture_out(problem, inputs.b_q, tiling.mask.packed)
    arguments = both_sides(problem, inputs) | {"stats_a": stats_a, "out": out}
    launch = tiling.gathered_launch(
        gathered_mixture_kernel, arguments, A=tiling.a, B=tiling.b, TARGET_ROWS=tiling.target_rows
    )
    return [prepare, launch], tuple(out)


def backward(
    problem: Problem,
    inputs: Inputs,
    stats: RowStats,
    mean: Tensor | None,
    row_grad: Tensor,
    want_a: bool,
    want_b: bool,
    arch: str,
    round_keys: bool = True,
) -> tuple[list[Launch], Gradients]:
    """Gradients of ``sum(row_grad * kl)``; dK in float32, rounded later or not, the rest in the inputs' dtypes."""
    gradient = _Gradient(problem, inputs, stats, mean, row_grad, arch, False)
    if want_a and want_b and gradient.apart:
        gradient.add(True, False)
        gradient.add(False, True)
    else:
        gradient.add(want_a, want_b)
    return gradient.launches, gradient.made


def train(problem: Problem, inputs: Inputs, stats: RowStats, weight: Tensor, arch: str) -> tuple[list[Launch], Trained]:
    """Loss sums and gradients to ``b``, unrounded, in one pass over ``a``."""
    gradient = _Gradient(problem, inputs, stats, None, weight, arch, True)
    gradient.add(False, True)
    _, _, dq, dk, dw = gradient.made
    assert dq is not None
    assert dk is not None
    assert gradient.sum_p is not None
    assert gradient.sum_acc is not None
    return gradient.launches, Trained(dq, dk, dw, gradient.sum_p, gradient.sum_acc, gradient.rows.b)


class _Gradient:
    """Collects the launches of a backward pass, for one side or for both."""

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
        self.tiling = GatheredTiling(
            problem, inputs[:4], arch, "gradient_gathered", inputs.b_w is not None, head_summed
        )
        self.rows = GradientRows.of(problem, inputs, stats, weight)
        self.launches = list(self.rows.launches)
        self.mean = None if mean is None else mean.contiguous()
        self.apart = max(problem.a.dim, problem.b.dim) > TOGETHER or self.tiling.a.chunked or self.tiling.b.chunked
        self.made = Gradients(None, None, None, None)
        self.sum_p: Tensor | None = None
        self.sum_acc: Tensor | None = None
        if loss:
            self.sum_p, self.sum_acc = (torch.zeros_like(self.rows.b.m) for _ in range(2))

    def add(self, want_a: bool, want_b: bool) -> None:
        """One pass for the gradients of the sides that want them."""
        tiling, inputs = self.tiling, self.inputs
        if want_a:
            self.made = self.made._replace(a_q=self._own(inputs.a_q), a_k=_added(inputs.a_k))
        if want_b:
            dw = None if inputs.b_w is None else self._own(inputs.b_w)
            self.made = self.made._replace(b_q=self._own(inputs.b_q), b_k=_added(inputs.b_k), b_w=dw)
        pieces = max(tiling.a.pieces if want_a else 1, tiling.b.pieces if want_b else 1)
        arguments = both_sides(self.problem, inputs) | {
            "stats": self.rows.arguments(self.mean), "out": GradientOut(*self.made, self.sum_p, self.sum_acc),
        }  # fmt: skip
        launch = tiling.gathered_launch(
            gathered_gradient_kernel, arguments, pieces, A=tiling.a, B=tiling.b, TARGET_ROWS=tiling.target_rows,
            WANT=Want(want_a, want_b, self.loss, self.rows.half),
        )  # fmt: skip
        self.launches.append(launch)

    def _own(self, x: Tensor) -> Tensor:
        """A gradient of which each program writes a part; zero where a query may belong to no sequence."""
        make = torch.zeros if self.tiling.mask.packed else torch.empty
        return make(x.shape, dtype=torch.float32 if self.loss else x.dtype, device=x.device)


def _added(k: Tensor) -> Tensor:
    """dK, which programs add to."""
    return torch.zeros(k.shape, dtype=torch.float32, device=k.device)
