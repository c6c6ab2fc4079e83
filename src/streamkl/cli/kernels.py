"""``streamkl kernels``: every Triton kernel compiled for every target, and what its binary says."""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from streamkl.cli.errors import UserError
from streamkl.engines.triton.inspect.budget import TARGETS
from streamkl.engines.triton.inspect.report import Figures, all_figures
from streamkl.engines.triton.inspect.table import variants

CAPTION = (
    "clocks: the least that one pass of the main loop needs for its products, for issuing its instructions, and "
    "for its exponentials. ceiling: upper bound, not measured - the share of the tensor cores' peak if nothing waited."
)


def run(targets: list[str], kinds: list[str], dims: list[int], quick: bool, check: bool, output: Path | None) -> int:
    """Compiles, prints, and returns the exit code: 1 if ``check`` and a budget is broken."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)  # a file has room for the columns
    progress_console = Console(stderr=True)
    unknown = [target for target in targets if target not in TARGETS]
    if unknown:
        raise UserError(f"--target is of {', '.join(TARGETS)}: got {', '.join(unknown)}")
    of_targets = list(variants(targets or TARGETS, quick))
    known = list(dict.fromkeys(v.kind for v in of_targets))
    unknown = [kind for kind in kinds if kind not in known]
    if unknown:
        raise UserError(f"--kind is of {', '.join(known)}: got {', '.join(unknown)}")
    wanted = [v for v in of_targets if (not kinds or v.kind in kinds) and (not dims or v.dims[0] in dims)]
    if not wanted:
        raise UserError("no kernel is of these targets, kinds and dims; without them all are compiled")
    order = {str(variant): n for n, variant in enumerate(wanted)}
    rows: list[Figures] = []
    started = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=progress_console, transient=True) as progress:
        task = progress.add_task("compiling", total=len(wanted))
        for variant, found in all_figures(wanted):
            progress.update(task, advance=1, description=str(variant))
            rows += found
    took, used = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    rows.sort(key=lambda row: order[row.variant])
    show(rows, console)
    if output is not None:
        text = markdown(rows) if output.suffix == ".md" else json.dumps([row._asdict() for row in rows], indent=1)
        output.write_text(text + "\n")
    broken = [row for row in rows if row.broken]
    for row in broken:
        console.print(f"[red]{row.variant} {row.kernel} ({row.config}):[/] {'; '.join(row.broken)}", highlight=False)
    kernels = len({(row.arch, row.ir or row.variant) for row in rows})
    count = len({row.arch for row in rows})
    console.print(
        f"{len(rows):,} rows of {count} {'target' if count == 1 else 'targets'}, {kernels:,} different kernels, in "
        f"{minutes(took)} ({minutes(used.ru_utime + used.ru_stime)} of processor time): {len(broken)} over budget",
        highlight=False,
    )
    return 1 if check and broken else 0


def minutes(seconds: float) -> str:
    """A time in minutes and seconds."""
    return f"{int(seconds) // 60} min {int(seconds) % 60} s"


def show(rows: list[Figures], console: Console) -> None:
    """Prints the figures, one table per target."""
    for target in dict.fromkeys(row.arch for row in rows):
        table = Table(
            "variant", "kernel", "tile", "registers", "spills", "shared", "products", "exp", "loop", "clocks",
            "ceiling", title=target, title_justify="left", caption=CAPTION, caption_justify="left",
        )  # fmt: skip
        for row in rows:
            if row.arch != target:
                continue
            products = ", ".join(f"{count} {kind}" for kind, count in row.mma.items()) or "none"
            table.add_row(
                row.variant.removeprefix(f"{target} "), row.kernel.removesuffix("_kernel"), row.config,
                str(row.registers), str(row.spills), f"{row.shared >> 10}/{row.shared_limit >> 10} KB", products,
                str(row.exp), str(row.loop_instructions),
                f"{row.mma_clocks:.0f} / {row.issue_clocks:.0f} / {row.exp_clocks:.0f}", f"{row.ceiling:.0%}",
            )  # fmt: skip
        console.print(table)


def markdown(rows: list[Figures]) -> str:
    """The figures as a table of Markdown, with the clocks of issue relative to those of products."""
    lines = [
        "| variant | kernel | tile | registers | spills | shared, KB | products | issue / products | ceiling |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        products = ", ".join(f"{count} {kind}" for kind, count in row.mma.items()) or "none"
        ratio = f"{row.issue_clocks / row.mma_clocks:.2f}" if row.mma_clocks else ""
        lines.append(
            f"| {row.variant} | {row.kernel.removesuffix('_kernel')} | {row.config} | {row.registers} | {row.spills} | "
            f"{row.shared >> 10} of {row.shared_limit >> 10} | {products} | {ratio} | {row.ceiling:.0%} |"
        )
    return "\n".join(lines)
