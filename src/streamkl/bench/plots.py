"""Plots of the records. Needs matplotlib, from the ``bench`` extra."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from streamkl.bench.cells import Cell
from streamkl.bench.records import Record
from streamkl.bench.report import Times, by_cell, cell_name, ratio, speedups, where_briefly

DIRECTIONS = {
    "forward": ("forward", "o", "#1f77b4"),
    "training": ("forward and backward, student gradients", "s", "#d95f02"),
    "training-both": ("forward and backward, all gradients", "^", "#7570b3"),
}
"""Label, marker and colour."""


class Panel(NamedTuple):
    """One axis has one denominator."""

    title: str
    directions: tuple[str, ...]
    denominator: str


PANELS = (
    Panel("Forward", ("forward",), "attention's forward"),
    Panel("Forward and backward", ("training", "training-both"), "attention's forward and backward"),
)


def draw(records: list[Record], directory: Path) -> list[Path]:
    """Writes the plots that there are results for, and returns their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for name, picture in (("sdpa", beside_attention), ("eager", over_eager), ("memory", memory)):
        figure = picture(records)
        if figure is not None:
            written.append(directory / f"{name}.png")
            figure.savefig(written[-1], dpi=150)
            plt.close(figure)
    return written


def beside_attention(records: list[Record]) -> Figure | None:
    """The time of each cell as a fraction of attention's, and that of the products alone: one line per shape."""
    records = [r for r in records if r.suite in ("forward", "training", "shape")]
    cells = {cell: times for cell, times in by_cell(records).items() if ratio(times, "streamkl", "sdpa") is not None}
    if not cells:
        return None
    shapes = list(dict.fromkeys(replace(cell, direction="forward") for cell in cells))
    panels = [panel for panel in PANELS if any(cell.direction in panel.directions for cell in cells)]
    size = (4 + 4 * len(panels), 2 + 0.36 * len(shapes))
    figure, grid = plt.subplots(1, len(panels), figsize=size, layout="constrained", sharey=True, squeeze=False)
    for axes, panel in zip(grid[0], panels, strict=True):
        for direction in panel.directions:
            label, marker, colour = DIRECTIONS[direction]
            _dots(axes, cells, shapes, direction, "streamkl", marker=marker, color=colour, label=label, markersize=7)
        if "forward" in panel.directions:
            bars = {"color": "black", "markersize": 13, "markeredgewidth": 2, "label": "its products alone"}
            _dots(axes, cells, shapes, "forward", "products", marker="|", **bars)
        axes.axvline(1, color="black", linewidth=1, linestyle="--", label="attention")
        axes.set_xlim(0, max(1.1, axes.get_xlim()[1]))
        axes.set_xlabel(f"time / time of {panel.denominator}")
        axes.set_title(panel.title, fontsize=10)
        below = -0.16 if len(shapes) < 8 else -0.12  # the label of few rows takes more of the axes' height
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, below), frameon=False, fontsize=9)
        axes.grid(alpha=0.3)
    grid[0, 0].set_yticks(range(len(shapes)), [cell_name(shape) for shape in shapes])
    grid[0, 0].set_ylim(len(shapes) - 0.5, -0.5)
    where = where_briefly(records[-1].machine, records[-1].threads)
    figure.suptitle(f"Cost of the divergence beside attention itself\n{where}", fontsize=11)
    return figure


def over_eager(records: list[Record]) -> Figure | None:
    """The speed-up over both matrices in memory, against tokens; forward and backward apart."""
    records = [r for r in records if r.suite == "eager"]
    found = speedups(by_cell(records))
    if not found:
        return None
    figure, axes = plt.subplots(figsize=(7, 4.4), layout="constrained")
    for part, colour in (("forward", "#1f77b4"), ("backward", "#d95f02")):
        dims = sorted({cell.dims[0] for cell in found}, reverse=True)
        for dim, style in zip(dims, ("o-", "s--", "^:"), strict=False):
            points = sorted((c.tokens, v[part]) for c, v in found.items() if part in v and c.dims[0] == dim)
            if points:
                axes.plot(*zip(*points, strict=True), style, color=colour, label=f"{part}, D = {dim}")
    _token_axis(axes, sorted({cell.tokens for cell in found}))
    axes.set_ylim(bottom=0)
    axes.set_ylabel("times faster than eager")
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    cell = next(iter(found))
    _finish(figure, axes, f"Speed over both matrices in memory ({cell.mask}, {cell.dtype})", records)
    return figure


def memory(records: list[Record]) -> Figure | None:
    """Memory that loss and gradients add, against tokens, both on logarithmic axes."""
    records = [r for r in records if r.suite == "memory" and r.extra_bytes is not None]
    if not records:
        return None
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    labels = (("eager", "both matrices in memory", "o", "#d95f02"), ("streamkl", "streamkl", "s", "#1f77b4"))
    for name, label, marker, colour in labels:
        points = sorted((r.cell.tokens, (r.extra_bytes or 0) / 1e6) for r in records if r.implementation == name)
        if points:
            axes.plot(*zip(*points, strict=True), marker=marker, color=colour, label=label)
            axes.annotate(f"{points[-1][1]:,.0f} MB", points[-1], textcoords="offset points", xytext=(6, 6))
    axes.set_yscale("log")
    _token_axis(axes, sorted({r.cell.tokens for r in records}), room=1.6)
    low, high = axes.get_ylim()
    axes.set_ylim(low, 2 * high)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_ylabel("memory added by loss and gradients (MB)")
    axes.legend(frameon=False)
    cell = records[0].cell
    _finish(figure, axes, f"Memory: one head of {cell.dims[0]}, {cell.dtype}, {cell.mask}", records)
    return figure


def _dots(
    axes: Axes, cells: dict[Cell, Times], shapes: list[Cell], direction: str, name: str, **style: str | float
) -> None:
    """The time of an implementation as a fraction of attention's, on the line of each shape."""
    of_shapes = (cells.get(replace(shape, direction=direction), {}) for shape in shapes)
    fractions = [(ratio(times, name, "sdpa"), line) for line, times in enumerate(of_shapes)]
    points = [(fraction, line) for fraction, line in fractions if fraction is not None]
    if points:
        axes.plot(*zip(*points, strict=True), linestyle="none", **style)  # type: ignore[arg-type]


def _token_axis(axes: Axes, tokens: list[int], room: float = 1.2) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(tokens, [f"{n // 1024}K" if n % 1024 == 0 else f"{n:,}" for n in tokens])
    axes.minorticks_off()
    axes.set_xlim(tokens[0] / 1.2, tokens[-1] * room)
    axes.set_xlabel("tokens")


def _finish(figure: Figure, axes: Axes, title: str, records: list[Record]) -> None:
    """The title, and under it the machine of the measurement."""
    figure.suptitle(title, fontsize=11)
    axes.set_title(where_briefly(records[-1].machine, records[-1].threads), fontsize=8, color="grey")
    axes.grid(alpha=0.3)
