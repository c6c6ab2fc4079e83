"""The streaming algorithm in plain PyTorch: any device, any dtype, nothing larger than a tile of logits.

Read it beside ``docs/maths.md``: a walk over tiles of rows and keys, a row state (``state.py``) carried along the
keys, and a backward sweep that recomputes each tile from saved row vectors and adds to dQ and dK at once.
Rows that see no key are never visited, so their losses and gradients keep the zeros they were allocated with.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from streamkl.problem import Gradients, Inputs, Problem, Side, Support, Tile
from streamkl.state import LogSumExp, MixtureState, Normalisers, PairedState, mixture_kl, mixture_sums

name = "tiled"
summary = "plain PyTorch, runs on any device"

BLOCK_Q, BLOCK_K = 256, 512
"""Rows and keys of a tile on a CPU, where it should stay in the second-level cache."""

DEVICE_BLOCK_Q, DEVICE_BLOCK_K = 2048, 2048
"""Rows and keys of a tile elsewhere, where a launch costs more than the memory."""


def unsupported(device: torch.device, problem: Problem | None = None) -> str | None:
    """Why this engine cannot run the problem there: it always can."""
    return None


def logsumexp(support: Support, side: Side, q: Tensor, k: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``(m, ln l)`` of the side's logits, each ``[B, H, Nq]`` of ``dtype``; ``(-inf, 0)`` where a row sees no key."""
    m, ln_l = _rows(q, side.heads, dtype, -torch.inf), _rows(q, side.heads, dtype)
    for head, tiles in _walk(support, side.heads, q.device):
        at = _row_index(head, tiles)
        state = LogSumExp.identity(m[at])
        for tile in tiles:
            x = _masked(_logits(side, q, k, head, tile, dtype), _disallowed(support, tile, q.device))
            state = state.merge(LogSumExp.of_tile(x))
        m[at], ln_l[at] = _finished(state)
    return m, ln_l


def paired_rows(problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor, Normalisers]:
    """The divergence of each row, ``[B, R, Nq]``, head by head (``group == 1``), its mean and its normalisers."""
    a_q, a_k, b_q, b_k = inputs
    dtype, heads = problem.dtype, problem.distributions
    kl, mean = _rows(b_q, heads, dtype), _rows(b_q, heads, dtype)
    norm = Normalisers(*(_rows(b_q, heads, dtype, start) for start in (-torch.inf, 0.0, -torch.inf, 0.0)))
    for r, tiles in _walk(problem.support, heads, b_q.device):
        at = _row_index(r, tiles)
        state = PairedState.identity(kl[at])
        for tile in tiles:
            disallowed = _disallowed(problem.support, tile, b_q.device)
            a = _masked(_logits(problem.a, a_q, a_k, r, tile, dtype), disallowed)
            b = _masked(_logits(problem.b, b_q, b_k, r, tile, dtype), disallowed)
            state = state.merge(PairedState.of_tile(a, b, tile.masked))
        norm.m_a[at], norm.ln_l_a[at] = _finished(LogSumExp(state.m_a, state.l_a))
        norm.m_b[at], norm.ln_l_b[at] = _finished(LogSumExp(state.m_b, state.l_b))
        kl[at] = _or_nan(state.kl(), norm.m_a[at] + norm.m_b[at])
        mean[at] = state.mean()
    return kl, mean, norm


