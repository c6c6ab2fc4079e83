"""The picture: time to first token, time between tokens and throughput by the length of prompts. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from streamkl.bench.serve.records import DENSE, SPARSE, Row

STYLES = {DENSE: ("o", "#1f77b4"), SPARSE: ("s", "#d95f02")}


def draw(rows: list[Row], title: str, path: Path) -> None:
    """One panel each, but none for what was not measured; lines are dense and sparse servers."""
    values = [
        ("time to first token (s)", lambda row: row.ttft),
        ("time between tokens (ms)", lambda row: None if row.itl is None else 1000 * row.itl),
        ("tokens of answers per second", lambda row: row.throughput),
    ]
    if all(row.itl is None for row in rows):  # answers of one token
        del values[1]
    figure, panels = plt.subplots(1, len(values), figsize=(3.7 * len(values), 3.6), layout="constrained")
    for axes, (label, value) in zip(panels, values, strict=True):
        for kind, (marker, colour) in STYLES.items():
            points = [(row.prompt_tokens, value(row)) for row in rows if row.kind == kind]
            points = [(x, y) for x, y in points if y is not None]
            if points:
                axes.plot(*zip(*points, strict=True), marker=marker, color=colour, label=kind)
        if axes is panels[0]:
            for row in rows:
                axes.vlines(row.prompt_tokens, *row.ttft_range, color=STYLES[row.kind][1], alpha=0.5)
        axes.set_xlabel("tokens of a prompt")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    panels[0].legend(frameon=False, loc="upper left")
    figure.suptitle(title, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
