"""The picture: time to first token, taken apart, dense beside sparse. Needs matplotlib, from the ``bench`` extra."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from streamkl.bench.prefill.records import Prefill, faster
from streamkl.bench.prefill.stopwatch import PARTS
from streamkl.bench.report import where_briefly

COLOURS = {"projections": "#9ecae1", "selection": "#d95f02", "attention": "#1f77b4", "rest": "#cccccc"}


def draw(records: list[Prefill], path: Path) -> None:
    """One row of bars per model: a bar per method and length, its parts side by side."""
    titles = list(dict.fromkeys(r.title for r in records))
    differ = len({(r.threads, r.dtype) for r in records}) > 1
    heights = [sum(r.title == title for r in records) for title in titles]
    figure, rows = plt.subplots(
        len(titles), 1, figsize=(8.5, 1.4 + 0.8 * len(titles) + 0.42 * sum(heights)), layout="constrained",
        squeeze=False, gridspec_kw={"height_ratios": [h + 1 for h in heights]},
    )  # fmt: skip
    for axes, title in zip(rows[:, 0], titles, strict=True):
        of_model = sorted((r for r in records if r.title == title), key=lambda r: (r.tokens, r.method != "dense"))
        for line, r in enumerate(of_model):
            left, total = 0.0, sum(r.parts.values()) or 1.0
            for part in PARTS:
                width = r.median * r.parts.get(part, 0.0) / total
                axes.barh(line, width, left=left, color=COLOURS[part], label=part if line == 0 else None)
                left += width
            times = faster(r, of_model)
            beside = "" if times is None else f"   {times:.1f}x"
            axes.text(left, line, f"  {r.median:.1f} s{beside}", va="center", fontsize=9)
        labels = [
            f"{r.tokens:,} tokens, {r.name}" + (f", {r.threads} threads, {r.dtype}" if differ else "") for r in of_model
        ]
        axes.set_yticks(range(len(of_model)), labels, fontsize=9)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.18 * max(r.median for r in of_model))
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.3, axis="x")
    rows[-1, 0].set_xlabel("time to first token (s)")
    handles, labels = rows[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(PARTS), frameon=False, fontsize=9)
    last = records[-1]
    facts = f"{where_briefly(last.machine, last.threads)}, {last.dtype}"
    figure.suptitle(f"Time to first token, dense against sparse attention\n{facts}", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
