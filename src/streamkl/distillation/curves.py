"""Training curves, layer by layer: one line of JSON per logged step, and a plot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from streamkl import durable

LOG, PICTURE = "curves.jsonl", "curves.png"
TEXT = "lm"
"""The language-model loss, in lines of runs that have it."""
FIGURES = {"kl": "KL divergence", "recall": "recall of the oracle's keys", "mass": "attention mass on selected keys"}


class Curves:
    """The log of a run.

    Args:
        folder: Of the run.
        step: Where the run starts; lines that an interrupted run logged after it are dropped.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self.path = folder / LOG
        kept = [line for line in read(self.path) if line["step"] <= step]
        with durable.replacing_files(folder, [LOG]) as staged:  # a run that is killed meanwhile keeps its log
            (staged / LOG).write_text("".join(json.dumps(line) + "\n" for line in kept))

    def add(self, line: dict[str, Any]) -> None:
        """Appends the values of one step."""
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a log; one that was cut off is left out."""
    lines = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(line))
        except ValueError:
            break
    return lines


def draw(folder: Path) -> Path | None:
    """Plots the curves of a run, one line per layer; ``None`` if matplotlib is missing or nothing was logged."""
    lines = read(folder / LOG)
    try:
        from matplotlib import colormaps
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import Normalize
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        return None
    if not lines:
        return None
    layers = list(lines[0]["layers"])
    with_text = any(TEXT in line for line in lines)
    figure = Figure(figsize=(17 if with_text else 13, 4), layout="constrained")
    FigureCanvasAgg(figure)
    numbers = [int(layer) for layer in layers]
    colours = ScalarMappable(Normalize(min(numbers), max(numbers)), colormaps["viridis"])
    marker = "." if len(lines) < 3 else None
    plots = figure.subplots(1, len(FIGURES) + with_text)
    for axes, (name, title) in zip(plots, FIGURES.items(), strict=False):
        for number, layer in zip(numbers, layers, strict=True):
            colour = colours.to_rgba(number)  # pyright: ignore[reportArgumentType]
            points = [(x["step"], x["layers"][layer][name]) for x in lines if x["layers"][layer].get(name) is not None]
            axes.plot(*zip(*points, strict=True) if points else ((), ()), color=colour, linewidth=0.8, marker=marker)
        points = [(x["step"], x[name]) for x in lines if x.get(name) is not None]
        axes.plot(
            *zip(*points, strict=True) if points else ((), ()), color="black", linewidth=2, marker=marker, label="mean"
        )
        axes.set(title=title, xlabel="step", yscale="log" if name == "kl" else "linear")
        axes.grid(alpha=0.3)
        axes.legend(loc="upper right")  # the best place takes long to find
    if with_text:
        points = [(x["step"], x[TEXT]) for x in lines if x.get(TEXT) is not None]
        plots[-1].plot(*zip(*points, strict=True) if points else ((), ()), color="black", linewidth=2, marker=marker)
        plots[-1].set(title="language-model loss", xlabel="step")
        plots[-1].grid(alpha=0.3)
    figure.colorbar(colours, ax=plots, label="layer", ticks=MaxNLocator(integer=True))
    path = folder / PICTURE
    figure.savefig(path, dpi=110)
    return path
