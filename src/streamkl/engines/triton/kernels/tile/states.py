"""The row states of ``state.py``: how a tile changes them, and what is stored of them.

A row that has seen no key has a row max of ``NONE``, a finite number: its sums are multiplied by ``exp(NONE - m) = 0``
once it sees a key, and discarded if it never does. ``NONE`` lies below every logit that the contract covers (1e30), and
far enough from the end of float32 that a thousand times it is finite.
"""

from __future__ import annotations

import triton
import triton.language as tl

from streamkl.engines.triton.kernels.groups import LseState, MixtureState, PairedState

LOG2E = tl.constexpr(1.4426950408889634)
NONE = tl.constexpr(-1.0e34)
SMALLEST = tl.constexpr(1.0e-37)
"""Below it a logarithm may be that of 0; such a probability adds far less than a rounding to a divergence."""
IGNORED = tl.constexpr(1.0e30)
"""The ``log2 l`` of ignored rows: whatever they hold, their probabilities are 0."""


@triton.jit
def exp(x):
    """``e^x`` by the instruction for ``2^x``; ``tl.exp`` spends three more on results too small to matter."""
    return tl.exp2(x * LOG2E)


@triton.jit
def new_lse(ROWS: tl.constexpr):
    """The state of rows that have seen no key."""
    return LseState(tl.full([ROWS], NONE, tl.float32), tl.zeros([ROWS], tl.float32))


@triton.jit
def new_paired(ROWS: tl.constexpr):
    """The state of rows that have seen no key."""
    none = tl.full([ROWS], NONE, tl.float32)
    zero = tl.zeros([ROWS], tl.float32)
    return PairedState(none, zero, none, zero, zero)


@triton.jit
def new_mixture(ROWS: tl.constexpr):
    """The state of rows that have seen no key."""
    zero = tl.zeros([ROWS], tl.float32)
    return MixtureState(tl.full([ROWS], NONE, tl.float32), zero, zero, zero)


@triton.jit
def update_lse(state, x):
    """The state of `LogSumExp` after another tile of logits, ``[ROWS, KEYS]``."""
    m = tl.maximum(state.m, tl.max(x, 1))
    return LseState(m, state.l * exp(state.m - m) + tl.sum(exp(x - m[:, None]), 1))


@triton.jit
def update_paired(state, x_a, x_b):
    """The state of `PairedState` after another tile of both sides' logits, ``[ROWS, KEYS]``.

    Where ``a`` is -inf, its weight is 0 and it adds 0, unless ``b`` is not finite either.
    """
    m_a = tl.maximum(state.m_a, tl.max(x_a, 1))
    m_b = tl.maximum(state.m_b, tl.max(x_b, 1))
    x_a = x_a - m_a[:, None]
    x_b = x_b - m_b[:, None]
    weights = exp(x_a)
    alpha = exp(state.m_a - m_a)
    shift = (state.m_a - m_a) - (state.m_b - m_b)
    acc = alpha * (state.acc + state.l_a * shift) + tl.sum(weights * (tl.maximum(x_a, NONE) - x_b), 1)
    l_a = alpha * state.l_a + tl.sum(weights, 1)
    l_b = exp(state.m_b - m_b) * state.l_b + tl.sum(exp(x_b), 1)
    return PairedState(m_a, l_a, m_b, l_b, acc)


@triton.jit
def mean_of(p, GROUP: tl.constexpr):
    """The mean of a run's probabilities from their sum: exact, so that the mean of ones is 1."""
    if GROUP.heads & (GROUP.heads - 1) == 0:
        return p * (1.0 / GROUP.heads)
    else:
        return tl.div_rn(p, tl.full(p.shape, GROUP.heads, tl.float32))


@triton.jit
def mixture_terms(p, x):
    """``p [ln p - x]`` of a tile: 0 where ``p`` is, unless ``x`` is not finite."""
    return p * (tl.log(tl.maximum(p, SMALLEST)) - x)


