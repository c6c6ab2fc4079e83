"""``streamkl bench prefill``: measures, prints a table, draws a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from streamkl.cli.errors import UserError
from streamkl.extras import how_to_install


def run(
    console: Console,
    tokens: list[int],
    options: dict[str, Any],
    threads: int,
    memory: bool,
    output: Path,
    picture: Path | None,
) -> int:
    """Measures each length; returns the exit code."""
    import torch

    try:
        from streamkl.bench.gate import RedGateError
        from streamkl.bench.prefill import records
        from streamkl.bench.prefill.run import SELECTORS, Job
        from streamkl.bench.prefill.run import run as measure
    except ImportError as error:
        raise UserError(f"a prefill runs through transformers: {how_to_install('hf')} ({error})") from None
    if options["selector"] not in SELECTORS:
        raise UserError(f"--selector is one of {', '.join(SELECTORS)}, not {options['selector']!r}")
    for length in tokens:
        job = Job(tokens=length, threads=threads or torch.get_num_threads(), **options)
        try:
            with console.status(f"{length:,} tokens: {job.rounds} rounds of dense and {job.selector} ..."):
                found = list(measure(job, memory))
        except RedGateError as error:
            console.print(f"[bold red]Wrong results, so no figures:[/] {error}", highlight=False)
            return 1
        except (ValueError, RuntimeError) as error:
            raise UserError(str(error)) from None
        for record in found:
            records.append(output, record)
        _show(console, found)
    console.print(f"Results are in {output}.", highlight=False)
    if picture is not None:
        try:
            from streamkl.bench.prefill import plots
        except ImportError:
            raise UserError(f"plots need matplotlib: {how_to_install('bench')}") from None
        plots.draw(records.read(output), picture)
        console.print(str(picture), highlight=False)
    return 0


def _show(console: Console, found: list[Any]) -> None:
    from streamkl.bench.prefill import records

    facts = found[0].machine
    console.print(f"{found[0].title}; {facts['device']}, torch {facts['torch']}, {found[0].dtype}", highlight=False)
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    for n, column in enumerate(records.COLUMNS):
        table.add_column(column, justify="left" if n == 1 else "right", no_wrap=True)
    for row in records.table(found):
        table.add_row(*row)
    console.print(table)
