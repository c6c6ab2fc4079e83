"""The streaming algorithm in plain PyTorch: any device, any dtype, nothing larger than a tile of logits.

Read it beside ``docs/maths.md``: a walk over tiles of rows and keys, a row state (``state.py``) carried along the
keys, and a backward pass that recomputes each tile from saved row vectors and adds to dQ and dK at once. Rows that see
no key are never visited, so their losses and gradients keep the zeros they were allocated with.

A side's logits of a tile are made of its heads' scores ``[J, rows, keys]``: one head's, or the weighted sum of an
indexer's. Selected keys of a tile are gathered, ``[rows, keys, D]``; everything else is the same.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from streamkl.engines.tiled_attention import sparse_attention, sparse_attention_backward
from streamkl.engines.tiled_topk import attention_topk, index_topk_less_lse
from streamkl.problem import Gradients, Inputs, Problem, Side, Support, Tile
from streamkl.state import LogSumExp, MixtureState, PairedState, RowStats, mixture_kl, mixture_sums

__all__ = [
    "attention_topk", "backward", "index_topk", "logsumexp", "mixture_rows", "paired_rows", "sparse_attention",
    "sparse_attention_backward", "train",
]  # fmt: skip

name = "tiled"
summary = "plain PyTorch, runs on any device"

BLOCK_Q, BLOCK_K = 256, 512
"""Rows and keys of a tile on a CPU, where it should stay in the second-level cache."""

DEVICE_BLOCK_Q, DEVICE_BLOCK_K = 2048, 2048
"""Rows and keys of a tile elsewhere, where a launch costs more than the memory."""

TILES_HELD = 8
"""How many tiles' worth of scores an indexer may hold: with more heads, it takes part of a tile's rows at a time."""

GATHERED_Q, GATHERED_K = 8, 4
"""The factors by which tiles of gathered keys are smaller, since each of their pairs needs its own copy of a key."""


def unsupported(device: torch.device, problem: Problem | None = None) -> str | None:
    """Why this engine cannot run the problem there: gradients of gathered keys are added in no order on a GPU."""
    if problem is not None and problem.deterministic and problem.support.topk is not None and device.type != "cpu":
        return "is not deterministic with topk_indices on a GPU: rows add to their selected keys in any order"
    return None


def logsumexp(
    support: Support, side: Side, q: Tensor, k: Tensor, w: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """``(m, ln l)`` of the side's logits, ``[B, distributions, Nq]`` of ``dtype``; ``(-inf, 0)`` for a dead row."""
    x = _Operand(side, q, k, w, dtype)
    m, ln_l = _rows(q, side.distributions, dtype, -torch.inf), _rows(q, side.distributions, dtype)
    for head, tiles in _walk(support, side.distributions, q.device):
        at = _row_index(head, tiles)
        state = LogSumExp.identity(m[at])
        for tile in tiles:
            place = _place(support, tile, q.device)
            state = state.merge(LogSumExp.of_tile(x.tile(head, place)))
        m[at], ln_l[at] = _finished(state, _dead(support, tiles))
    return m, ln_l


def index_topk(
    support: Support,
    side: Side,
    q: Tensor,
    k: Tensor,
    w: Tensor | None,
    normalise: bool,
    sort: bool,
    topk: int,
    query_block: int,
) -> Tensor:
    """The keys of an indexer's highest scores, ``[B, query_blocks, topk]``, always best first; ``w [B, J, Nq]``."""
    lse = None
    if normalise:
        m, ln_l = logsumexp(support, side, q, k, w, torch.promote_types(q.dtype, torch.float32))
        lse = m + ln_l
    return index_topk_less_lse(support, side, q, k, w, lse, topk, query_block)


def paired_rows(problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor, RowStats]:
    """The divergence of each row, ``[B, R, Nq]``, head by head (``head_group == 1``), its mean and its row stats."""
    support, device = problem.support, inputs.b_q.device
    side_a, side_b = _operands(problem, inputs)
    kl, mean, *pairs = (
        _rows(inputs.b_q, problem.distributions, problem.dtype, start)
        for start in (0.0, 0.0, -torch.inf, 0.0, -torch.inf, 0.0)
    )
    stats = RowStats(*pairs)
    for r, tiles in _walk(support, problem.distributions, device):
        at = _row_index(r, tiles)
        state = PairedState.identity(kl[at])
        for tile in tiles:
            place = _place(support, tile, device)
            a, b = side_a.tile(r, place), side_b.tile(r, place)
            state = state.merge(PairedState.of_tile(a, b, place.disallowed))
        dead = _dead(support, tiles)
        stats.m_a[at], stats.ln_l_a[at] = _finished(LogSumExp(state.m_a, state.l_a), dead)
        stats.m_b[at], stats.ln_l_b[at] = _finished(LogSumExp(state.m_b, state.l_b), dead)
        kl[at] = _or_nan(state.kl(), stats.m_a[at] + stats.m_b[at])
        mean[at] = state.mean()
    return kl, mean, stats


