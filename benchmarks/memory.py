"""Peak resident memory and time of a loss and its gradients, engine against the materialised reference.

Every measurement is a process of its own, so that its peak is its own. One head, float32, causal.

    python benchmarks/memory.py                                    # the table and docs/images/memory.png
    python benchmarks/memory.py --backend tiled --tokens 131072    # one measurement
"""

from __future__ import annotations

import json
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

import streamkl

SWEEP = {"reference": (1024, 2048, 4096, 8192, 16384), "tiled": (1024, 2048, 4096, 8192, 16384, 32768, 65536)}
RESULTS = Path(__file__).parent / "results" / "memory.jsonl"
PICTURE = Path(__file__).parent.parent / "docs" / "images" / "memory.png"

app = typer.Typer(add_completion=False)


def measure(backend: str, tokens: int, dim: int) -> dict[str, Any]:
    """Runs one forward and backward in this process and reads its peak."""
    torch.manual_seed(0)
    q, k, student_q, student_k = (torch.randn(1, 1, tokens, dim) for _ in range(4))
    student_q.requires_grad_()
    student_k.requires_grad_()
    before = peak_rss()
    start = time.perf_counter()
    loss = streamkl.attention_kl(q, k, student_q, student_k, causal=True, backend=backend)  # type: ignore[arg-type]
    loss.backward()
    return {
        "backend": backend,
        "tokens": tokens,
        "dim": dim,
        "loss": loss.item(),
        "seconds": round(time.perf_counter() - start, 3),
        "resident_mb": round(peak_rss() / 1e6, 1),
        "added_mb": round((peak_rss() - before) / 1e6, 1),
        "torch": torch.__version__,
        "streamkl": streamkl.__version__,
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
    }


def peak_rss() -> int:
    """The most memory this process has been resident with, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def plot(rows: list[dict], path: Path) -> None:
    """Draws memory against tokens, both on logarithmic axes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for backend, label, marker in (("reference", "both matrices in memory", "o"), ("tiled", "streamkl (tiled)", "s")):
        points = [(row["tokens"], max(row["added_mb"], 1.0)) for row in rows if row["backend"] == backend]
        axes.plot(*zip(*points, strict=True), marker=marker, label=label)
        tokens, megabytes = points[-1]
        axes.annotate(f"{megabytes:,.0f} MB", (tokens, megabytes), textcoords="offset points", xytext=(6, 6))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ticks := SWEEP["tiled"], [f"{n // 1024}K" for n in ticks])
    axes.set_xlim(right=SWEEP["tiled"][-1] * 1.6)
    axes.set_ylim(top=2.5 * max(row["added_mb"] for row in rows))
    axes.set_xlabel("tokens")
    axes.set_ylabel("memory added by loss and gradients (MB)")
    axes.set_title("attention_kl, one head of 64, float32, causal, CPU", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


@app.command()
def main(backend: str = "", tokens: int = 0, dim: int = 64, limit_mb: float = float("inf")) -> None:
    """Measures one backend at one length, or the whole sweep; fails where a limit on resident memory is exceeded."""
    if tokens:
        row = measure(backend or "auto", tokens, dim)
        print(json.dumps(row))
        if row["resident_mb"] > limit_mb:
            sys.exit(f"{row['resident_mb']} MB resident, more than {limit_mb}")
        return
    rows = []
    for name, length in track([(n, t) for n, lengths in SWEEP.items() for t in lengths], "Measuring"):
        command = [sys.executable, __file__, "--backend", name, "--tokens", str(length), "--dim", str(dim)]
        rows.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = Table("backend", "tokens", "seconds", "MB added", "MB resident")
    for row in rows:
        table.add_row(row["backend"], *(f"{row[key]:,}" for key in ("tokens", "seconds", "added_mb", "resident_mb")))
    Console().print(table)
    plot(rows, PICTURE)


if __name__ == "__main__":
    app()
