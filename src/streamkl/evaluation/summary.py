"""Summary of records: the figures of every method, and three gaps."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable
from typing import Any, NamedTuple

from streamkl.evaluation.methods import DENSE, Method
from streamkl.evaluation.records import Record
from streamkl.evaluation.statistics import Estimate, mean, paired_difference, wilson

Found = dict[int, dict[str, Any]]
"""The measured values, by the number of the context."""


class Figure(NamedTuple):
    """One method on one task of one length.

    Attributes:
        task: The task.
        length: Tokens of a context.
        method: The method.
        contexts: How many it was run on.
        quality: The rate of right answers, from 0 to 1, or the perplexity.
        change: Against dense attention on the same contexts: the difference of rates, or the relative increase of the
            perplexity.
        change_last: The same for perplexity, on only the last row of each query block; ``None`` for rates.
        seconds: The median time of a prefill.
    """

    task: str
    length: int
    method: Method
    contexts: int
    quality: Estimate
    change: Estimate
    change_last: Estimate | None
    seconds: float


class Gap(NamedTuple):
    """The loss from one method to another, positive for a loss: points of rates, or percent of perplexity.

    Attributes:
        kind: ``oracle`` (the budget), ``indexer`` (the prediction) or ``realization`` (the query block).
        task: The task.
        length: Tokens of a context.
        topk: The budget.
        query_block: Of the worse method.
        better: The method that it is compared with.
        worse: The method that loses.
        loss: How much, in percent.
    """

    kind: str
    task: str
    length: int
    topk: int
    query_block: int
    better: str
    worse: str
    loss: Estimate


class LayerFigure(NamedTuple):
    """Means over contexts of a method's recall and attention mass, by the number of the layer."""

    length: int
    method: Method
    contexts: int
    recall: dict[int, float]
    mass: dict[int, float]


def method_of(name: str) -> Method:
    """The method of a name.

    Examples:
        >>> from streamkl.evaluation.summary import method_of
        >>> method_of("oracle k256 b64")
        Method(selector='oracle', topk=256, query_block=64)
    """
    found = re.fullmatch(r"(.+) k(\d+) b(\d+)", name)
    return DENSE if found is None else Method(found[1], int(found[2]), int(found[3]))


def figures(records: Iterable[Record]) -> list[Figure]:
    """One figure per task, length and method, in the order of tasks and lengths."""
    found = _grouped(records)
    return [
        _figure(task, length, method, mine, found.get((task, length, DENSE), {}))
        for (task, length, method), mine in found.items()
    ]


def gaps(records: Iterable[Record]) -> list[Gap]:
    """Every gap whose two methods were run on the same contexts."""
    found = _grouped(records)
    made = []
    for task, length, method in found:
        for kind, better in _pairs(method):
            if (task, length, better) in found:
                worse, other = found[task, length, method], found[task, length, better]
                lost = _change(worse, other).scaled(100.0 if task == "perplexity" else -100.0)
                made.append(Gap(kind, task, length, method.topk, method.query_block, better.name, method.name, lost))
    return made


def layer_figures(records: Iterable[Record]) -> list[LayerFigure]:
    """One figure per length and method whose layers were measured."""
    found: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for record in records:
        if record.task == "layers":
            found.setdefault((record.length, record.method), []).append(record.found)
    return [
        LayerFigure(length, method_of(name), len(each), _means(each, "recall"), _means(each, "mass"))
        for (length, name), each in found.items()
    ]


def _grouped(records: Iterable[Record]) -> dict[tuple[str, int, Method], Found]:
    found: dict[tuple[str, int, Method], Found] = {}
    for record in records:
        if record.task != "layers":
            key = record.task, record.length, method_of(record.method)
            found.setdefault(key, {})[record.number] = record.found
    return found


def _figure(task: str, length: int, method: Method, mine: Found, dense: Found) -> Figure:
    seconds = statistics.median(found["seconds"] for found in mine.values())
    if "right" in next(iter(mine.values())):
        quality, last = wilson(sum(found["right"] for found in mine.values()), len(mine)), None
    else:
        rates = mean([found["nll"] / found["tokens"] for found in mine.values()])
        quality, last = Estimate(*map(_exp, rates)), _change(mine, dense, "_last")
    return Figure(task, length, method, len(mine), quality, _change(mine, dense), last, seconds)


def _change(mine: Found, other: Found, which: str = "") -> Estimate:
    """The change from ``other`` to ``mine`` on the contexts of both: of rates, or relative of perplexity."""
    both = sorted(mine.keys() & other.keys())
    if both and "right" in mine[both[0]]:
        return paired_difference([mine[n]["right"] for n in both], [other[n]["right"] for n in both])
    counted = [n for n in both if mine[n][f"tokens{which}"]]
    differences = [(mine[n][f"nll{which}"] - other[n][f"nll{which}"]) / mine[n][f"tokens{which}"] for n in counted]
    return Estimate(*(_exp(x) - 1 for x in mean(differences)))


def _pairs(method: Method) -> list[tuple[str, Method]]:
    """The gaps in which a method is the worse one, with the better method of each."""
    if method == DENSE or method.selector in ("window", "random"):
        return []
    pairs = []
    if method.selector != "oracle":
        pairs.append(("indexer", method._replace(selector="oracle")))
    elif method.query_block == 1:
        pairs.append(("oracle", DENSE))
    if method.query_block > 1:
        pairs.append(("realization", method._replace(query_block=1)))
    return pairs


def _means(each: list[dict[str, Any]], name: str) -> dict[int, float]:
    return {int(layer): statistics.fmean(found[name][layer] for found in each) for layer in each[0][name]}


def _exp(x: float) -> float:
    return math.inf if x > 700 else math.exp(x)