@triton.jit
def update_mixture(state, p, x):
    """The state of `MixtureState` after another tile of the target and of the logits of ``b``, ``[ROWS, KEYS]``."""
    m_b = tl.maximum(state.m_b, tl.max(x, 1))
    x = x - m_b[:, None]
    moved = tl.where(state.s != 0, state.s * (m_b - state.m_b), 0.0)
    acc = state.acc + moved + tl.sum(mixture_terms(p, x), 1)
    s = state.s + tl.sum(p, 1)
    l_b = state.l_b * exp(state.m_b - m_b) + tl.sum(exp(x), 1)
    return MixtureState(m_b, l_b, s, acc)


@triton.jit
def checked_maximum(m, live):
    """``m``, nan where a row saw a key and yet has no row max, because its logits are nan or -inf."""
    return tl.where(live & (m <= NONE), float("nan"), m)


@triton.jit
def log_of_ratio(x, y):
    """``ln(x / y)`` of row vectors, to the last digit: it dominates the divergence of similar distributions."""
    return tl.log(x.to(tl.float64) / y.to(tl.float64)).to(tl.float32)


@triton.jit
def store_lse(out, index, exist, live, state):
    """Stores the row stats of each row; ``-inf`` and 0 for a dead row."""
    tl.store(out.m + index, tl.where(live, state.m, -float("inf")), mask=exist)
    tl.store(out.ln_l + index, tl.where(live, tl.log(state.l), 0.0), mask=exist)


@triton.jit
def store_paired(out, index, exist, live, state):
    """Finishes a state: divergence, mean and row stats of each row; 0 and ``-inf`` for a dead row."""
    mean = tl.div_rn(state.acc, state.l_a)
    kl = mean + log_of_ratio(state.l_b, state.l_a)
    kl = tl.where((state.m_a + state.m_b) == (state.m_a + state.m_b), kl, float("nan"))
    tl.store(out.kl + index, tl.where(live, kl, 0.0), mask=exist)
    tl.store(out.mean + index, tl.where(live, mean, 0.0), mask=exist)
    tl.store(out.m_a + index, tl.where(live, state.m_a, -float("inf")), mask=exist)
    tl.store(out.ln_l_a + index, tl.where(live, tl.log(state.l_a), 0.0), mask=exist)
    tl.store(out.m_b + index, tl.where(live, state.m_b, -float("inf")), mask=exist)
    tl.store(out.ln_l_b + index, tl.where(live, tl.log(state.l_b), 0.0), mask=exist)


@triton.jit
def store_mixture(out, index, exist, live, state):
    """Finishes a state: divergence, row stats and mass of each row; 0 and ``-inf`` for a dead row."""
    kl = tl.where(state.s != 0, tl.div_rn(state.acc, state.s) + log_of_ratio(state.l_b, state.s), state.acc)
    kl = tl.where(state.m_b == state.m_b, kl, float("nan"))
    tl.store(out.kl + index, tl.where(live, kl, 0.0), mask=exist)
    tl.store(out.m_b + index, tl.where(live, state.m_b, -float("inf")), mask=exist)
    tl.store(out.ln_l_b + index, tl.where(live, tl.log(state.l_b), 0.0), mask=exist)
    tl.store(out.s + index, tl.where(live, state.s, 0.0), mask=exist)


@triton.jit
def field_ptrs(parts, FIELD: tl.constexpr, split, index):
    """Pointers to a field of the states of a split."""
    return parts.ptr + (FIELD * parts.splits + split).to(tl.int64) * parts.rows + index


@triton.jit
def store_part(parts, split, rows, state, FIELDS: tl.constexpr):
    """Stores the state of a split, field by field."""
    for n in tl.static_range(FIELDS):
        tl.store(field_ptrs(parts, n, split, rows.index), state[n], mask=rows.exist)
