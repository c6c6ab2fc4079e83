"""The arguments of launches: the groups that kernels read, and row vectors as the passes read them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from streamkl.engines.triton.kernels.groups import (
    GradientRowPtrs,
    LseOut,
    MixtureOut,
    PairedOut,
    RowStatPtrs,
    SideArguments,
    Strided,
    SupportArguments,
)
from streamkl.engines.triton.kernels.tile.rows import rows_kernel
from streamkl.engines.triton.launch import Launch, Tiling, new_rows, row_launch
from streamkl.problem import Inputs, Problem, Side
from streamkl.state import RowStats


class Trained(NamedTuple):
    """The results of one pass: gradients in float32, and the sums of each row that its loss is computed from."""

    dq: Tensor
    dk: Tensor
    dw: Tensor | None
    sum_p: Tensor
    sum_acc: Tensor
    b: RowStatPtrs


class GradientRows(NamedTuple):
    """The row vectors that a gradient pass reads, and the launches that compute them.

    If a side is ``half`` (float16), ``weight`` was divided by ``weight_divisor``; ``index_divisor`` is that of index
    weights.
    """

    launches: list[Launch]
    a: RowStatPtrs
    b: RowStatPtrs
    weight: Tensor
    weight_divisor: Tensor | None
    index_divisor: Tensor | None

    @property
    def half(self) -> bool:
        """Whether a side is float16."""
        return self.weight_divisor is not None

    @classmethod
    def of(cls, problem: Problem, inputs: Inputs, stats: RowStats, weight: Tensor) -> GradientRows:
        """From the row stats of both sides and the weights of the rows, ``[B, R, Nq]``."""
        half = torch.float16 in (inputs.a_q.dtype, inputs.b_q.dtype)
        weight, weight_divisor = _weights(weight.contiguous(), half)
        prepare_a, a = known_rows(stats.m_a, stats.ln_l_a, weight, problem.head_group)
        prepare_b, b = known_rows(stats.m_b, stats.ln_l_b, weight, 1)
        index_divisor = None
        if inputs.b_w is not None and inputs.b_q.dtype == torch.float16:
            index_divisor = _divisor(torch.where((weight != 0) & (stats.m_b != -torch.inf), inputs.b_w.float(), 0.0))
        return cls([prepare_a, prepare_b], a, b, weight, weight_divisor, index_divisor)

    def arguments(self, mean: Tensor | None) -> GradientRowPtrs:
        """The rows as kernels read them; ``mean`` is read where side ``a`` wants gradients."""
        return GradientRowPtrs(self.a, self.b, self.weight, mean, self.weight_divisor, self.index_divisor)


def side_arguments(side: Side, q: Tensor, k: Tensor, w: Tensor | None = None) -> SideArguments:
    """One side as kernels read it."""
    weights = None if w is None else Strided(w, *w.stride())
    return SideArguments(Strided(q, *q.stride()), Strided(k, *k.stride()), weights, side.dim, side.scale)


def both_sides(problem: Problem, inputs: Inputs) -> dict[str, SideArguments]:
    """Both sides as kernels read them."""
    return {
        "a": side_arguments(problem.a, inputs.a_q, inputs.a_k),
        "b": side_arguments(problem.b, inputs.b_q, inputs.b_k, inputs.b_w),
    }


def query_block_support(tiling: Tiling, query_block: int) -> SupportArguments:
    """The support with the first query block of each packed sequence, computed on the device."""
    support = tiling.support_arguments()
    if support.packed is None:
        return support
    query_blocks = (support.packed.q_ptr.diff() + (query_block - 1)) // query_block
    first = (query_blocks.cumsum(0) - query_blocks).to(torch.int32)
    return support._replace(packed=support.packed._replace(query_block_ptr=first))


def known_rows(m: Tensor, ln_l: Tensor, weight: Tensor | None, heads: int) -> tuple[Launch, RowStatPtrs]:
    """The row stats of a side as the passes read them; ``heads`` heads make one distribution."""
    m, ln_l = m.contiguous(), ln_l.contiguous()
    rows = RowStatPtrs(*(torch.empty_like(m) for _ in range(2)))
    arguments = {
        "given": LseOut(m, ln_l), "weight": weight, "out": rows, "rows": m.numel(), "nq": m.shape[2],
        "per_weight": heads,
    }  # fmt: skip
    return row_launch(rows_kernel, m.numel(), arguments), rows


def new_paired_out(problem: Problem, q: Tensor, packed: bool) -> PairedOut:
    """Results of a forward head by head."""
    values = (0.0, 0.0, -torch.inf, 0.0, -torch.inf, 0.0)
    return PairedOut(*(new_rows(q, problem.distributions, packed, value) for value in values))


def new_mixture_out(problem: Problem, q: Tensor, packed: bool) -> MixtureOut:
    """Results of a forward against a head mean."""
    values = (0.0, -torch.inf, 0.0, 0.0)
    return MixtureOut(*(new_rows(q, problem.distributions, packed, value) for value in values))


def _weights(weight: Tensor, half: bool) -> tuple[Tensor, Tensor | None]:
    """Row weights in float32; for float16, where derivatives would underflow, at most 1, with their divisor."""
    weight = weight.float()
    if not half:
        return weight, None
    divisor = _divisor(weight)
    return weight / divisor, divisor


def _divisor(weight: Tensor) -> Tensor:
    """The least power of two that no finite weight exceeds; 1 if there is none."""
    if weight.numel() == 0:
        return torch.ones((), dtype=torch.float32, device=weight.device)
    largest = torch.where(weight.isfinite(), weight.abs(), 0.0).amax()
    return torch.where(largest > 0, torch.exp2(torch.ceil(torch.log2(largest))), 1.0)
