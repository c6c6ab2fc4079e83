"""Split keys: where there are few queries, several programs split the keys of a row, and their states are merged here.

``parts`` is ``[fields, splits, rows]``; a split in which a row saw no key has a row max of ``NONE`` and weight 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from streamkl.engines.triton.kernels.groups import LseState, MixtureState, PairedState
from streamkl.engines.triton.kernels.tile.states import (
    NONE,
    exp,
    field_ptrs,
    new_lse,
    new_mixture,
    new_paired,
    store_lse,
    store_mixture,
    store_paired,
)


@triton.jit
def _my_rows(parts, BLOCK: tl.constexpr):
    """The rows of this program: their places, and which exist."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return index, index < parts.rows


@triton.jit
def _maximum(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def merge_lse_kernel(parts, out, BLOCK: tl.constexpr):
    """Merges states of `LogSumExp`."""
    index, exist = _my_rows(parts, BLOCK)
    state = new_lse(BLOCK)
    for split in range(parts.splits):
        other_m = tl.load(field_ptrs(parts, 0, split, index), mask=exist, other=NONE)
        other_l = tl.load(field_ptrs(parts, 1, split, index), mask=exist, other=0.0)
        m = _maximum(state.m, other_m)
        state = LseState(m, state.l * exp(state.m - m) + other_l * exp(other_m - m))
    store_lse(out, index, exist, state.m != NONE, state)


@triton.jit
def merge_paired_kernel(parts, out, BLOCK: tl.constexpr):
    """Merges states of `PairedState`."""
    index, exist = _my_rows(parts, BLOCK)
    state = new_paired(BLOCK)
    for split in range(parts.splits):
        other = PairedState(
            tl.load(field_ptrs(parts, 0, split, index), mask=exist, other=NONE),
            tl.load(field_ptrs(parts, 1, split, index), mask=exist, other=0.0),
            tl.load(field_ptrs(parts, 2, split, index), mask=exist, other=NONE),
            tl.load(field_ptrs(parts, 3, split, index), mask=exist, other=0.0),
            tl.load(field_ptrs(parts, 4, split, index), mask=exist, other=0.0),
        )
        m_a = _maximum(state.m_a, other.m_a)
        m_b = _maximum(state.m_b, other.m_b)
        alpha, other_alpha = exp(state.m_a - m_a), exp(other.m_a - m_a)
        acc = alpha * (state.acc + state.l_a * ((state.m_a - m_a) - (state.m_b - m_b)))
        acc += other_alpha * (other.acc + other.l_a * ((other.m_a - m_a) - (other.m_b - m_b)))
        l_a = alpha * state.l_a + other_alpha * other.l_a
        l_b = exp(state.m_b - m_b) * state.l_b + exp(other.m_b - m_b) * other.l_b
        state = PairedState(m_a, l_a, m_b, l_b, acc)
    store_paired(out, index, exist, state.m_a != NONE, state)


@triton.jit
def merge_mixture_kernel(parts, out, BLOCK: tl.constexpr):
    """Merges states of `MixtureState`."""
    index, exist = _my_rows(parts, BLOCK)
    state = new_mixture(BLOCK)
    for split in range(parts.splits):
        other = MixtureState(
            tl.load(field_ptrs(parts, 0, split, index), mask=exist, other=NONE),
            tl.load(field_ptrs(parts, 1, split, index), mask=exist, other=0.0),
            tl.load(field_ptrs(parts, 2, split, index), mask=exist, other=0.0),
            tl.load(field_ptrs(parts, 3, split, index), mask=exist, other=0.0),
        )
        m_b = _maximum(state.m_b, other.m_b)
        acc = state.acc + tl.where(state.s != 0, state.s * (m_b - state.m_b), 0.0)
        acc += other.acc + tl.where(other.s != 0, other.s * (m_b - other.m_b), 0.0)
        l_b = state.l_b * exp(state.m_b - m_b) + other.l_b * exp(other.m_b - m_b)
        state = MixtureState(m_b, l_b, state.s + other.s, acc)
    store_mixture(out, index, exist, state.m_b != NONE, state)
