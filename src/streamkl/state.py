"""The mergeable row states: what a row remembers of the keys it has seen so far.

Row vectors are ``[...]``, tiles of logits ``[..., keys]``, ``-inf`` at pairs that are not allowed. Two states of
disjoint sets of keys merge in any order, so tiles, split keys, threads and ranks all use one formula.
The derivations are in ``docs/maths.md``.

At an allowed pair, a logit of ``-inf`` of side ``a`` is a probability of 0 and adds 0. One of side ``b`` makes ``acc``
inf or nan, whatever the probability, since every term is a product that is not selected away.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def _finite(m: Tensor) -> Tensor:
    """A row that has seen no key has maximum ``-inf``; 0 in its place keeps ``-inf - m`` from being nan."""
    return torch.where(m == -torch.inf, 0.0, m)


def _decay(m: Tensor, merged: Tensor) -> Tensor:
    """The factor ``e^(m - merged)`` by which sums relative to ``m`` shrink; 0 for a row that has seen no key."""
    return torch.exp(m - _finite(merged))


class LogSumExp(NamedTuple):
    """Maximum ``m`` and ``l = sum e^(x - m)`` of the logits of one side."""

    m: Tensor
    l: Tensor

    @classmethod
    def identity(cls, like: Tensor) -> LogSumExp:
        """The state of rows that have seen no key, one for each element of the row vector ``like``."""
        none, zero = torch.full_like(like, -torch.inf), torch.zeros_like(like)
        return cls(none, zero)

    @classmethod
    def of_tile(cls, x: Tensor) -> LogSumExp:
        """The state after one tile of logits."""
        m = x.amax(-1)
        return cls(m, torch.exp(x - _finite(m)[..., None]).sum(-1))

    def merge(self, other: LogSumExp) -> LogSumExp:
        """The state after the keys of both."""
        m = torch.maximum(self.m, other.m)
        return LogSumExp(m, self.l * _decay(self.m, m) + other.l * _decay(other.m, m))

    def pair(self) -> tuple[Tensor, Tensor]:
        """``(m, ln l)``, whose sum is the log-sum-exp; ``(-inf, 0)`` for a row that has seen no key."""
        return self.m, torch.where(self.l != 0, torch.log(self.l), 0.0)


class PairedState(NamedTuple):
    """Five numbers per row, in the relative form, for one head of ``a`` against one of ``b``.

    ``m_a, l_a`` and ``m_b, l_b`` are each side's log-sum-exp; ``acc = sum e^(a - m_a) [(a - m_a) - (b - m_b)]``.
    """

    m_a: Tensor
    l_a: Tensor
    m_b: Tensor
    l_b: Tensor
    acc: Tensor

    @classmethod
    def identity(cls, like: Tensor) -> PairedState:
        """The state of rows that have seen no key, one for each element of the row vector ``like``."""
        none, zero = torch.full_like(like, -torch.inf), torch.zeros_like(like)
        return cls(none, zero, none, zero, zero)

    @classmethod
    def of_tile(cls, a: Tensor, b: Tensor, disallowed: Tensor | None = None) -> PairedState:
        """The state after one tile of both sides' logits, ``-inf`` at the pairs that are ``disallowed``."""
        m_a, m_b = a.amax(-1), b.amax(-1)
        a = a - _finite(m_a)[..., None]
        b = b - _finite(m_b)[..., None]
        weight = torch.exp(a)
        difference = a.clamp_(min=torch.finfo(a.dtype).min).sub_(b)
        if disallowed is not None:
            difference.masked_fill_(disallowed, 0.0)
        acc = difference.mul_(weight).sum(-1)
        return cls(m_a, weight.sum(-1), m_b, torch.exp_(b).sum(-1), acc)

    def merge(self, other: PairedState) -> PairedState:
        """The state after the keys of both."""
        m_a, m_b = torch.maximum(self.m_a, other.m_a), torch.maximum(self.m_b, other.m_b)
        l_a = l_b = acc = torch.zeros_like(self.acc)
        for part in (self, other):
            alpha, beta = _decay(part.m_a, m_a), _decay(part.m_b, m_b)
            shift = (part.m_a - m_a) - (part.m_b - m_b)
            acc = acc + torch.where(part.l_a != 0, alpha * (part.acc + part.l_a * shift), part.acc)
            l_a = l_a + alpha * part.l_a
            l_b = l_b + beta * part.l_b
        return PairedState(m_a, l_a, m_b, l_b, acc)

    def mean(self) -> Tensor:
        """The mean under ``P`` of ``(a - m_a) - (b - m_b)``: the divergence without its logarithms."""
        return torch.where(self.l_a != 0, self.acc / self.l_a, self.acc)

    def kl(self) -> Tensor:
        """The divergence of each row; exactly 0 for a row that has seen no key."""
        return torch.where(self.l_a != 0, self.mean() + torch.log(self.l_b / self.l_a), self.acc)


