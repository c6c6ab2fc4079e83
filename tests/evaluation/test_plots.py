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


@pytest.mark.parametrize("draw", [plots.frontier, plots.quality])
def test_markers_of_methods_that_answer_alike_are_apart_sideways_and_as_high_as_was_measured(draw) -> None:
    right, level = Estimate(1.0, 0.75, 1.0), Estimate(0.0, -0.1, 0.1)
    figures = [Figure("needle", 8192, method, 12, right, level, None, 1.0) for method in (DENSE, *ORACLE)]
    picture = draw(figures)
    assert picture is not None
    picture.draw_without_rendering()
    (axes,) = picture.axes
    lines = [line for line in axes.lines if line.get_marker() in ("o", "s")]
    places = [line.get_transform().transform(line.get_xydata()) for line in lines]
    assert len({round(place[0][0], 3) for place in places}) == len(lines) == 2
    for line, place in zip(lines, places, strict=True):
        assert axes.transData.inverted().transform(place)[:, 1] == pytest.approx([100.0, 100.0])
        widest = abs(place - axes.transData.transform(line.get_xydata()))[:, 0].max() * 72 / picture.dpi
        assert widest == pytest.approx(plots.APART / 2)
    intervals = [line for line in axes.lines if list(line.get_ydata()) == [75.0, 100.0]]
    assert len(intervals) == len(ORACLE)
    for interval in intervals:
        drawn = interval.get_transform().transform(interval.get_xydata())
        assert axes.transData.inverted().transform(drawn)[:, 1] == pytest.approx([75.0, 100.0])


def test_the_axes_hold_all_that_is_drawn() -> None:
    worse = Estimate(0.2, 0.1, 0.3)
    figures = [Figure("perplexity", 8192, method, 12, worse, worse, None, 1.0) for method in ORACLE]
    for picture in (plots.frontier(figures), plots.quality(figures)):
        assert picture is not None
        picture.draw_without_rendering()
        (axes,) = picture.axes
        low, high = axes.get_ylim()
        assert low <= 10.0 < 30.0 <= high
