"""The streaming algorithm in plain PyTorch: any device, any dtype, nothing larger than a tile of logits.

Read it beside ``docs/maths.md``: a walk over tiles of rows and keys, a row state (``state.py``) carried along the
keys, and a backward sweep that recomputes each tile from saved row vectors and adds to dQ and dK at once.
Rows that see no key are never visited, so their losses and gradients keep the zeros they were allocated with.

A side's logits of a tile are made of its heads' scores ``[J, rows, keys]``: one head's, or the weighted sum of an
indexer's. Where rows name their keys, a tile's keys are gathered, ``[rows, keys, D]``, and everything else is the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

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

TILES_HELD = 8
"""How many tiles' worth of elements the scores of an indexer's heads, or gathered keys, may take: else fewer rows."""


def unsupported(device: torch.device, problem: Problem | None = None) -> str | None:
    """Why this engine cannot run the problem there: gathered keys are added to in no order on a GPU."""
    if problem is not None and problem.deterministic and problem.support.topk is not None and device.type != "cpu":
        return "is not deterministic with topk_indices on a GPU: rows add to the keys they name in any order"
    return None


def logsumexp(
    support: Support, side: Side, q: Tensor, k: Tensor, w: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """``(m, ln l)`` of the side's logits, ``[B, distributions, Nq]`` of ``dtype``; ``(-inf, 0)`` for a dead row."""
    x = _Operand(side, q, k, w, dtype)
    m, ln_l = _rows(q, side.distributions, dtype, -torch.inf), _rows(q, side.distributions, dtype)
    for head, tiles in _walk(support, side.distributions, q.device, side):
        at = _row_index(head, tiles)
        state = LogSumExp.identity(m[at])
        for tile in tiles:
            place = _place(support, tile, q.device)
            state = state.merge(LogSumExp.of_tile(_masked(x.logits(x.scores(head, place), place), place)))
        m[at], ln_l[at] = _finished(state, _dead(support, tiles))
    return m, ln_l


def paired_rows(problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor, Normalisers]:
    """The divergence of each row, ``[B, R, Nq]``, head by head (``group == 1``), its mean and its normalisers."""
    support, device = problem.support, inputs.b_q.device
    side_a, side_b = _operands(problem, inputs)
    kl, mean, *pairs = (
        _rows(inputs.b_q, problem.distributions, problem.dtype, start)
        for start in (0.0, 0.0, -torch.inf, 0.0, -torch.inf, 0.0)
    )
    norm = Normalisers(*pairs)
    for r, tiles in _walk(support, problem.distributions, device, problem.a, problem.b):
        at = _row_index(r, tiles)
        state = PairedState.identity(kl[at])
        for tile in tiles:
            place = _place(support, tile, device)
            a, b = (_masked(x.logits(x.scores(r, place), place), place) for x in (side_a, side_b))
            state = state.merge(PairedState.of_tile(a, b, tile.masked))
        dead = _dead(support, tiles)
        norm.m_a[at], norm.ln_l_a[at] = _finished(LogSumExp(state.m_a, state.l_a), dead)
        norm.m_b[at], norm.ln_l_b[at] = _finished(LogSumExp(state.m_b, state.l_b), dead)
        kl[at] = _or_nan(state.kl(), norm.m_a[at] + norm.m_b[at])
        mean[at] = state.mean()
    return kl, mean, norm


