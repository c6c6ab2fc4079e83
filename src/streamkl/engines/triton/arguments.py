"""The arguments of launches: tensors by name, and row vectors as the passes read them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from streamkl.engines.triton.kernels.rows import rows_kernel
from streamkl.engines.triton.launch import Launch, row_launch
from streamkl.problem import Inputs, Problem
from streamkl.state import RowStats


class Rows(NamedTuple):
    """The row stats of a side as the passes read them: ``m`` and ``log2 l``, ``[B, heads, Nq]``."""

    m: Tensor
    l: Tensor


class Trained(NamedTuple):
    """The results of one pass: gradients in float32, and the sums of each row that its loss is computed from."""

    dq: Tensor
    dk: Tensor
    dw: Tensor | None
    sum_p: Tensor
    sum_acc: Tensor
    b: Rows


class GradientRows(NamedTuple):
    """The row vectors that a gradient pass reads, and the launches that compute them.

    If a side is ``half`` (float16), ``weight`` was divided by ``peak``; ``peak_w`` is the divisor of index weights.
    """

    launches: list[Launch]
    a: Rows
    b: Rows
    weight: Tensor
    peak: Tensor
    peak_w: Tensor | None
    half: bool

    @classmethod
    def of(cls, problem: Problem, inputs: Inputs, stats: RowStats, weight: Tensor) -> GradientRows:
        """From the row stats of both sides and the weights of the rows, ``[B, R, Nq]``."""
        half = torch.float16 in (inputs.a_q.dtype, inputs.b_q.dtype)
        weight, peak = _weights(weight.contiguous(), half)
        prepare_a, a = known_rows(stats.m_a, stats.ln_l_a, weight, problem.head_group)
        prepare_b, b = known_rows(stats.m_b, stats.ln_l_b, weight, 1)
        peak_w = None
        if inputs.b_w is not None and inputs.b_q.dtype == torch.float16:
            peak_w = _peak(torch.where((weight != 0) & (stats.m_b != -torch.inf), inputs.b_w.float(), 0.0))
        return cls([prepare_a, prepare_b], a, b, weight, peak, peak_w, half)

    def arguments(self, problem: Problem, inputs: Inputs, mean: Tensor | None) -> dict[str, Any]:
        """The arguments of a gradient pass, without its outputs; ``mean`` is read where side ``a`` wants gradients."""
        return tensors(inputs) | index_weights(inputs) | {
            "m_a": self.a.m, "l_a": self.a.l, "m_b": self.b.m, "l_b": self.b.l, "weight": self.weight,
            "mean": given(mean, self.weight), "peak": self.peak, "peak_w": self.peak_w,
            "scale_a": problem.a.scale, "scale_b": problem.b.scale,
        }  # fmt: skip


def tensors(inputs: Inputs) -> dict[str, Any]:
    """Queries and keys of both sides, and their strides."""
    a_q, a_k, b_q, b_k = inputs[:4]
    return {
        "q_a": a_q, "k_a": a_k, "q_b": b_q, "k_b": b_k, "strides_qa": a_q.stride(), "strides_ka": a_k.stride(),
        "strides_qb": b_q.stride(), "strides_kb": b_k.stride(),
    }  # fmt: skip


def index_weights(inputs: Inputs) -> dict[str, Any]:
    """The weights of index heads, if they have any."""
    w = inputs.b_w
    return {"w_b": w, "strides_wb": None if w is None else w.stride()}


def known_rows(m: Tensor, ln_l: Tensor, weight: Tensor | None, heads: int) -> tuple[Launch, Rows]:
    """The row stats of a side as the passes read them; ``heads`` heads make one distribution."""
    m, ln_l = m.contiguous(), ln_l.contiguous()
    rows = Rows(*(torch.empty_like(m) for _ in range(2)))
    arguments = {
        "m": m, "ln_l": ln_l, "weight": m if weight is None else weight, "out_m": rows.m,
        "out_l": rows.l, "rows": m.numel(), "nq": m.shape[2], "per_weight": heads,
    }  # fmt: skip
    return row_launch(rows_kernel, m.numel(), arguments, WEIGHTED=weight is not None), rows


def given(tensor: Tensor | None, other: Tensor) -> Tensor:
    """A tensor, or a placeholder for one that the kernel does not read."""
    return other if tensor is None else tensor


def _weights(weight: Tensor, half: bool) -> tuple[Tensor, Tensor]:
    """Row weights in float32; for float16, where derivatives would underflow, at most 1, with their divisor."""
    weight = weight.float()
    if not half:
        return weight, weight
    peak = _peak(weight)
    return weight / peak, peak


def _peak(weight: Tensor) -> Tensor:
    """The least power of two that no finite weight exceeds; 1 if there is none."""
    if weight.numel() == 0:
        return torch.ones((), dtype=torch.float32, device=weight.device)
    largest = torch.where(weight.isfinite(), weight.abs(), 0.0).amax()
    return torch.where(largest > 0, torch.exp2(torch.ceil(torch.log2(largest))), 1.0)
