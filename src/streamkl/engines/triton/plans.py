"""The launches of each function of the engine, and their results.

Plans allocate outputs, row vectors, float32 accumulators and split-K partials, and nothing else. On ``meta`` tensors
they allocate nothing at all: that is how kernels are compiled for an architecture that is not present.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from streamkl.engines.triton.arguments import GradientRows, Trained, given, index_weights, known_rows, tensors
from streamkl.engines.triton.kernels.backward import keys_kernel, queries_kernel
from streamkl.engines.triton.kernels.forward import mixture_kernel, paired_kernel
from streamkl.engines.triton.kernels.lse import lse_kernel
from streamkl.engines.triton.kernels.primitives import NONE
from streamkl.engines.triton.kernels.split import merge_lse_kernel, merge_mixture_kernel, merge_paired_kernel
from streamkl.engines.triton.launch import Launch, Tiling, new_rows, row_launch
from streamkl.engines.triton.meta import summed_heads
from streamkl.problem import Gradients, Inputs, Problem, Side, Support
from streamkl.state import RowStats

TOGETHER = 64
"""Head dims up to which the gradients of both sides fit the registers of one pass."""


def logsumexp(
    support: Support, side: Side, q: Tensor, k: Tensor, w: Tensor | None, arch: str
) -> tuple[list[Launch], tuple[Tensor, Tensor]]:
    """``(m, ln l)`` of one side, each ``[B, distributions, Nq]``."""
    kind = "lse_index" if summed_heads(side, w is not None) else "lse"
    tiling = Tiling(Problem(side, side, support), (q, k), arch, kind, w is not None)
    m, ln_l = (new_rows(q, side.distributions, tiling.mask.packed, value) for value in (-torch.inf, 0.0))
    splits, blocks = tiling.key_splits(), tiling.row_blocks()
    parts = _parts(q, 2, splits, m)
    arguments = {
        "q": q, "k": k, "w": w, "strides_q": q.stride(), "strides_k": k.stride(),
        "strides_w": None if w is None else w.stride(), "cu": tiling.cu(), "extent": tiling.extent,
        "scale": side.scale, "out_m": m, "out_ln_l": ln_l, "parts": parts, "blocks": blocks,
        "head_groups": tiling.head_groups, "splits": splits, "rows": m.numel(),
    }  # fmt: skip
    constants = tiling.constants(SIDE=tiling.b, SPLIT=splits > 1)
    del constants["A"], constants["B"]
    launches = [tiling.launch(lse_kernel, blocks * tiling.head_groups * support.batch * splits, arguments, constants)]
    if splits > 1:
        merge = {"parts": parts, "out_m": m, "out_ln_l": ln_l, "splits": splits, "rows": m.numel()}
        launches.append(row_launch(merge_lse_kernel, m.numel(), merge))
    return launches, (m, ln_l)


def paired_rows(problem: Problem, inputs: Inputs, arch: str) -> tuple[list[Launch], tuple[Tensor, Tensor, RowStats]]:
    """Divergence, mean and row stats of each row, head by head."""
    tiling = Tiling(problem, inputs[:4], arch, "paired")
    out = {
        f"out_{name}": new_rows(inputs.b_q, problem.distributions, tiling.mask.packed, value)
        for name, value in {"kl": 0.0, "mean": 0.0, "ma": -torch.inf, "la": 0.0, "mb": -torch.inf, "lb": 0.0}.items()
    }
    launches = _forward(tiling, inputs, paired_kernel, merge_paired_kernel, 5, tensors(inputs), out)
    kl, mean, *stats = out.values()
    return launches, (kl, mean, RowStats(*stats))


def mixture_rows(
    problem: Problem, inputs: Inputs, m_a: Tensor, ln_l_a: Tensor, arch: str
) -> tuple[list[Launch], tuple[Tensor, Tensor, Tensor, Tensor]]:
    """``(kl, m_b, ln l_b, s)`` of each row against the mean of its heads of ``a``."""
    kind = "mixture_index" if _is_index(problem, inputs) else "mixture"
    tiling = Tiling(problem, inputs[:4], arch, kind, inputs.b_w is not None)
    prepare, a = known_rows(m_a, ln_l_a, None, problem.head_group)
    out = {
        f"out_{name}": new_rows(inputs.b_q, problem.distributions, tiling.mask.packed, value)
        for name, value in {"kl": 0.0, "mb": -torch.inf, "lb": 0.0, "s": 0.0}.items()
    }
    known = tensors(inputs) | index_weights(inputs) | {"m_a": a.m, "l_a": a.l}
    launches = _forward(tiling, inputs, mixture_kernel, merge_mixture_kernel, 4, known, out)
    kl, m_b, ln_l_b, s = out.values()
    return [prepare, *launches], (kl, m_b, ln_l_b, s)


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
    """Gradients of ``sum(row_grad * kl)``; dQ in float32 where it was accumulated, the rest in the inputs' dtypes."""
    gradient = _Gradient(problem, inputs, stats, row_grad, arch, False)
    if want_a:
        assert mean is not None, "side a wants gradients where its rows were paired"
        gradient.mean = mean.contiguous()
    wanted = [(want_a, want_b)]
    if want_a and want_b and (problem.deterministic or gradient.apart):
        wanted = [(True, False), (False, True)]
    for want in wanted:
        gradient.add(*want)
    return gradient.launches, Gradients(gradient.dq_a, gradient.dk_a, gradient.dq_b, gradient.dk_b, gradient.dw_b)


