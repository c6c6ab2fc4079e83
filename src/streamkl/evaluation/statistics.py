"""Intervals of 95%: of a rate, of the difference of two rates on the same contexts, and of a mean."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

Z = 1.959964
STUDENT = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""Student's quantiles of 1, 2, ... degrees of freedom."""


class Estimate(NamedTuple):
    """A value and its interval."""

    value: float
    low: float
    high: float

    def scaled(self, factor: float) -> Estimate:
        """In other units; a negative factor turns it around."""
        low, high = sorted((self.low * factor, self.high * factor))
        return Estimate(self.value * factor + 0.0, low, high)  # no negative zero


def wilson(right: int, count: int) -> Estimate:
    """A rate, with Wilson's interval: it stays within 0 and 1, and is one where all answers are right.

    Examples:
        >>> from streamkl.evaluation.statistics import wilson
        >>> [round(x, 3) for x in wilson(20, 20)]
        [1.0, 0.839, 1.0]
    """
    if not count:
        return Estimate(math.nan, 0.0, 1.0)
    rate, square = right / count, Z * Z
    middle = (rate + square / (2 * count)) / (1 + square / count)
    half = Z / (1 + square / count) * math.sqrt(rate * (1 - rate) / count + square / (4 * count * count))
    return Estimate(rate, max(0.0, min(rate, middle - half)), min(1.0, max(rate, middle + half)))


def paired_difference(first: Sequence[bool], second: Sequence[bool]) -> Estimate:
    """The rate of ``first`` minus that of ``second``, on the same contexts: Newcombe's interval for pairs (1998).

    It joins the two Wilson intervals, and is narrower the more the pairs agree.

    Examples:
        >>> from streamkl.evaluation.statistics import paired_difference
        >>> [round(x, 3) for x in paired_difference([True] * 18 + [False] * 2, [True] * 20)]
        [-0.1, -0.301, 0.077]
    """
    pairs, count = list(zip(first, second, strict=True)), len(first)
    if not count:
        return Estimate(math.nan, -1.0, 1.0)
    a, b = wilson(sum(first), count), wilson(sum(second), count)
    both, neither = pairs.count((True, True)), pairs.count((False, False))
    only_a, only_b = pairs.count((True, False)), pairs.count((False, True))
    product = (both + only_a) * (only_b + neither) * (both + only_b) * (only_a + neither)
    phi = 0.0
    if product:
        covered = both * neither - only_a * only_b
        if covered > 0:
            covered = max(covered - count / 2, 0.0)
        phi = covered / math.sqrt(product)
    down, up = (a.value - a.low, b.high - b.value), (a.high - a.value, b.value - b.low)
    difference = a.value - b.value

    def joined(x: float, y: float) -> float:
        return math.sqrt(max(0.0, x * x - 2 * phi * x * y + y * y))

    return Estimate(difference, max(-1.0, difference - joined(*down)), min(1.0, difference + joined(*up)))


def mean(values: Sequence[float]) -> Estimate:
    """A mean, with Student's interval; without one, ``-inf`` to ``inf``, where there are fewer than two values."""
    if not values:
        return Estimate(math.nan, -math.inf, math.inf)
    middle = statistics.fmean(values)
    if len(values) < 2:
        return Estimate(middle, -math.inf, math.inf)
    half = _student(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Estimate(middle, middle - half, middle + half)


def crossed_mean(rows: Sequence[Sequence[float]]) -> Estimate:
    """A mean over two things that are both samples, such as seeds and texts, with Student's interval.

    The variances of the means of rows and of columns add up, which is slightly too wide, with Satterthwaite's degrees
    of freedom. One row has the interval of its columns.

    Examples:
        >>> from streamkl.evaluation.statistics import crossed_mean
        >>> [round(x, 1) for x in crossed_mean([[1.0, 2.0, 3.0], [1.2, 2.2, 3.2]])]
        [2.1, -0.4, 4.6]
    """
    columns = [statistics.fmean(values) for values in zip(*rows, strict=True)]
    if len(rows) < 2 or len(columns) < 2:
        return mean(columns)
    parts = [
        (statistics.variance(means) / len(means), len(means) - 1)
        for means in (columns, [statistics.fmean(row) for row in rows])
    ]
    middle, variance = statistics.fmean(columns), sum(part for part, _ in parts)
    freedom = variance**2 / sum(part**2 / freedom for part, freedom in parts) if variance else 1
    half = _student(int(freedom)) * math.sqrt(variance)
    return Estimate(middle, middle - half, middle + half)


def _student(freedom: int) -> float:
    """Student's quantile; beyond the table by the first terms of its expansion, to the fourth digit."""
    if freedom <= len(STUDENT):
        return STUDENT[freedom - 1]
    first, second = (Z**3 + Z) / 4, (5 * Z**5 + 16 * Z**3 + 3 * Z) / 96
    return Z + first / freedom + second / freedom**2
