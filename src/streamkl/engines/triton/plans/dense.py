"""The launches of each function of the engine over all keys that a row may see, and their results.

Plans allocate outputs, row vectors, float32 accumulators and split-K partials, and nothing else. On ``meta`` tensors
they allocate nothing at all: that is how kernels are compiled for an architecture that is not present.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from streamkl.engines.triton.kernels.dense.forward import mixture_kernel, paired_kernel
from streamkl.engines.triton.kernels.dense.keys import keys_kernel
from streamkl.engines.triton.kernels.dense.lse import lse_kernel
from streamkl.engines.triton.kernels.dense.queries import queries_kernel
from streamkl.engines.triton.kernels.dense.split import merge_lse_kernel, merge_mixture_kernel, merge_paired_kernel
from streamkl.engines.triton.kernels.groups import (
    GradientOut,
    KeyCounts,
    LseOut,
    MixtureOut,
    PairedOut,
    Parts,
    QueryCounts,
    RowCounts,
)
from streamkl.engines.triton.kernels.tile.states import NONE
from streamkl.engines.triton.launch import Launch, Tiling, new_rows, row_launch
from streamkl.engines.triton.meta import Want, summed_heads
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


def logsumexp(
    support: Support, side: Side, q: Tensor, k: Tensor, w: Tensor | None, arch: str
) -> tuple[list[Launch], tuple[Tensor, Tensor]]:
    """``(m, ln l)`` of one side, each ``[B, distributions, Nq]``."""
    kind = "lse_index" if summed_heads(side, w is not None) else "lse"
    tiling = Tiling(Problem(side, side, support), (q, k), arch, kind, w is not None)
    out = LseOut(*(new_rows(q, side.distributions, tiling.mask.packed, value) for value in (-torch.inf, 0.0)))
    constants = tiling.constants(SIDE=tiling.b)
    del constants["A"], constants["B"]
    given = {"side": side_arguments(side, q, k, w)}
    return _forward(tiling, lse_kernel, merge_lse_kernel, given, out, 2, constants), (out.m, out.ln_l)


def paired_rows(problem: Problem, inputs: Inputs, arch: str) -> tuple[list[Launch], tuple[Tensor, Tensor, RowStats]]:
    """Divergence, mean and row stats of each row, head by head."""
    tiling = Tiling(problem, inputs[:4], arch, "paired")
    out = new_paired_out(problem, inputs.b_q, tiling.mask.packed)
    given = both_sides(problem, inputs)
    launches = _forward(tiling, paired_kernel, merge_paired_kernel, given, out, 5, tiling.constants())
    return launches, (out.kl, out.mean, RowStats(*out[2:]))


def mixture_rows(
    problem: Problem, inputs: Inputs, m_a: Tensor, ln_l_a: Tensor, arch: str
) -> tuple[list[Launch], tuple[Tensor, Tensor, Tensor, Tensor]]:
    """``(kl, m_b, ln l_b, s)`` of each row against the mean of its heads of ``a``."""
    kind = "mixture_index" if _is_index(problem, inputs) else "mixture"
    tiling = Tiling(problem, inputs[:4], arch, kind, inputs.b_w is not None)
    prepare, stats_a = known_rows(m_a, ln_l_a, None, problem.head_group)
    out = new_mixture_out(problem, inputs.b_q, tiling.mask.packed)
    given = both_sides(problem, inputs) | {"stats_a": stats_a}
    launches = _forward(tiling, mixture_kernel, merge_mixture_kernel, given, out, 4, tiling.constants())
    return [prepare, *launches], tuple(out)


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
    """Gradients of ``sum(row_grad * kl)``; dQ in float32 where it was accumulated, the rest in the inputs' dtypes.

    Without ``round_keys``, dK is in float32.
    """
    gradient = _Gradient(problem, inputs, stats, row_grad, arch, False, round_keys)
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
    gradient = _Gradient(problem, inputs, stats, weight, arch, True, False)
    gradient.add(False, True)
    assert gradient.dq_b is not None
    assert gradient.dk_b is not None
    assert gradient.sum_p is not None
    assert gradient.sum_acc is not None
    return gradient.launches, Trained(
        gradient.dq_b, gradient.dk_b, gradient.dw_b, gradient.sum_p, gradient.sum_acc, gradient.rows.b
    )


class _Gradient:
    """Collects the launches of a backward pass, by rows and keys, for one side or for both."""

    def __init__(
        self,
        problem: Problem,
        inputs: Inputs,
        stats: RowStats,
        weight: Tensor,
        arch: str,
        loss: bool,
        round_keys: bool,
    ) -> None:
        self.problem, self.inputs, self.arch, self.loss, self.round_keys = problem, inputs, arch, loss, round_keys
        self.rows = GradientRows.of(problem, inputs, stats, weight)
        self.launches = list(self.rows.launches)
        self.mean: Tensor | None = None
        both = Tiling(problem, inputs[:4], arch, "keys_both")
        self.apart = max(problem.a.dim, problem.b.dim) > TOGETHER or both.a.chunked or both.b.chunked
        self.dq_a = self.dk_a = self.dq_b = self.dk_b = self.dw_b = None
        self.sum_p: Tensor | None = None
        self.sum_acc: Tensor | None = None
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
        owners, blocks = tiling.head_packs // span, tiling.key_blocks()
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
        want = Want(
            want_a, want_b, self.loss and one_pass, self.rows.half, one_pass, atomic_a and want_a, atomic_b and want_b
        )
        programs = blocks * owners * problem.support.batch * pieces * splits
        self._add(keys_kernel, programs, tiling, KeyCounts(blocks, owners, span, pieces, splits), want)

    def _add_queries(self, want_a: bool, want_b: bool, kind: str) -> None:
        problem, inputs = self.problem, self.inputs
        tiling = Tiling(problem, inputs[:4], self.arch, f"queries_{kind}", inputs.b_w is not None)
        pieces = max(tiling.a.pieces if want_a else 1, tiling.b.pieces if want_b else 1)
        blocks, splits, rows = tiling.row_blocks(), tiling.key_splits(), self.rows.b.m
        if want_a:
            self.dq_a = self._new_rows(inputs.a_q, splits, tiling.mask.packed)
        if want_b:
            self.dq_b = self._new_rows(inputs.b_q, splits, tiling.mask.packed)
            if inputs.b_w is not None:
                self.dw_b = self._new_rows(inputs.b_w, splits, tiling.mask.packed)
        if self.loss:
            shape = (splits, *rows.shape) if splits > 1 else rows.shape
            self.sum_p, self.sum_acc = (rows.new_zeros(shape) for _ in range(2))
        counts = QueryCounts(blocks, tiling.head_packs, pieces, splits, rows.numel())
        programs = blocks * tiling.head_packs * problem.support.batch * pieces * max(tiling.b.heads, 1) * splits
        self._add(queries_kernel, programs, tiling, counts, Want(want_a, want_b, self.loss, self.rows.half))

    def _add(self, kernel: Any, programs: int, tiling: Tiling, counts: KeyCounts | QueryCounts, want: Want) -> None:
        out = GradientOut(self.dq_a, self.dk_a, self.dq_b, self.dk_b, self.dw_b, self.sum_p, self.sum_acc)
        arguments = both_sides(self.problem, self.inputs) | {
            "stats": self.rows.arguments(self.mean), "support": tiling.support_arguments(), "out": out,
            "counts": counts,
        }  # fmt: skip
        self.launches.append(tiling.launch(kernel, programs, arguments, tiling.constants(WANT=want)))

    def _new(self, k: Tensor, atomic: bool, packed: bool) -> Tensor:
        """dK: float32 where it is accumulated or must not be rounded; zero where a key may belong to no sequence."""
        dtype = k.dtype if self.round_keys and not atomic else torch.float32
        make = torch.zeros if atomic or packed else torch.empty
        return make(k.shape, dtype=dtype, device=k.device)

    def _new_rows(self, q: Tensor, splits: int, packed: bool) -> Tensor:
        """DQ as `queries_kernel` writes it: if the keys are split, one per split, in float32."""
        dtype = torch.float32 if splits > 1 or self.loss else q.dtype
        make = torch.zeros if packed else torch.empty
        return make((splits, *q.shape) if splits > 1 else q.shape, dtype=dtype, device=q.device)


def _forward(
    tiling: Tiling,
    kernel: Any,
    merge: Any,
    given: dict[str, Any],
    out: LseOut | PairedOut | MixtureOut,
    fields: int,
    constants: dict[str, Any],
) -> list[Launch]:
    """A forward pass, and the merge of its splits' states of so many fields, if the keys were split."""
    splits, blocks, rows = tiling.key_splits(), tiling.row_blocks(), out[0]
    parts = None
    if splits > 1:  # a row that no program visits has seen no key
        states = torch.full((fields, splits, rows.numel()), NONE.value, dtype=torch.float32, device=rows.device)
        parts = Parts(states, splits, rows.numel())
    arguments = given | {
        "support": tiling.support_arguments(), "out": out, "parts": parts,
        "counts": RowCounts(blocks, tiling.head_packs, splits),
    }  # fmt: skip
    programs = blocks * tiling.head_packs * tiling.support.batch * splits
    launches = [tiling.launch(kernel, programs, arguments, constants)]
    if parts is not None:
        launches.append(row_launch(merge, rows.numel(), {"parts": parts, "out": out}))
    return launches


def _is_index(problem: Problem, inputs: Inputs) -> bool:
    """Whether kernels have heads to sum."""
    return summed_heads(problem.b, inputs.b_w is not None) > 0
