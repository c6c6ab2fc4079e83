"""Row vectors for the passes whose row stats are known."""

from __future__ import annotations

import triton
import triton.language as tl

from streamkl.engines.triton.kernels.tile.states import IGNORED, LOG2E


@triton.jit
def rows_kernel(
    given,
    weight,
    out,
    rows,
    nq,
    per_weight,
    BLOCK: tl.constexpr,
):
    """``(m, log2 l)`` from ``(m, ln l)``; rows that see no key or have weight 0 get 0 and ``IGNORED``.

    ``per_weight`` heads read one row of ``weight``, if there is one.
    """
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exist = index < rows
    m = tl.load(given.m + index, mask=exist, other=0.0)  # [BLOCK]
    ln_l = tl.load(given.ln_l + index, mask=exist, other=0.0)  # [BLOCK]
    live = m != -float("inf")
    if weight is not None:
        live &= tl.load(weight + (index // nq // per_weight) * nq + index % nq, mask=exist, other=0.0) != 0
    tl.store(out.m + index, tl.where(live, m, 0.0), mask=exist)
    tl.store(out.log2_l + index, tl.where(live, ln_l * LOG2E, IGNORED), mask=exist)