def train(problem: Problem, inputs: Inputs, stats: RowStats, weight: Tensor, arch: str) -> tuple[list[Launch], Trained]:
    """Loss sums and gradients to ``b`` in one pass over ``a``; in two where it must be deterministic."""
    gradient = _Gradient(problem, inputs, stats, weight, arch, True)
    gradient.add(False, True)
    assert gradient.dq_b is not None
    assert gradient.dk_b is not None
    return gradient.launches, Trained(
        gradient.dq_b, gradient.dk_b, gradient.dw_b, gradient.sum_p, gradient.sum_acc, gradient.rows.b
    )


class _Gradient:
    """Collects the launches of a backward pass, by rows and keys, for one side or for both."""

    def __init__(
        self, problem: Problem, inputs: Inputs, stats: RowStats, weight: Tensor, arch: str, loss: bool
    ) -> None:
        self.problem, self.inputs, self.arch, self.loss = problem, inputs, arch, loss
        self.rows = GradientRows.of(problem, inputs, stats, weight)
        self.launches = list(self.rows.launches)
        self.mean: Tensor | None = None
        both = Tiling(problem, inputs[:4], arch, "keys_both")
        self.apart = max(problem.a.dim, problem.b.dim) > TOGETHER or both.a.chunked or both.b.chunked
        self.dq_a = self.dk_a = self.dq_b = self.dk_b = self.dw_b = None
        self.sum_p = self.sum_acc = self.rows.b.m  # not read
        if loss and not problem.deterministic:  # else `queries_kernel` writes them
            self.sum_p, self.sum_acc = (torch.zeros_like(self.rows.b.m) for _ in range(2))

    def add(self, want_a: bool, want_b: bool) -> None:
        """One pass for dQ and dK of the sides that want them; two if deterministic."""
        index = _is_index(self.problem, self.inputs)
        kind = "index" if index else "group" if self.problem.head_group > 1 else "both" if want_a and want_b else "one"
        if self.problem.deterministic:
            self._add_queries(want_a, want_b, kind)
        self._add_keys(want_a, want_b, kind)

    def _add_keys(self, want_a: bool, want_b: bool, kind: str) -> None:
        problem, inputs = self.problem, self.inputs
        one_pass = not problem.deterministic
        tiling = Tiling(problem, inputs[:4], self.arch, f"keys_{kind}", inputs.b_w is not None)
        pack = tiling.group.pack
        span = 1 if want_a and want_b else (tiling.a if want_a else tiling.b).per_kv // pack
        owners, blocks = tiling.head_groups // span, tiling.key_blocks()
        pieces = max(tiling.a.pieces if want_a else 1, tiling.b.pieces if want_b else 1)
        splits = 1
        if one_pass:
            splits = tiling.splits(blocks * owners * problem.support.batch * pieces, tiling.row_blocks())
        atomic_a = splits > 1 or tiling.a.per_kv > span * pack
        atomic_b = splits > 1 or tiling.b.per_kv > span * pack
        if want_a:
            self.dk_a = self._new(inputs.a_k, atomic_a, tiling.mask.packed)
            if one_pass:
                self.dq_a = torch.zeros(inputs.a_q.shape, dtype=torch.float32, device=inputs.a_q.device)
        if want_b:
            self.dk_b = self._new(inputs.b_k, atomic_b, tiling.mask.packed)
            if one_pass:
                self.dq_b = torch.zeros(inputs.b_q.shape, dtype=torch.float32, device=inputs.b_q.device)
                if inputs.b_w is not None:
                    self.dw_b = torch.zeros(inputs.b_w.shape, dtype=torch.float32, device=inputs.b_q.device)
        none = self.rows.b.m
        arguments = self._arguments(tiling) | {
            "dq_a": given(self.dq_a, none), "dk_a": given(self.dk_a, none), "dq_b": given(self.dq_b, none),
            "dk_b": given(self.dk_b, none), "dw_b": self.dw_b, "sum_p": self.sum_p, "sum_acc": self.sum_acc,
            "blocks": blocks, "owners": owners, "pieces": pieces, "span": span, "splits": splits,
        }  # fmt: skip
        constants = tiling.constants(
            WANT_A=want_a, WANT_B=want_b, DQ=one_pass, LOSS=self.loss and one_pass, ATOMIC_A=atomic_a and want_a,
            ATOMIC_B=atomic_b and want_b, HALF=self.rows.half,
        )  # fmt: skip
        programs = blocks * owners * problem.support.batch * pieces * splits
        self.launches.append(tiling.launch(keys_kernel, programs, arguments, constants))

    def _add_queries(self, want_a: bool, want_b: bool, kind: str) -> None:
        problem, inputs = self.problem, self.inputs
        tiling = Tiling(problem, inputs[:4], self.arch, f"queries_{kind}", inputs.b_w is not None)
        pieces = max(tiling.a.pieces if want_a else 1, tiling.b.pieces if want_b else 1)
        blocks, splits, none = tiling.row_blocks(), tiling.key_splits(), self.rows.b.m
        if want_a:
            self.dq_a = self._new_rows(inputs.a_q, splits, tiling.mask.packed)
        if want_b:
            self.dq_b = self._new_rows(inputs.b_q, splits, tiling.mask.packed)
            if inputs.b_w is not None:
                self.dw_b = self._new_rows(inputs.b_w, splits, tiling.mask.packed)
        if self.loss:
            shape = (splits, *none.shape) if splits > 1 else none.shape
            self.sum_p, self.sum_acc = (none.new_zeros(shape) for _ in range(2))
        arguments = self._arguments(tiling) | {
            "dq_a": given(self.dq_a, none), "dq_b": given(self.dq_b, none), "dw_b": self.dw_b,
            "out_p": self.sum_p, "out_acc": self.sum_acc, "blocks": blocks, "head_groups": tiling.head_groups,
            "pieces": pieces, "splits": splits, "rows": none.numel(),
        }  # fmt: skip
        constants = tiling.constants(WANT_A=want_a, WANT_B=want_b, LOSS=self.loss, HALF=self.rows.half)
        programs = blocks * tiling.head_groups * problem.support.batch * pieces * max(tiling.b.heads, 1) * splits
        self.launches.append(tiling.launch(queries_kernel, programs, arguments, constants))

    def _arguments(self, tiling: Tiling) -> dict[str, Any]:
        rows = self.rows.arguments(self.problem, self.inputs, self.mean)
        return rows | {"cu": tiling.cu(), "extent": tiling.extent}

    def _new(self, k: Tensor, atomic: bool, packed: bool) -> Tensor:
        """dK: float32 where it is accumulated or must not be rounded; zero where a key may belong to no sequence."""
        dtype = torch.float32 if atomic or self.loss else k.dtype
        make = torch.zeros if atomic or packed else torch.empty
        return make(k.shape, dtype=dtype, device=k.device)

    def _new_rows(self, q: Tensor, splits: int, packed: bool) -> Tensor:
        """DQ as `queries_kernel` writes it: if the keys are split, one per split, in float32."""
        dtype = torch.float32 if splits > 1 or self.loss else q.dtype
        make = torch.zeros if packed else torch.empty
        return make((splits, *q.shape) if splits > 1 else q.shape, dtype=dtype, device=q.device)


