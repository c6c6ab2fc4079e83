"""Plots of a run: what is drawn, and what would say nothing is not."""

import pytest

pytest.importorskip("matplotlib")

from streamkl.evaluation import plots
from streamkl.evaluation.methods import DENSE, Method
from streamkl.evaluation.statistics import Estimate
from streamkl.evaluation.summary import Figure, Gap

ORACLE = [Method("oracle", topk, block) for topk in (256, 512) for block in (1, 64)]


def gap(task: str, half: float) -> Gap:
    return Gap("oracle", task, 2048, 256, 1, "dense", ORACLE[0].name, Estimate(1.0, 1.0 - half, 1.0 + half))


def titles(picture) -> list[str]:
    return [axes.get_title() for axes in picture.axes]


def test_gaps_of_a_rate_are_drawn_with_contexts_enough_to_tell() -> None:
    few, many, passages = gap("needle", 24.0), gap("needle", 9.0), gap("perplexity", 0.5)
    for gaps, drawn in (([many, passages], ["needle", "perplexity"]), ([few, passages], ["perplexity"])):
        picture = plots.gap_bars(gaps)
        assert picture is not None
        assert titles(picture) == drawn
    assert plots.gap_bars([few]) is None


def test_markers_of_methods_that_answer_alike_are_apart() -> None:
    right, level = Estimate(1.0, 0.75, 1.0), Estimate(0.0, -0.1, 0.1)
    figures = [Figure("needle", 8192, method, 12, right, level, None, 1.0) for method in (DENSE, *ORACLE)]
    picture = plots.frontier(figures)
    assert picture is not None
    (axes,) = picture.axes
    lines = [line for line in axes.lines if line.get_marker() in ("o", "s")]
    assert len({line.get_ydata()[0] for line in lines}) == len(lines) == 2
