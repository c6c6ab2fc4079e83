"""Pictures of what the records say. Needs matplotlib, from the ``bench`` extra."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from streamkl.bench.cells import Cell
from streamkl.bench.records import Record
from streamkl.bench.report import Times, by_cell, ratio, speedups

COLOURS = {"forward": "#1f77b4", "training": "#d95f02", "training-both": "#7570b3", "backward": "#d95f02"}
LABELS = {
    "forward": "forward",
    "training": "forward and backward, student gradients",
    "training-both": "forward and backward, all gradients",
    "backward": "backward",
}


def draw(records: list[Record], directory: Path) -> list[Path]:
    """Writes the pictures that there are results for, and returns their paths."""
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
    """The time of each cell as a share of attention's, and that of the products alone: one line a shape."""
    cells = {
        cell: times
        for cell, times in by_cell([r for r in records if r.suite in ("forward", "training", "shape")]).items()
        if ratio(times, "streamkl", "sdpa") is not None
    }
    if not cells:
        return None
    shapes = list(dict.fromkeys(replace(cell, direction="forward") for cell in cells))
    figure, axes = plt.subplots(figsize=(8, 1.6 + 0.36 * len(shapes)), layout="constrained")
    for direction in ("forward", "training", "training-both"):
        points = _points(cells, shapes, direction, "streamkl")
        if points:
            axes.plot(*zip(*points, strict=True), "o", color=COLOURS[direction], label=LABELS[direction], markersize=7)
    bare = _points(cells, shapes, "forward", "products")
    if bare:
        axes.plot(
            *zip(*bare, strict=True),
            "|",
            color="black",
            markersize=13,
            markeredgewidth=2,
            label="the forward's products alone",
        )
    axes.axvline(1, color="grey", linewidth=1)
    axes.set_yticks(range(len(shapes)), [f"{s.tokens:,} x {s.layout} {s.mask}" for s in shapes])
    axes.invert_yaxis()
    axes.set_xlim(0, max(1.1, 1.08 * axes.get_xlim()[1]))
    axes.set_xlabel("time / time of scaled_dot_product_attention (forward; forward and backward)")
    axes.grid(alpha=0.3)
    _entitle(figure, "The divergence beside attention itself (left of 1 is faster)", records)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return figure


def over_eager(records: list[Record]) -> Figure | None:
    """How many times faster than both matrices in memory, against tokens; forward and backward apart."""
    found = speedups(by_cell([r for r in records if r.suite == "eager"]))
    if not found:
        return None
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for part in ("forward", "backward"):
        for dim, style in zip(
            sorted({cell.dims[0] for cell in found}, reverse=True), ("o-", "s--", "^:"), strict=False
        ):
            points = sorted((c.tokens, v[part]) for c, v in found.items() if part in v and c.dims[0] == dim)
            if points:
                axes.plot(*zip(*points, strict=True), style, color=COLOURS[part], label=f"{part}, D = {dim}")
    _token_axis(axes, sorted({cell.tokens for cell in found}))
    axes.set_ylim(bottom=0)
    axes.set_ylabel("times faster than eager")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    _entitle(figure, "Speed over both matrices in memory", records)
    return figure


def memory(records: list[Record]) -> Figure | None:
    """Memory that loss and gradients add, against tokens, both on logarithmic axes."""
    chosen = [r for r in records if r.suite == "memory" and r.extra_bytes is not None]
    if not chosen:
        return None
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    labels = (("eager", "both matrices in memory", "o"), ("streamkl", "streamkl", "s"))
    for contestant, label, marker in labels:
        points = sorted((r.cell.tokens, (r.extra_bytes or 0) / 1e6) for r in chosen if r.contestant == contestant)
        if points:
            axes.plot(*zip(*points, strict=True), marker=marker, label=label)
            tokens, megabytes = points[-1]
            axes.annotate(f"{megabytes:,.0f} MB", (tokens, megabytes), textcoords="offset points", xytext=(6, 6))
    axes.set_yscale("log")
    _token_axis(axes, sorted({r.cell.tokens for r in chosen}))
    low, high = axes.get_ylim()
    axes.set_ylim(low, 2 * high)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_ylabel("memory added by loss and gradients (MB)")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    cell = chosen[0].cell
    _entitle(figure, f"Memory: one head of {cell.dims[0]}, {cell.dtype}, {cell.mask}", records)
    return figure


def _points(cells: dict[Cell, Times], shapes: list[Cell], direction: str, name: str) -> list[tuple[float, int]]:
    """The share of attention's time that a contestant takes, and the line of its shape."""
    found = ((cells.get(replace(s, direction=direction), {}), line) for line, s in enumerate(shapes))
    shares = ((ratio(times, name, "sdpa"), line) for times, line in found)
    return [(share, line) for share, line in shares if share is not None]


def _token_axis(axes: Axes, tokens: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(tokens, [f"{n // 1024}K" if n % 1024 == 0 else f"{n:,}" for n in tokens])
    axes.minorticks_off()
    axes.set_xlim(tokens[0] / 1.2, tokens[-1] * 1.6)
    axes.set_xlabel("tokens")


def _entitle(figure: Figure, title: str, records: list[Record]) -> None:
    """The message, and under it where it was measured."""
    first = records[-1]
    where = f"{first.machine.get('device', '')}, {first.threads} threads, torch {first.machine.get('torch', '')}"
    figure.suptitle(f"{title}\n", fontsize=11)
    figure.text(0.5, 0.955, where, ha="center", va="top", fontsize=8, color="grey")
