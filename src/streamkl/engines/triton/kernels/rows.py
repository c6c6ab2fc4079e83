"""Row vectors for the passes whose row stats are known."""

from __future__ import annotations

import triton
import triton.language as tl

from streamkl.engines.triton.kernels.primitives import IGNORED, LOG2E


@triton.jit
def rows_kernel(
    m, ln_l, weight, out_m, out_l, rows, nq, per_weight, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """``(m, log2 l)`` from ``(m, ln l)``; rows that see no key or have weight 0 get 0 and ``IGNORED``.

    ``per_weight`` heads read one row of ``weight``.
    """
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = o < rows
    b_m = tl.load(m + o, mask=mask, other=0.0)
    b_l = tl.load(ln_l + o, mask=mask, other=0.0)
    live = b_m != -float("inf")
    if WEIGHTED:
        live &= tl.load(weight + (o // nq // per_weight) * nq + o % nq, mask=mask, other=0.0) != 0
    tl.store(out_m + o, tl.where(live, b_m, 0.0), mask=mask)
    tl.store(out_l + o, tl.where(live, b_l * LOG2E, IGNORED), mask=mask)
