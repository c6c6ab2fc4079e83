"""Plots of a run. Needs matplotlib, from the ``bench`` extra."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture
from matplotlib.font_manager import FontProperties
from matplotlib.transforms import ScaledTranslation, Transform

from streamkl.evaluation.methods import DENSE, Method
from streamkl.evaluation.statistics import Estimate
from streamkl.evaluation.summary import Figure, Gap, LayerFigure, method_of

COLOURS = {"oracle": "#1f77b4", "window": "#d95f02", "random": "#7f7f7f"}
MORE_COLOURS = ("#1b9e77", "#7570b3", "#e7298a", "#66a61e")
"""Colours of selectors, and of folders of indexers."""

NAMES = {"oracle": "oracle", "window": "window baseline", "random": "random"}
TASKS = {"needle": "needle", "multikey": "multi-key needle", "tracking": "variable tracking"}
PANELS = {"recall": "recall of the oracle's keys", "mass": "attention mass on selected keys"}
BESIDE = ((4, 4), (4, -10), (-16, 4), (-16, -10), (4, 12), (-16, 12), (-6, 20), (4, -18), (-16, -18))
"""Offsets of a number from its point, in points, the best places first."""
TICKS = 7
"""The most ticks of a time axis."""
WIDEST = 25.0
"""The widest interval of a rate's gap that is drawn, in points: beyond it a bar says nothing (about 60 contexts)."""
APART = 4.0
"""How far lines are drawn apart, sideways and in points of the page, so that equal results do not hide one another."""
GAPS = {"oracle": "oracle gap", "indexer": "indexer gap", "realization": "realization gap"}


def draw(folder: Path, figures: list[Figure], gaps: list[Gap], layers: list[LayerFigure], where: str) -> list[Path]:
    """Writes the plots that there are results for, and returns their paths."""
    pictures = {
        "frontier": lambda: frontier(figures), "quality": lambda: quality(figures), "gaps": lambda: gap_bars(gaps),
        "layers": lambda: heat_map(layers),
    }  # fmt: skip
    written = []
    for name, picture in pictures.items():
        made = picture()
        if made is not None:
            _sign(made, where)
            written.append(folder / f"{name}.png")
            made.savefig(written[-1], dpi=150)
            plt.close(made)
    return written


def quality(figures: list[Figure]) -> Picture | None:
    """Quality against budget: a row per length, a column per task, a line per selector and query block."""
    tasks, lengths = _tasks(figures), sorted({f.length for f in figures})
    if not any(f.method != DENSE for f in figures):
        return None
    picture, grid = _grid(tasks, lengths, width=4.0, height=2.9)
    for task, length, axes in grid:
        here = [f for f in figures if (f.task, f.length) == (task, length)]
        budgets = sorted({f.method.topk for f in here if f.method != DENSE})
        for points in _lines(here):
            _line(axes, [f.method.topk for f in points], points, here, figures)
        _dense(axes, here, task)
        axes.set_xscale("log", base=2)
        axes.set_xticks(budgets, [str(budget) for budget in budgets])
        axes.minorticks_off()
        if budgets:
            axes.set_xlim(budgets[0] / 1.3, budgets[-1] * 1.3)
        if length == lengths[-1]:
            axes.set_xlabel("selected keys (budget)")
    return _finish(picture, grid, "Quality against budget")


def frontier(figures: list[Figure]) -> Picture | None:
    """Quality against the time to the first token, a point per method, its budget beside it."""
    tasks, lengths = _tasks(figures), sorted({f.length for f in figures})
    if not any(f.method != DENSE for f in figures):
        return None
    picture, grid = _grid(tasks, lengths, width=4.4, height=3.1)
    for task, length, axes in grid:
        here = [f for f in figures if (f.task, f.length) == (task, length)]
        for points in _lines(here):
            _line(axes, [f.seconds for f in points], points, here, figures)
        for f in here:
            if f.method == DENSE:
                axes.plot(f.seconds, _shown(f).value, "*", color="black", markersize=12, label="dense", zorder=5)
                axes.axvline(f.seconds, color="black", linewidth=0.8, linestyle=":")
        _dense(axes, here, task, label=None)
        if task != "perplexity":
            axes.set_ylim(-3, 116)  # room for budgets above the best
        axes.set_xscale("log")
        if here:  # an interrupted run has panels without results
            _seconds_axis(axes, [f.seconds for f in here])
        if length == lengths[-1]:
            axes.set_xlabel("time to first token (s)")
    finished = _finish(picture, grid, "Quality against time to first token (the numbers are budgets)")
    finished.draw_without_rendering()  # places the panels
    for task, length, axes in grid:
        _name_budgets(axes, [f for f in figures if (f.task, f.length) == (task, length)], figures)
    return finished