def _forward(
    tiling: Tiling, inputs: Inputs, kernel: Any, merge: Any, fields: int, known: dict[str, Any], out: dict[str, Tensor]
) -> list[Launch]:
    """A forward pass, and the merge of its splits if the keys were split."""
    rows = out["out_kl"]
    splits, blocks = tiling.key_splits(), tiling.row_blocks()
    parts = _parts(inputs.b_q, fields, splits, rows)
    arguments = known | out | {
        "cu": tiling.cu(), "extent": tiling.extent, "scale_a": tiling.problem.a.scale,
        "scale_b": tiling.problem.b.scale, "parts": parts, "blocks": blocks, "head_groups": tiling.head_groups,
        "splits": splits, "rows": rows.numel(),
    }  # fmt: skip
    programs = blocks * tiling.head_groups * tiling.support.batch * splits
    launches = [tiling.launch(kernel, programs, arguments, tiling.constants(SPLIT=splits > 1))]
    if splits > 1:
        launches.append(
            row_launch(merge, rows.numel(), {"parts": parts, **out, "splits": splits, "rows": rows.numel()})
        )
    return launches


def _is_index(problem: Problem, inputs: Inputs) -> bool:
    """Whether kernels have heads to sum."""
    return summed_heads(problem.b, inputs.b_w is not None) > 0


def _parts(q: Tensor, fields: int, splits: int, rows: Tensor) -> Tensor:
    """The states of splits, ``[fields, splits, rows]``; a row that no program visits has seen no key."""
    if splits == 1:
        return rows  # not read
    return torch.full((fields, splits, rows.numel()), NONE.value, dtype=torch.float32, device=q.device)