class MixtureState(NamedTuple):
    """Four numbers per row, for a target ``p`` known up to a factor per row, against one head of ``b``.

    ``m_b, l_b`` are the log-sum-exp of ``b``, ``s = sum p`` and ``acc = sum p [ln p - (b - m_b)]``.
    """

    m_b: Tensor
    l_b: Tensor
    s: Tensor
    acc: Tensor

    @classmethod
    def identity(cls, like: Tensor) -> MixtureState:
        """The state of rows that have seen no key, one for each element of the row vector ``like``."""
        none, zero = torch.full_like(like, -torch.inf), torch.zeros_like(like)
        return cls(none, zero, zero, zero)

    @classmethod
    def of_tile(cls, p: Tensor, b: Tensor, disallowed: Tensor | None = None) -> MixtureState:
        """The state after one tile of the target and of the logits of ``b``: 0 and ``-inf`` where ``disallowed``."""
        m_b = b.amax(-1)
        b = b - _finite(m_b)[..., None]
        l_b = torch.exp(b).sum(-1)
        if disallowed is not None:
            b.masked_fill_(disallowed, 0.0)
        return cls(m_b, l_b, *mixture_sums(p, b))

    def merge(self, other: MixtureState) -> MixtureState:
        """The state after the keys of both."""
        m_b = torch.maximum(self.m_b, other.m_b)
        l_b = s = acc = torch.zeros_like(self.acc)
        for part in (self, other):
            acc = acc + torch.where(part.s != 0, part.acc + part.s * (m_b - part.m_b), part.acc)
            l_b = l_b + part.l_b * _decay(part.m_b, m_b)
            s = s + part.s
        return MixtureState(m_b, l_b, s, acc)

    def kl(self) -> Tensor:
        """The divergence of each row; exactly 0 for a row that has seen no key."""
        return mixture_kl(self.s, self.acc, self.l_b)


class RowStats(NamedTuple):
    """The row stats of both sides for a backward pass: row max ``m`` and ``ln`` of the row sum, ``[B, heads, Nq]``.

    Kept as pairs: their sum, the log-sum-exp, would round away the digits that a large offset has shifted out.
    """

    m_a: Tensor
    ln_l_a: Tensor
    m_b: Tensor
    ln_l_b: Tensor


def relative_to_first_head(ln_l: Tensor, group: int) -> Tensor:
    """``ln l [B, H, Nq]`` less that of the first head of each group.

    The divergence from a mixture depends on ratios of ``p`` alone. Normalised so, ``s`` is of the size of ``l_b``, and
    the logarithm of their ratio cancels no digits.
    """
    groups = ln_l.unflatten(1, (-1, group))
    return (groups - groups[:, :, :1]).flatten(1, 2)


def mixture_sums(p: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """``(sum p, sum p [ln p - b])`` of a tile, where ``p = 0`` contributes 0 if ``b`` is finite."""
    return p.sum(-1), p.clamp(min=torch.finfo(p.dtype).tiny).log_().sub_(b).mul_(p).sum(-1)


def mixture_kl(s: Tensor, acc: Tensor, l_b: Tensor | float) -> Tensor:
    """``acc / s + ln(l_b / s)``: dividing by ``s`` absorbs any factor of ``p``, and so a rounded teacher LSE."""
    return torch.where(s != 0, acc / s + torch.log(l_b / s), acc)