def _name_budgets(axes: Axes, here: list[Figure], figures: list[Figure]) -> None:
    """Writes the smallest and the largest budget of each line beside its point, where there is room for it."""
    ends = [f for points in _lines(here) for f in (points[0], points[-1])[: len(points)]]
    to_points = 72 / axes.figure.dpi
    places = {}
    for f in here:
        x, y = axes.transData.transform((f.seconds, _shown(f).value)) * to_points
        places[f.method] = (x + _dodge(f, here), y)
    taken = [(x - 3, y - 3, x + 3, y + 3) for x, y in places.values()]
    for f in sorted(ends, key=lambda f: f.seconds):
        (x, y), text = places[f.method], str(f.method.topk)
        boxes = [(x + dx, y + dy, x + dx + 4.5 * len(text), y + dy + 6) for dx, dy in BESIDE]
        free = (n for n, box in enumerate(boxes) if not any(_overlap(box, other) for other in taken))
        n = next(free, 0)
        taken.append(boxes[n])
        axes.annotate(
            text, (f.seconds, _shown(f).value), textcoords="offset points", fontsize=7,
            xytext=(BESIDE[n][0] + _dodge(f, here), BESIDE[n][1]), color=_style(f.method, figures)[0],
        )  # fmt: skip


def _overlap(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def gap_bars(gaps: list[Gap]) -> Picture | None:
    """Each gap at each budget, with intervals: a row per length, a column per task with contexts enough to tell."""
    told = {(g.task, g.length) for g in gaps if g.task == "perplexity" or g.loss.high - g.loss.low <= WIDEST}
    gaps = [g for g in gaps if (g.task, g.length) in told]
    if not gaps:
        return None
    tasks, lengths = list(dict.fromkeys(g.task for g in gaps)), sorted({g.length for g in gaps})
    ordered = sorted(gaps, key=lambda g: (list(GAPS).index(g.kind), g.query_block))
    kinds = list(dict.fromkeys(_kind(g) for g in ordered))
    picture, grid = _grid(tasks, lengths, width=1.4 + 1.1 * len(kinds), height=2.8)
    budgets = sorted({g.topk for g in gaps})
    for task, length, axes in grid:
        for n, budget in enumerate(budgets):
            shade = plt.get_cmap("viridis")(0.15 + 0.7 * n / max(1, len(budgets) - 1))
            for g in gaps:
                if (g.task, g.length, g.topk) == (task, length, budget):
                    at = kinds.index(_kind(g)) + 0.8 * ((n + 0.5) / len(budgets) - 0.5)
                    axes.bar(at, g.loss.value, 0.7 / len(budgets), color=shade, alpha=0.8, label=f"k = {budget}")
                    axes.plot(at, g.loss.value, "o", color="black", markersize=3)  # visible even at 0
                    _interval(axes, at, g.loss, "black")
        axes.axhline(0, color="black", linewidth=0.8)
        axes.set_xticks(range(len(kinds)), kinds, fontsize=7)
        axes.set_xlim(-0.6, len(kinds) - 0.4)
        name = "lost (%)" if task == "perplexity" else "lost (points)"
        axes.set_ylabel(f"{length:,} tokens\n{name}" if task == tasks[0] else name)
    return _finish(picture, grid, "Where quality is lost: three gaps")


def heat_map(layers: list[LayerFigure]) -> Picture | None:
    """Recall and mass: a column of cells per layer, a row per method; a row of panels per length."""
    if not layers:
        return None
    lengths, numbers = sorted({f.length for f in layers}), sorted(layers[0].recall)
    rows = [[f for f in layers if f.length == length] for length in lengths]
    size = (4.5 + 0.3 * max(12, len(numbers)), 1.0 + sum(0.7 + 0.2 * len(row) for row in rows))
    picture, panels = plt.subplots(
        len(lengths), 2, figsize=size, layout="constrained", squeeze=False, sharey="row",
        height_ratios=[0.5 + 0.2 * len(row) for row in rows],
    )  # fmt: skip
    image = None
    for line, length, row in zip(panels, lengths, rows, strict=True):
        for axes, (name, title) in zip(line, PANELS.items(), strict=True):
            values = [[getattr(f, name)[n] for n in numbers] for f in row]
            image = axes.imshow(values, aspect="auto", cmap="viridis", vmin=0, vmax=1, interpolation="nearest")
            axes.set_yticks(range(len(row)), [f.method.name for f in row], fontsize=7)
            axes.set_xticks(range(0, len(numbers), 4), numbers[::4], fontsize=7)
            axes.set_title(f"{title}, {length:,} tokens", fontsize=9)
            for n, cells in enumerate(values):
                axes.text(len(numbers) - 0.2, n, f"{sum(cells) / len(cells):.2f}", fontsize=7, va="center")
    for axes in panels[-1]:
        axes.set_xlabel("layer (at the right: mean over layers)", fontsize=8)
    if image is not None:
        picture.colorbar(image, ax=panels, pad=0.04, aspect=30, shrink=0.8)
    picture.suptitle("Selected keys, layer by layer", fontsize=11)
    return picture


def _kind(gap: Gap) -> str:
    """The label of a group of bars."""
    selector = method_of(gap.worse).selector
    return f"{GAPS[gap.kind]}\n{selector},\n{_sharing(gap.query_block)}"


def _tasks(figures: list[Figure]) -> list[str]:
    return list(dict.fromkeys(f.task for f in figures))


def _grid(
    tasks: Sequence[str], lengths: Sequence[int], width: float, height: float
) -> tuple[Picture, list[tuple[str, int, Axes]]]:
    """A figure with a row per length and a column per task, and its panels."""
    size = (max(6.5, 0.6 + width * len(tasks)), 1.5 + height * len(lengths))
    picture, panels = plt.subplots(len(lengths), len(tasks), figsize=size, layout="constrained", squeeze=False)
    grid = [(task, length, panels[m, n]) for n, task in enumerate(tasks) for m, length in enumerate(lengths)]
    for task, length, axes in grid:
        axes.grid(alpha=0.3)
        if length == lengths[0]:
            axes.set_title("perplexity" if task == "perplexity" else TASKS.get(task, task), fontsize=9)
        name = "over dense (%), less is better" if task == "perplexity" else "right (%), more is better"
        axes.set_ylabel(f"{length:,} tokens\n{name}" if task == tasks[0] else name)
    return picture, grid


def _shown(f: Figure) -> Estimate:
    """Percent: of answers, or of perplexity over that of dense attention."""
    return (f.change if f.task == "perplexity" else f.quality).scaled(100)


def _dodge(f: Figure, here: list[Figure]) -> float:
    """How far a point is drawn to the right of its place, in points of the page; what it stands for stays its data."""
    lines = _lines(here)
    number = next((n for n, points in enumerate(lines) if f in points), None)
    return 0.0 if number is None else APART * (number - (len(lines) - 1) / 2)


def _dense(axes: Axes, here: list[Figure], task: str, label: str | None = "dense") -> None:
    """A line where dense attention is, and the limits of a rate."""
    for f in here:
        if f.method == DENSE:
            level = 0.0 if task == "perplexity" else 100 * f.quality.value
            axes.axhline(level, color="black", linewidth=1, linestyle="--", label=label)
    if task == "perplexity":
        worst = max((_shown(f).value for f in here), default=1.0)
        if worst > 60:  # on a linear axis, a method that breaks the model would hide the differences of the others
            axes.set_yscale("symlog", linthresh=10)
            axes.set_ylim(min(-2.0, *(_shown(f).value for f in here)), 1.5 * worst)
            ticks = [tick for tick in (0, 5, 10, 20, 50, 100, 200, 500, 1000, 10_000) if tick < 1.5 * worst]
            axes.set_yticks(ticks, [f"{tick:,}" for tick in ticks])
            axes.minorticks_off()
    else:
        axes.set_ylim(-3, 103)


def _line(axes: Axes, x: Sequence[float], points: list[Figure], here: list[Figure], figures: list[Figure]) -> None:
    """The line of one selector and query block, with intervals."""
    method, estimates = points[0].method, [_shown(f) for f in points]
    colour, marker, style = _style(method, figures)
    label = f"{NAMES.get(method.selector, method.selector)}, {_sharing(method.query_block)}"
    filled = colour if method.query_block == 1 else "white"
    sideways = ScaledTranslation(_dodge(points[0], here) / 72, 0, axes.figure.dpi_scale_trans)
    place = axes.transData + sideways
    axes.plot(
        x, [e.value for e in estimates], marker=marker, linestyle=style, color=colour, markerfacecolor=filled,
        label=label, transform=place,
    )  # fmt: skip
    for at, estimate in zip(x, estimates, strict=True):
        _interval(axes, at, estimate, colour, place)
        ends = (end for end in estimate if math.isfinite(end))
        axes.update_datalim([(at, end) for end in ends])  # which a line with a place of its own does not do


def _style(method: Method, figures: list[Figure]) -> tuple[str, str, str]:
    others = list(dict.fromkeys(f.method.selector for f in figures if f.method.selector not in (*COLOURS, "dense")))
    colours = {**COLOURS, **{name: MORE_COLOURS[n % len(MORE_COLOURS)] for n, name in enumerate(others)}}
    query_blocks = sorted({f.method.query_block for f in figures if f.method != DENSE})
    n = query_blocks.index(method.query_block)
    return colours[method.selector], "osD^v"[n % 5], ("-", "--", ":", "-.")[n % 4]


def _interval(axes: Axes, x: float, e: Estimate, colour: str, place: Transform | None = None) -> None:
    if math.isfinite(e.low) and math.isfinite(e.high):
        axes.plot([x, x], [e.low, e.high], color=colour, linewidth=1, alpha=0.6, transform=place or axes.transData)


def _seconds_axis(axes: Axes, seconds: list[float]) -> None:
    """Ticks at round times within the measured range, as many as have room."""
    low, high = min(seconds) / 1.4, max(seconds) * 1.4
    ticks: list[float] = []
    for steps in ((1, 2, 5), (1, 1.5, 2, 3, 5, 7), (1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9)):
        finer = [m * 10.0**e for e in range(-4, 5) for m in steps if low <= m * 10.0**e <= high]
        ticks = finer if len(finer) <= TICKS or not ticks else ticks
    axes.set_xlim(low, high)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()


def _sharing(query_block: int) -> str:
    return "per-query top-k" if query_block == 1 else f"query blocks of {query_block}"


def _lines(here: list[Figure]) -> list[list[Figure]]:
    """The points of each selector and query block, in the order of first appearance, by rising budget."""
    found: dict[tuple[str, int], list[Figure]] = {}
    for f in here:
        if f.method != DENSE:
            found.setdefault((f.method.selector, f.method.query_block), []).append(f)
    return [sorted(points, key=lambda f: f.method.topk) for points in found.values()]


def _sign(picture: Picture, where: str) -> None:
    """Adds the machine of the measurement, under the legend if there is one."""
    if picture.legends:
        legend = picture.legends[0]
        legend.set_title(where, prop=FontProperties(size=6))
        legend.get_title().set_color("grey")
    else:
        picture.supxlabel(where, fontsize=6, color="grey", x=0.99, ha="right")


def _finish(picture: Picture, grid: list[tuple[str, int, Axes]], title: str) -> Picture:
    """Adds the title, and one legend for all panels."""
    handles = {}
    for _, _, axes in grid:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    picture.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    picture.suptitle(title, fontsize=11)
    return picture
