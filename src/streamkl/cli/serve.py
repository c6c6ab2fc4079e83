"""``streamkl bench serve``: measures, prints a table, draws a plot."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from streamkl.bench.serve.records import DENSE, SPARSE, Row, append, read, rows
from streamkl.bench.serve.run import Job, ServerError
from streamkl.bench.serve.run import run as measure
from streamkl.cli.errors import UserError, require_vllm


def run(console: Console, job: Job, output: Path) -> int:
    """Measures what is missing in the file of results; returns the exit code."""
    require_vllm()
    found = read(output)
    try:
        with console.status("") as status:
            for record in measure(job, found, lambda text: status.update(text)):
                append(output, record)
                found.append(record)
    except ServerError as error:
        raise UserError(str(error)) from None
    except KeyboardInterrupt:
        console.print("Interrupted, and the server has ended. The same command goes on from here.")
        return 130
    ours = [r for r in found if r.settings == job.settings and r.load in job.loads and r.round < job.rounds]
    _show(console, rows(ours))
    console.print(f"Results are in {output}.", highlight=False)
    picture = output.with_suffix(".png")
    try:
        from streamkl.bench.serve import plots
    except ImportError:
        console.print("Without matplotlib there is no plot.")
        return 0
    load, machine = job.loads[0], ours[-1].machine
    answers = "answers of a token" if load.output_tokens == 1 else f"answers of {load.output_tokens:,} tokens"
    title = (
        f"{Path(job.model).name} in vLLM: {load.requests} requests, {load.at_once} at once, {answers}\n"
        f"{machine['device']}, {machine['capability']}"
    )
    plots.draw(rows(ours), title, picture)
    console.print(str(picture), highlight=False)
    return 0


def _show(console: Console, found: list[Row]) -> None:
    table = Table(box=box.SIMPLE)
    columns = ("prompt", "server", "first token", "medians of rounds", "between tokens", "tokens per second")
    for column in columns:
        table.add_column(column, justify="left" if column == "server" else "right")
    for row in found:
        table.add_row(
            f"{row.prompt_tokens:,}", row.kind, f"{row.ttft:.2f} s", "{:.2f} to {:.2f} s".format(*row.ttft_range),
            "" if row.itl is None else f"{1000 * row.itl:.0f} ms", f"{row.throughput:.3g}",
        )  # fmt: skip
    console.print(table)
    by = {(row.prompt_tokens, row.kind): row for row in found}
    for tokens in sorted({row.prompt_tokens for row in found}):
        if {(tokens, DENSE), (tokens, SPARSE)} <= by.keys():
            faster = by[tokens, DENSE].ttft / by[tokens, SPARSE].ttft
            console.print(f"{tokens:,} tokens: the first token of the sparse server is {faster:.2f}x as fast.")