def mixture_rows(
    problem: Problem, inputs: Inputs, m_a: Tensor, ln_l_a: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``(kl, m_b, ln l_b, s)`` of each row against the mean of its heads of ``a``, whose row stats are known."""
    support, device = problem.support, inputs.b_q.device
    side_a, side_b = _operands(problem, inputs)
    kl, m_b, ln_l_b, s = (
        _rows(inputs.b_q, problem.distributions, problem.dtype, start) for start in (0.0, -torch.inf, 0.0, 0.0)
    )
    for r, tiles in _walk(support, problem.distributions, device):
        at = _row_index(r, tiles)
        state = MixtureState.identity(kl[at])
        for tile in tiles:
            place = _place(support, tile, device)
            p = _target(problem, side_a, m_a, ln_l_a, r, place)
            state = state.merge(MixtureState.of_tile(p, side_b.tile(r, place), place.disallowed))
        m_b[at], ln_l_b[at] = _finished(LogSumExp(state.m_b, state.l_b), _dead(support, tiles))
        kl[at] = _or_nan(state.kl(), m_b[at])
        s[at] = state.s
    return kl, m_b, ln_l_b, s


def backward(
    problem: Problem,
    inputs: Inputs,
    stats: RowStats,
    mean: Tensor | None,
    row_grad: Tensor,
    want_a: bool,
    want_b: bool,
    round_keys: bool = True,
) -> Gradients:
    """Gradients of ``sum(row_grad * kl)`` in the inputs' dtypes, one pass for dQ and dK.

    Side ``a`` can want gradients where ``head_group == 1``; only then is ``mean`` read. Without ``round_keys``, dK is
    in the dtype of the rows.
    """
    support, device = problem.support, inputs.b_q.device
    side_a, side_b = _operands(problem, inputs)
    grad_a = _SideGradient(side_a, rounded=True) if want_a else None
    grad_b = _SideGradient(side_b, rounded=True) if want_b else None
    grads = [grad for grad in (grad_a, grad_b) if grad is not None]
    for r, tiles in _walk(support, problem.distributions, device):
        at = _row_index(r, tiles)
        weight, m_b, ln_l_b = (x[at].to(problem.dtype)[:, None] for x in (row_grad, stats.m_b, stats.ln_l_b))
        for grad in grads:
            grad.begin(at)
        for tile in tiles:
            place = _place(support, tile, device)
            da = scores_a = None
            if grad_a is None:
                p = _target(problem, side_a, stats.m_a, stats.ln_l_a, r, place)
            else:
                scores_a = side_a.scores(r, place)
                da = _masked(side_a.logits(scores_a, place), place) - stats.m_a[at][:, None]
                p = torch.exp(da - stats.ln_l_a[at][:, None])
            for part in side_b.parts(place):
                scores_b = side_b.scores(r, part)
                db = _masked(side_b.logits(scores_b, part), part) - m_b[part.of_tile]
                if da is not None:
                    da[part.of_tile] -= db
                if grad_b is not None:
                    db = _masked(db.sub_(ln_l_b[part.of_tile]).exp_().sub_(p[part.of_tile]), part, 0.0)
                    grad_b.add(scores_b, db, weight[part.of_tile], r, part)
            if grad_a is not None and da is not None and scores_a is not None:
                assert mean is not None, "side a wants gradients where its rows were paired"
                grad_a.add(scores_a, _masked(da.sub_(mean[at][:, None]).mul_(p), place, 0.0), weight, r, place)
        for grad in grads:
            grad.write_rows(at)
    d_a, d_b = ((None, None, None) if grad is None else grad.cast(round_keys) for grad in (grad_a, grad_b))
    return Gradients(*d_a[:2], *d_b)


def train(problem: Problem, inputs: Inputs, stats: RowStats, weight: Tensor) -> tuple[Tensor, Gradients, Tensor]:
    """``sum(weight * kl)``, its gradients to side ``b``, unrounded, and the mass, in one pass over ``a``."""
    support, device = problem.support, inputs.b_q.device
    side_a, side_b = _operands(problem, inputs)
    kl, mass = (_rows(inputs.b_q, problem.distributions, problem.dtype, start) for start in (0.0, 1.0))
    grad_b = _SideGradient(side_b, rounded=False)
    for r, tiles in _walk(support, problem.distributions, device):
        at = _row_index(r, tiles)
        s, acc = torch.zeros_like(kl[at]), torch.zeros_like(kl[at])
        row_weight, m_b, ln_l_b = (x[at][:, None] for x in (weight, stats.m_b, stats.ln_l_b))
        grad_b.begin(at)
        for tile in tiles:
            place = _place(support, tile, device)
            p = _target(problem, side_a, stats.m_a, stats.ln_l_a, r, place)
            for part in side_b.parts(place):
                rows = part.of_tile
                scores = side_b.scores(r, part)
                log_q = _masked((side_b.logits(scores, part) - m_b[rows]).sub_(ln_l_b[rows]), part, 0.0)
                tile_s, tile_acc = mixture_sums(p[rows], log_q)
                s[rows] += tile_s
                acc[rows] += tile_acc
                grad_b.add(scores, _masked(log_q.exp_().sub_(p[rows]), part, 0.0), row_weight[rows], r, part)
        kl[at], mass[at] = mixture_kl(s, acc, 1.0), torch.where(weight[at] == 0, 1.0, s)
        grad_b.write_rows(at)
    loss = torch.where(weight != 0, weight * kl, 0.0).sum()
    return loss, Gradients(None, None, grad_b.q, grad_b.k, grad_b.w), mass


class _Place(NamedTuple):
    """The place of a tile: its keys as a slice, or ``[rows, keys]`` of indices; and which pairs are not allowed.

    For a part of a tile's rows, ``of_tile`` says which rows they are.
    """

    batch: int
    rows: slice
    keys: slice | Tensor
    disallowed: Tensor | None
    of_tile: slice = slice(None)


class _Operand(NamedTuple):
    """One side with its tensors, and the dtype that it is computed in."""

    side: Side
    q: Tensor
    k: Tensor
    w: Tensor | None
    dtype: torch.dtype

    def heads(self, r: int) -> slice:
        """The query heads that make distribution ``r``."""
        return slice(0, self.side.heads) if self.side.head_summed else slice(r, r + 1)

    def q_tile(self, heads: slice, place: _Place) -> Tensor:
        """Queries of a tile, ``[heads, rows, D]``."""
        return _operand(self.q[place.batch, heads, place.rows], self.dtype)

    def k_tile(self, head: int, place: _Place) -> Tensor:
        """The keys that a head reads, ``[keys, D]``, or gathered ``[rows, keys, D]``."""
        k = self.k[place.batch, self.side.kv_head(head)]
        if isinstance(place.keys, slice):
            return _operand(k[place.keys], self.dtype)
        return _operand(k.index_select(0, place.keys.flatten()).unflatten(0, place.keys.shape), self.dtype)

    def w_rows(self, place: _Place) -> Tensor:
        """The weights of an indexer's heads, ``[J, rows, 1]``."""
        assert self.w is not None
        return self.w[place.batch, :, place.rows, None].to(self.dtype)

    def scores(self, r: int, place: _Place) -> Tensor:
        """The scores of the heads of distribution ``r`` on a tile, ``[J, rows, keys]``, before weights and mask."""
        heads = self.heads(r)
        return self.score(self.q_tile(heads, place), self.k_tile(heads.start, place))

    def parts(self, place: _Place) -> Iterator[_Place]:
        """The tile, or parts of its rows in which the scores of all heads are not too many.

        Tiles are cut, not made smaller, so that the other side's products are bit-equal in every pass.
        """
        first, last = place.rows.start, place.rows.stop
        step = max(1, TILES_HELD * _block(self.q.device)[0] // self.side.heads)
        if not self.side.head_summed or isinstance(place.keys, Tensor) or last - first <= step:
            yield place
            return
        for i in range(first, last, step):
            rows = slice(i, min(i + step, last))
            of_tile = slice(i - first, rows.stop - first)
            disallowed = None if place.disallowed is None else place.disallowed[of_tile]
            yield _Place(place.batch, rows, place.keys, disallowed, of_tile)

    def tile(self, r: int, place: _Place) -> Tensor:
        """The tile's logits, ``[rows, keys]``, ``-inf`` where masked."""
        parts = [_masked(self.logits(self.scores(r, part), part), part) for part in self.parts(place)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        """The scores ``[heads, rows, keys]`` of queries with the keys that the heads share."""
        if k.dim() == 2:
            x = torch.mm(q.flatten(0, 1), k.mT).unflatten(0, q.shape[:2])
        else:
            x = torch.bmm(q.transpose(0, 1).contiguous(), k.mT).transpose(0, 1)
        x.mul_(self.side.scale)
        return x.relu_() if self.side.relu else x

    def logits(self, scores: Tensor, place: _Place) -> Tensor:
        """The tile's logits, ``[rows, keys]``, before the mask; for one head, the scores themselves."""
        if not self.side.head_summed:
            return scores[0]
        # One by one: the order of a reduction depends on the tile's shape, and two passes must be bit-equal.
        x = torch.zeros_like(scores[0])
        for score, w in zip(scores, itertools.repeat(1.0) if self.w is None else self.w_rows(place), strict=False):
            x += score * w
        return x


def _operands(problem: Problem, inputs: Inputs) -> tuple[_Operand, _Operand]:
    a_q, a_k, b_q, b_k, b_w = inputs
    return _Operand(problem.a, a_q, a_k, None, problem.dtype), _Operand(problem.b, b_q, b_k, b_w, problem.dtype)


class _SideGradient:
    """dQ, dK and dW of one side: dQ and dW are written once per block of rows, dK is summed in the compute dtype."""

    def __init__(self, x: _Operand, rounded: bool) -> None:
        self.x = x
        self.q = torch.zeros(x.q.shape, dtype=x.q.dtype if rounded else x.dtype, device=x.q.device)
        self.k = torch.zeros(x.k.shape, dtype=x.dtype, device=x.k.device)
        self.w = None
        if x.w is not None:
            self.w = torch.zeros(x.w.shape, dtype=x.w.dtype if rounded else x.dtype, device=x.w.device)

    def begin(self, at: tuple[int, int, slice]) -> None:
        """Begins a block of rows."""
        heads, rows, dtype = self.x.heads(at[1]), at[2], self.x.dtype
        shape = (heads.stop - heads.start, rows.stop - rows.start)
        self.q_rows = torch.zeros(*shape, self.x.q.shape[3], dtype=dtype, device=self.q.device)
        self.w_rows = torch.zeros(shape, dtype=dtype, device=self.q.device)

    def add(self, scores: Tensor, dx: Tensor, weight: Tensor, r: int, place: _Place) -> None:
        """Adds what a tile contributes, from its scores and its logits' unweighted derivative ``dx`` (overwritten).

        Masked pairs and rows of weight 0 add exactly 0, whatever they hold: ``dx`` is 0 there, and operands that are
        not finite, whose product with 0 is nan, are taken as 0. Where such a pair counts, ``dx`` is nan.
        """
        side = self.x.side
        if self.x.w is None:
            dx.mul_(weight * side.scale).masked_fill_(weight == 0, 0.0)
            dx = dx.expand_as(scores) if side.head_summed else dx[None]
        else:
            dx.mul_(weight).masked_fill_(weight == 0, 0.0)
            self.w_rows[:, place.of_tile] += (_finite(scores) * dx).sum(-1)
            dx = dx * (_finite(self.x.w_rows(place)) * side.scale)
        if side.relu:
            dx = dx.masked_fill(scores <= 0, 0.0)
        heads = self.x.heads(r)
        q_tile, k_tile = _finite(self.x.q_tile(heads, place)), _finite(self.x.k_tile(heads.start, place))
        dk = self.k[place.batch, side.kv_head(heads.start)]
        if isinstance(place.keys, slice):
            dx = dx.reshape(-1, dx.shape[-1])
            dk[place.keys] += torch.mm(dx.mT, q_tile.flatten(0, 1))
            self.q_rows[:, place.of_tile] += torch.mm(dx, k_tile).unflatten(0, q_tile.shape[:2])
        else:
            dx = dx.transpose(0, 1)  # [rows, J, keys]
            dk.index_add_(0, place.keys.flatten(), torch.bmm(dx.mT, q_tile.transpose(0, 1)).flatten(0, 1))
            self.q_rows += torch.bmm(dx, k_tile).transpose(0, 1)

    def write_rows(self, at: tuple[int, int, slice]) -> None:
        """Ends a block of rows."""
        batch, r, rows = at
        self.q[batch, self.x.heads(r), rows] = self.q_rows
        if self.w is not None:
            self.w[batch, :, rows] = self.w_rows

    def cast(self, keys: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """The gradients in their inputs' dtypes; dK only if ``keys`` says so."""
        return self.q, self.k.to(self.x.k.dtype) if keys else self.k, self.w


def _walk(support: Support, heads: int, device: torch.device) -> Iterator[tuple[int, list[Tile]]]:
    """Every head and block of live rows, with the tiles that the rows see."""
    block_q, block_k = _block(device)
    if support.topk is not None:
        block_q, block_k = max(1, block_q // GATHERED_Q), max(1, block_k // GATHERED_K)
    for seq in support.sequences():
        for head in range(heads):
            for tiles in support.tiles(seq, block_q, block_k, support.topk_head(head, heads)):
                yield head, tiles


def _block(device: torch.device) -> tuple[int, int]:
    """Rows and keys of a tile."""
    return (BLOCK_Q, BLOCK_K) if device.type == "cpu" else (DEVICE_BLOCK_Q, DEVICE_BLOCK_K)


def _row_index(head: int, tiles: list[Tile]) -> tuple[int, int, slice]:
    """The index of a block's rows in a row vector ``[B, heads, Nq]``."""
    return tiles[0].batch, head, tiles[0].rows


def _operand(tile: Tensor, dtype: torch.dtype) -> Tensor:
    """A tile of q or k as the products need it: for other strides the library is slower and less exact."""
    return tile.to(dtype).contiguous()


def _target(problem: Problem, a: _Operand, m_a: Tensor, ln_l_a: Tensor, r: int, place: _Place) -> Tensor:
    """The tile of ``p``: the mean over the heads of ``a`` that distribution ``r`` is compared with, of the best run."""
    heads = problem.head_group // problem.runs
    runs = (
        _run_mean(a, range(first, first + heads), m_a, ln_l_a, place)
        for first in range(r * problem.head_group, (r + 1) * problem.head_group, heads)
    )
    return _masked(functools.reduce(torch.maximum, runs), place, 0.0)


def _run_mean(a: _Operand, heads: range, m_a: Tensor, ln_l_a: Tensor, place: _Place) -> Tensor:
    """The mean over heads of ``a``, ``[rows, keys]``, before the mask."""
    p = k_tile = None
    for head in heads:
        if k_tile is None or a.side.kv_head(head) != a.side.kv_head(head - 1):
            k_tile = a.k_tile(head, place)
        x = a.score(a.q_tile(slice(head, head + 1), place), k_tile)[0]
        at = (place.batch, head, place.rows)
        x.sub_(m_a[at][:, None]).sub_(ln_l_a[at][:, None]).exp_()
        p = x if p is None else p.add_(x)
    assert p is not None, "a distribution has at least one head of a"
    return p.div_(len(heads))


def _place(support: Support, tile: Tile, device: torch.device) -> _Place:
    if support.topk is not None:
        keys = support.selected_keys(tile)
        return _Place(tile.batch, tile.rows, keys.clamp_min(0), keys < 0)
    return _Place(tile.batch, tile.rows, tile.keys, support.disallowed(tile, device))


def _dead(support: Support, tiles: list[Tile]) -> Tensor | None:
    """Which rows of a block see none of their selected keys; ``None`` where dead rows are not visited."""
    if support.topk is None:
        return None
    dead = None
    for tile in tiles:
        of_tile = (support.selected_keys(tile) < 0).all(-1)
        dead = of_tile if dead is None else dead & of_tile
    return dead


def _masked(x: Tensor, place: _Place, value: float = -torch.inf) -> Tensor:
    """``x`` with ``value`` at the pairs that are not allowed, in place."""
    return x if place.disallowed is None else x.masked_fill_(place.disallowed, value)


def _finite(x: Tensor) -> Tensor:
    return torch.where(x.isfinite(), x, 0.0)


def _finished(state: LogSumExp, dead: Tensor | None) -> tuple[Tensor, Tensor]:
    """``(m, ln l)`` of visited rows: where one that sees a key has a row max of -inf, logits overflowed."""
    m, ln_l = state.pair()
    overflowed = m == -torch.inf if dead is None else (m == -torch.inf) & ~dead
    return torch.where(overflowed, torch.nan, m), ln_l


def _or_nan(kl: Tensor, m: Tensor) -> Tensor:
    """The row losses, nan where the row max is nan."""
    return torch.where(m.isnan(), m, kl)


def _rows(q: Tensor, heads: int, dtype: torch.dtype, value: float = 0.0) -> Tensor:
    """A row vector for every head, ``[B, heads, Nq]``."""
    return torch.full((q.shape[0], heads, q.shape[2]), value, dtype=dtype, device=q.device)