def mixture_rows(problem: Problem, inputs: Inputs, m_a: Tensor, ln_l_a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``(kl, m_b, ln l_b)`` of each row against the mean of its heads of ``a``, whose normalisers are known."""
    b_q, b_k = inputs.b_q, inputs.b_k
    dtype, heads = problem.dtype, problem.distributions
    kl, m_b, ln_l_b = _rows(b_q, heads, dtype), _rows(b_q, heads, dtype, -torch.inf), _rows(b_q, heads, dtype)
    for r, tiles in _walk(problem.support, heads, b_q.device):
        at = _row_index(r, tiles)
        state = MixtureState.identity(kl[at])
        for tile in tiles:
            disallowed = _disallowed(problem.support, tile, b_q.device)
            p = _target(problem, inputs, m_a, ln_l_a, r, tile, disallowed, dtype)
            b = _masked(_logits(problem.b, b_q, b_k, r, tile, dtype), disallowed)
            state = state.merge(MixtureState.of_tile(p, b))
        m_b[at], ln_l_b[at] = _finished(LogSumExp(state.m_b, state.l_b))
        kl[at] = _or_nan(state.kl(), m_b[at])
    return kl, m_b, ln_l_b


def backward(
    problem: Problem,
    inputs: Inputs,
    norm: Normalisers,
    mean: Tensor | None,
    row_grad: Tensor,
    want_a: bool,
    want_b: bool,
) -> Gradients:
    """Gradients of ``sum(row_grad * kl)`` in the inputs' dtypes, one sweep for dQ and dK.

    Side ``a`` can want gradients where ``group == 1``; only then is ``mean`` read.
    """
    a_q, a_k, b_q, b_k = inputs
    dtype = problem.dtype
    grad_a = _SideGradient(problem.a, a_q, a_k, a_q.dtype, dtype) if want_a else None
    grad_b = _SideGradient(problem.b, b_q, b_k, b_q.dtype, dtype) if want_b else None
    for r, tiles in _walk(problem.support, problem.distributions, b_q.device):
        at = _row_index(r, tiles)
        weight = row_grad[at].to(dtype)[:, None]
        for tile in tiles:
            disallowed = _disallowed(problem.support, tile, b_q.device)
            b = _masked(_logits(problem.b, b_q, b_k, r, tile, dtype), disallowed)
            shifted_b = b - norm.m_b[at][:, None]
            if grad_a is None:
                p = _target(problem, inputs, norm.m_a, norm.ln_l_a, r, tile, disallowed, dtype)
            else:
                assert mean is not None, "side a wants gradients where its rows were paired"
                a = _masked(_logits(problem.a, a_q, a_k, r, tile, dtype), disallowed)
                shifted_a = a - norm.m_a[at][:, None]
                p = torch.exp(shifted_a - norm.ln_l_a[at][:, None])
                da = _masked(shifted_a.sub_(shifted_b).sub_(mean[at][:, None]), disallowed, 0.0).mul_(p)
                grad_a.add(a, da, weight, r, tile)
            if grad_b is not None:
                db = _masked(shifted_b.sub_(norm.ln_l_b[at][:, None]).exp_().sub_(p), disallowed, 0.0)
                grad_b.add(b, db, weight, r, tile)
        for grad in filter(None, (grad_a, grad_b)):
            grad.write_rows(at)
    return Gradients(*(grad_a.cast() if grad_a else (None, None)), *(grad_b.cast() if grad_b else (None, None)))


def train(problem: Problem, inputs: Inputs, norm: Normalisers, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``sum(weight * kl)``, its gradients to ``b_q`` and ``b_k``, unrounded, and the mass, in one sweep over ``a``."""
    b_q, b_k = inputs.b_q, inputs.b_k
    dtype = problem.dtype
    kl, mass = (_rows(b_q, problem.distributions, dtype, start) for start in (0.0, 1.0))
    grad_b = _SideGradient(problem.b, b_q, b_k, dtype, dtype)
    for r, tiles in _walk(problem.support, problem.distributions, b_q.device):
        at = _row_index(r, tiles)
        s, acc = torch.zeros_like(kl[at]), torch.zeros_like(kl[at])
        for tile in tiles:
            disallowed = _disallowed(problem.support, tile, b_q.device)
            p = _target(problem, inputs, norm.m_a, norm.ln_l_a, r, tile, disallowed, dtype)
            b = _masked(_logits(problem.b, b_q, b_k, r, tile, dtype), disallowed)
            log_q = (b - norm.m_b[at][:, None]).sub_(norm.ln_l_b[at][:, None])
            tile_s, tile_acc = mixture_sums(p, log_q)
            s, acc = s + tile_s, acc + tile_acc
            db = _masked(log_q.exp_().sub_(p), disallowed, 0.0)
            grad_b.add(b, db, weight[at][:, None], r, tile)
        kl[at], mass[at] = mixture_kl(s, acc, 1.0), torch.where(weight[at] == 0, 1.0, s)
        grad_b.write_rows(at)
    return torch.where(weight != 0, weight * kl, 0.0).sum(), grad_b.q, grad_b.k, mass


class _SideGradient:
    """dQ and dK of one side: dQ is written once a block of rows, dK is added to in the compute dtype."""

    def __init__(self, side: Side, q: Tensor, k: Tensor, q_dtype: torch.dtype, dtype: torch.dtype) -> None:
        self.side, self.q_input, self.k_input = side, q, k
        self.q = torch.zeros(q.shape, dtype=q_dtype, device=q.device)
        self.k = torch.zeros(k.shape, dtype=dtype, device=k.device)
        self.q_rows: Tensor | float = 0.0

    def add(self, x: Tensor, dx: Tensor, weight: Tensor, head: int, tile: Tile) -> None:
        """Adds what one tile contributes, from its logits ``x`` and their unweighted derivative ``dx`` (overwritten).

        Masked pairs and rows of weight 0 add 0 by selection, whatever they hold: ``dx`` is 0 there, and a q or k that
        is not finite, which would make nan of it, is left out of the product. Where such a pair counts, ``dx`` is nan.
        """
        dx.mul_(weight * self.side.scale).masked_fill_(weight == 0, 0.0)
        if self.side.relu:
            dx.masked_fill_(x <= 0, 0.0)
        kv = self.side.kv_head(head)
        q_tile = _finite(_operand(self.q_input[tile.batch, head, tile.rows], dx.dtype))
        k_tile = _finite(_operand(self.k_input[tile.batch, kv, tile.keys], dx.dtype))
        self.k[tile.batch, kv, tile.keys] += torch.matmul(dx.mT, q_tile)
        self.q_rows = torch.matmul(dx, k_tile) + self.q_rows

    def write_rows(self, at: tuple[int, int, slice]) -> None:
        """Ends a block of rows."""
        self.q[at] = self.q_rows
        self.q_rows = 0.0

    def cast(self) -> tuple[Tensor, Tensor]:
        """Both gradients in their inputs' dtypes."""
        return self.q, self.k.to(self.k_input.dtype)


def _walk(support: Support, heads: int, device: torch.device) -> Iterator[tuple[int, list[Tile]]]:
    """Every head and block of live rows, with the tiles that the rows see."""
    blocks = (BLOCK_Q, BLOCK_K) if device.type == "cpu" else (DEVICE_BLOCK_Q, DEVICE_BLOCK_K)
    for seq in support.sequences():
        for head in range(heads):
            for tiles in support.tiles(seq, *blocks):
                yield head, tiles


def _row_index(head: int, tiles: list[Tile]) -> tuple[int, int, slice]:
    """Where a block's rows are in a row vector ``[B, heads, Nq]``."""
    return tiles[0].batch, head, tiles[0].rows


def _logits(side: Side, q: Tensor, k: Tensor, head: int, tile: Tile, dtype: torch.dtype) -> Tensor:
    """The tile's logits, ``[rows, keys]``, before the mask."""
    q_tile = _operand(q[tile.batch, head, tile.rows], dtype)
    k_tile = _operand(k[tile.batch, side.kv_head(head), tile.keys], dtype)
    x = torch.matmul(q_tile, k_tile.mT).mul_(side.scale)
    return x.relu_() if side.relu else x


def _operand(tile: Tensor, dtype: torch.dtype) -> Tensor:
    """A tile of q or k as the products want it: other strides take a slower, less exact way through the library."""
    return tile.to(dtype).contiguous()


def _target(
    problem: Problem,
    inputs: Inputs,
    m_a: Tensor,
    ln_l_a: Tensor,
    r: int,
    tile: Tile,
    disallowed: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """The tile of ``p``: the mean over the heads of ``a`` that distribution ``r`` is compared with."""
    p = None
    for head in range(r * problem.group, (r + 1) * problem.group):
        at = _row_index(head, [tile])
        a = _logits(problem.a, inputs.a_q, inputs.a_k, head, tile, dtype)
        a.sub_(m_a[at][:, None]).sub_(ln_l_a[at][:, None]).exp_()
        p = a if p is None else p.add_(a)
    assert p is not None, "a distribution has at least one head of a"
    return _masked(p.div_(problem.group), disallowed, 0.0)


def _disallowed(support: Support, tile: Tile, device: torch.device) -> Tensor | None:
    """Which pairs of the tile are not allowed, or ``None`` if all are."""
    if not tile.masked:
        return None
    rows = torch.arange(tile.rows.stop - tile.rows.start, device=device)[:, None] + tile.offset
    keys = torch.arange(tile.keys.stop - tile.keys.start, device=device)
    disallowed = torch.zeros((), dtype=torch.bool, device=device)
    if support.right is not None:
        disallowed = disallowed | (keys > rows + support.right)
    if support.left is not None:
        disallowed = disallowed | (keys < rows - support.left)
    return disallowed


def _masked(x: Tensor, disallowed: Tensor | None, value: float = -torch.inf) -> Tensor:
    """``x`` with ``value`` at the pairs that are not allowed, in place."""
    return x if disallowed is None else x.masked_fill_(disallowed, value)


def _finite(x: Tensor) -> Tensor:
    return torch.where(x.isfinite(), x, 0.0)


def _finished(state: LogSumExp) -> tuple[Tensor, Tensor]:
    """``(m, ln l)`` of rows that were visited, and so see a key: if their maximum is -inf, logits overflowed."""
    m, ln_l = state.pair()
    return torch.where(m == -torch.inf, torch.nan, m), ln_l


def _or_nan(kl: Tensor, m: Tensor) -> Tensor:
    """The row losses, nan where a maximum is."""
    return torch.where(m.isnan(), m, kl)


def _rows(q: Tensor, heads: int, dtype: torch.dtype, value: float = 0.0) -> Tensor:
    """A row vector for every head, ``[B, heads, Nq]``."""
    return torch.full((q.shape[0], heads, q.shape[2]), value, dtype=dtype, device=q.device)