def mixture_rows(problem: Problem, inputs: Inputs, m_a: Tensor, ln_l_a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``(kl, m_b, ln l_b)`` of each row against the mean of its heads of ``a``, whose normalisers are known."""
    support, device = problem.support, inputs.b_q.device
    side_a, side_b = _operands(problem, inputs)
    kl, m_b, ln_l_b = (
        _rows(inputs.b_q, problem.distributions, problem.dtype, start) for start in (0.0, -torch.inf, 0.0)
    )
    for r, tiles in _walk(support, problem.distributions, device, problem.a, problem.b):
        at = _row_index(r, tiles)
        state = MixtureState.identity(kl[at])
        for tile in tiles:
            place = _place(support, tile, device)
            p = _target(side_a, problem.group, m_a, ln_l_a, r, place)
            b = _masked(side_b.logits(side_b.scores(r, place), place), place)
            state = state.merge(MixtureState.of_tile(p, b))
        m_b[at], ln_l_b[at] = _finished(LogSumExp(state.m_b, state.l_b), _dead(support, tiles))
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
    support, device = problem.support, inputs.b_q.device
    side_a, side_b = _operands(problem, inputs)
    grad_a = _SideGradient(side_a, rounded=True) if want_a else None
    grad_b = _SideGradient(side_b, rounded=True) if want_b else None
    for r, tiles in _walk(support, problem.distributions, device, problem.a, problem.b):
        at = _row_index(r, tiles)
        weight = row_grad[at].to(problem.dtype)[:, None]
        for tile in tiles:
            place = _place(support, tile, device)
            scores_b = side_b.scores(r, place)
            shifted_b = _masked(side_b.logits(scores_b, place), place) - norm.m_b[at][:, None]
            if grad_a is None:
                p = _target(side_a, problem.group, norm.m_a, norm.ln_l_a, r, place)
            else:
                assert mean is not None, "side a wants gradients where its rows were paired"
                scores_a = side_a.scores(r, place)
                shifted_a = _masked(side_a.logits(scores_a, place), place) - norm.m_a[at][:, None]
                p = torch.exp(shifted_a - norm.ln_l_a[at][:, None])
                da = _masked(shifted_a.sub_(shifted_b).sub_(mean[at][:, None]).mul_(p), place, 0.0)
                grad_a.add(scores_a, da, weight, r, place)
            if grad_b is not None:
                db = _masked(shifted_b.sub_(norm.ln_l_b[at][:, None]).exp_().sub_(p), place, 0.0)
                grad_b.add(scores_b, db, weight, r, place)
        for grad in filter(None, (grad_a, grad_b)):
            grad.write_rows(at)
    d_a, d_b = ((None, None, None) if grad is None else grad.cast() for grad in (grad_a, grad_b))
    return Gradients(*d_a[:2], *d_b)


def train(problem: Problem, inputs: Inputs, norm: Normalisers, weight: Tensor) -> tuple[Tensor, Gradients, Tensor]:
    """``sum(weight * kl)``, its gradients to side ``b``, unrounded, and the mass, in one sweep over ``a``."""
    support, device = problem.support, inputs.b_q.device
    side_a, side_b = _operands(problem, inputs)
    kl, mass = (_rows(inputs.b_q, problem.distributions, problem.dtype, start) for start in (0.0, 1.0))
    grad_b = _SideGradient(side_b, rounded=False)
    for r, tiles in _walk(support, problem.distributions, device, problem.a, problem.b):
        at = _row_index(r, tiles)
        s, acc = torch.zeros_like(kl[at]), torch.zeros_like(kl[at])
        for tile in tiles:
            place = _place(support, tile, device)
            p = _target(side_a, problem.group, norm.m_a, norm.ln_l_a, r, place)
            scores = side_b.scores(r, place)
            b = _masked(side_b.logits(scores, place), place)
            log_q = (b - norm.m_b[at][:, None]).sub_(norm.ln_l_b[at][:, None])
            tile_s, tile_acc = mixture_sums(p, log_q)
            s, acc = s + tile_s, acc + tile_acc
            db = _masked(log_q.exp_().sub_(p), place, 0.0)
            grad_b.add(scores, db, weight[at][:, None], r, place)
        kl[at], mass[at] = mixture_kl(s, acc, 1.0), torch.where(weight[at] == 0, 1.0, s)
        grad_b.write_rows(at)
    loss = torch.where(weight != 0, weight * kl, 0.0).sum()
    return loss, Gradients(None, None, grad_b.q, grad_b.k, grad_b.w), mass


class _Place(NamedTuple):
    """Where a tile is: its keys as a slice, or ``[rows, keys]`` of indices; and which pairs of it are not allowed."""

    batch: int
    rows: slice
    keys: slice | Tensor
    disallowed: Tensor | None


class _Operand(NamedTuple):
    """One side with its tensors, and the dtype that it is computed in."""

    side: Side
    q: Tensor
    k: Tensor
    w: Tensor | None
    dtype: torch.dtype

    def heads(self, r: int) -> slice:
        """The query heads that make distribution ``r``."""
        return slice(0, self.side.heads) if self.side.summed else slice(r, r + 1)

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
        """What the heads of distribution ``r`` make of a tile, ``[J, rows, keys]``, before weights and mask."""
        heads = self.heads(r)
        return self.score(self.q_tile(heads, place), self.k_tile(heads.start, place))

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        """The scores ``[heads, rows, keys]`` of queries with the keys that they share."""
        if k.dim() == 2:
            x = torch.mm(q.flatten(0, 1), k.mT).unflatten(0, q.shape[:2])
        else:
            x = torch.bmm(q.transpose(0, 1), k.mT).transpose(0, 1)
        x.mul_(self.side.scale)
        return x.relu_() if self.side.relu else x

    def logits(self, scores: Tensor, place: _Place) -> Tensor:
        """The tile's logits, ``[rows, keys]``, before the mask; of one head, the scores themselves."""
        if not self.side.summed:
            return scores[0]
        return scores.sum(0) if self.w is None else torch.mul(scores, self.w_rows(place)).sum(0)


def _operands(problem: Problem, inputs: Inputs) -> tuple[_Operand, _Operand]:
    a_q, a_k, b_q, b_k, b_w = inputs
    return _Operand(problem.a, a_q, a_k, None, problem.dtype), _Operand(problem.b, b_q, b_k, b_w, problem.dtype)


class _SideGradient:
    """dQ, dK and dW of one side: dQ and dW are written once a block of rows, dK is added to in the compute dtype."""

    def __init__(self, x: _Operand, rounded: bool) -> None:
        self.x = x
        self.q = torch.zeros(x.q.shape, dtype=x.q.dtype if rounded else x.dtype, device=x.q.device)
        self.k = torch.zeros(x.k.shape, dtype=x.dtype, device=x.k.device)
        self.w = None
        if x.w is not None:
            self.w = torch.zeros(x.w.shape, dtype=x.w.dtype if rounded else x.dtype, device=x.w.device)
        self.q_rows: Tensor | float = 0.0
        self.w_rows: Tensor | float = 0.0

    def add(self, scores: Tensor, dx: Tensor, weight: Tensor, r: int, place: _Place) -> None:
        """Adds what a tile contributes, from its scores and its logits' unweighted derivative ``dx`` (overwritten).

        Masked pairs and rows of weight 0 add 0 by selection, whatever they hold: ``dx`` is 0 there, and what is not
        finite, which would make nan of it, is left out of the product. Where such a pair counts, ``dx`` is nan.
        """
        side = self.x.side
        if self.x.w is None:
            dx.mul_(weight * side.scale).masked_fill_(weight == 0, 0.0)
            dx = dx.expand_as(scores) if side.summed else dx[None]
        else:
            dx.mul_(weight).masked_fill_(weight == 0, 0.0)
            self.w_rows = (_finite(scores) * dx).sum(-1) + self.w_rows
            dx = dx * (_finite(self.x.w_rows(place)) * side.scale)
        if side.relu:
            dx = dx.masked_fill(scores <= 0, 0.0)
        heads = self.x.heads(r)
        q_tile, k_tile = _finite(self.x.q_tile(heads, place)), _finite(self.x.k_tile(heads.start, place))
        dk = self.k[place.batch, side.kv_head(heads.start)]
        if isinstance(place.keys, slice):
            dx = dx.reshape(-1, dx.shape[-1])
            dk[place.keys] += torch.mm(dx.mT, q_tile.flatten(0, 1))
            self.q_rows = torch.mm(dx, k_tile).unflatten(0, q_tile.shape[:2]) + self.q_rows
        else:
            dx = dx.transpose(0, 1)  # [rows, J, keys]
            dk.index_add_(0, place.keys.flatten(), torch.bmm(dx.mT, q_tile.transpose(0, 1)).flatten(0, 1))
            self.q_rows = torch.bmm(dx, k_tile).transpose(0, 1) + self.q_rows

    def write_rows(self, at: tuple[int, int, slice]) -> None:
        """Ends a block of rows."""
        batch, r, rows = at
        self.q[batch, self.x.heads(r), rows] = self.q_rows
        if self.w is not None:
            self.w[batch, :, rows] = self.w_rows
        self.q_rows = self.w_rows = 0.0

    def cast(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """The gradients in their inputs' dtypes."""
        return self.q, self.k.to(self.x.k.dtype), self.w


def _walk(support: Support, heads: int, device: torch.device, *sides: Side) -> Iterator[tuple[int, list[Tile]]]:
    """Every head and block of live rows, with the tiles that the rows see."""
    blocks = _blocks(support, device, *sides)
    for seq in support.sequences():
        for head in range(heads):
            for tiles in support.tiles(seq, *blocks, support.list_of(head, heads)):
                yield head, tiles


def _blocks(support: Support, device: torch.device, *sides: Side) -> tuple[int, int]:
    """Rows and keys of a tile: fewer rows where each has many scores or gathered keys, so that scratch is bounded."""
    block_q, block_k = (BLOCK_Q, BLOCK_K) if device.type == "cpu" else (DEVICE_BLOCK_Q, DEVICE_BLOCK_K)
    a_pair = max(side.heads if side.summed else 1 for side in sides)
    if support.topk is not None:
        a_pair = max(a_pair, *(side.dim for side in sides))
    return max(1, min(block_q, TILES_HELD * block_q // a_pair)), block_k


def _row_index(head: int, tiles: list[Tile]) -> tuple[int, int, slice]:
    """Where a block's rows are in a row vector ``[B, heads, Nq]``."""
    return tiles[0].batch, head, tiles[0].rows


def _operand(tile: Tensor, dtype: torch.dtype) -> Tensor:
    """A tile of q or k as the products want it: other strides take a slower, less exact way through the library."""
    return tile.to(dtype).contiguous()


def _target(a: _Operand, group: int, m_a: Tensor, ln_l_a: Tensor, r: int, place: _Place) -> Tensor:
    """The tile of ``p``: the mean over the heads of ``a`` that distribution ``r`` is compared with."""
    p = k_tile = None
    for head in range(r * group, (r + 1) * group):
        if k_tile is None or a.side.kv_head(head) != a.side.kv_head(head - 1):
            k_tile = a.k_tile(head, place)
        x = a.score(a.q_tile(slice(head, head + 1), place), k_tile)[0]
        at = (place.batch, head, place.rows)
        x.sub_(m_a[at][:, None]).sub_(ln_l_a[at][:, None]).exp_()
        p = x if p is None else p.add_(x)
    assert p is not None, "a distribution has at least one head of a"
    return _masked(p.div_(group), place, 0.0)


def _place(support: Support, tile: Tile, device: torch.device) -> _Place:
    if support.topk is not None:
        keys = support.listed_keys(tile)
        return _Place(tile.batch, tile.rows, keys.clamp_min(0), keys < 0)
    return _Place(tile.batch, tile.rows, tile.keys, _disallowed(support, tile, device))


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


def _dead(support: Support, tiles: list[Tile]) -> Tensor | None:
    """Which rows of a block name no key that they may see; ``None`` where rows that see none are not visited."""
    if support.topk is None:
        return None
    dead = None
    for tile in tiles:
        of_tile = (support.listed_keys(tile) < 0).all(-1)
        dead = of_tile if dead is None else dead & of_tile
    return dead


def _masked(x: Tensor, place: _Place, value: float = -torch.inf) -> Tensor:
    """``x`` with ``value`` at the pairs that are not allowed, in place."""
    return x if place.disallowed is None else x.masked_fill_(place.disallowed, value)


def _finite(x: Tensor) -> Tensor:
    return torch.where(x.isfinite(), x, 0.0)


def _finished(state: LogSumExp, dead: Tensor | None) -> tuple[Tensor, Tensor]:
    """``(m, ln l)`` of visited rows: where one that sees a key has a maximum of -inf, logits overflowed."""
    m, ln_l = state.pair()
    overflowed = m == -torch.inf if dead is None else (m == -torch.inf) & ~dead
    return torch.where(overflowed, torch.nan, m), ln_l


def _or_nan(kl: Tensor, m: Tensor) -> Tensor:
    """The row losses, nan where a maximum is."""
    return torch.where(m.isnan(), m, kl)


def _rows(q: Tensor, heads: int, dtype: torch.dtype, value: float = 0.0) -> Tensor:
    """A row vector for every head, ``[B, heads, Nq]``."""
    return torch.full((q.shape[0], heads, q.shape[2]), value, dtype=dtype, device=q.device)
