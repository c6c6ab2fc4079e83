"""``streamkl bench``: runs suites or a shape, and shows the results of files."""

from __future__ import annotations

import json
import math
import shlex
import statistics
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from streamkl.cli.errors import UserError
from streamkl.cli.hub import check_model
from streamkl.cli.many import ManyValues
from streamkl.extras import how_to_install

if TYPE_CHECKING:
    from streamkl.bench.records import Record
    from streamkl.bench.suites import Suite

app = typer.Typer(help="Measures speed, memory and error against attention and other baselines.", no_args_is_help=True)
SUITE_NAMES = (
    "forward, training, eager, dtypes, threads, long, memory, indexer, indexer-eager, compressed, topk, models"
)
"""Those of `streamkl.bench.suites`, which loads torch."""
CELL = {"mask": "causal", "dtype": "bfloat16", "direction": "forward"}
"""Of a shape, if nothing else is said."""
SUITES = typer.Argument(None, metavar="SUITE", help=f"{SUITE_NAMES}.")
BASELINES = typer.Option([], help="One or several, all or none; those of the suite, or all, if not given.")
RESULTS = typer.Option(Path("bench.jsonl"), help="The file that results are appended to, one per line.")
DIRECTORY = typer.Option(Path(), help="The directory that the plots are written to.")
LENGTHS = typer.Option([2048, 4096, 8192], help="Tokens of a sequence; one or several.")
FILE = typer.Argument(help="Results, as `streamkl bench run` writes them.", exists=True, dir_okay=False)


@app.command(cls=ManyValues)
def run(
    suites: list[str] = SUITES,
    shape: str = typer.Option("", help="BATCHxHEADSxTOKENSxDIM instead of a suite, such as 1x8x4096x128."),
    mask: str = typer.Option(CELL["mask"], help="causal or full, for --shape."),
    dtype: str = typer.Option(CELL["dtype"], help="bfloat16, float16 or float32, for --shape."),
    direction: str = typer.Option(CELL["direction"], help="forward, training or training-both, for --shape."),
    baselines: list[str] = BASELINES,
    isolated: bool = typer.Option(False, help="Once, in a process of its own, for --shape."),
    limit_mb: float = typer.Option(float("inf"), help="Fail if StreamKL's process is resident with more."),
    quick: bool = typer.Option(False, help="At most 512 tokens, few repetitions: shows that everything works."),
    backend: str = typer.Option("auto", help="The engine."),
    device: str = typer.Option("cpu", help="cpu or cuda."),
    threads: int = typer.Option(0, help="CPU threads; torch's default if not given."),
    seconds: float = typer.Option(10.0, help="Seconds of repetitions per implementation and cell."),
    memory: bool = typer.Option(True, help="Measure memory, in a process per implementation and cell."),
    output: Path = RESULTS,
    resume: bool = typer.Option(False, help="Keep what the file has from this commit and machine."),
) -> None:
    """Checks that the engine is right, then measures; prints no figure and exits with 1 if it is not."""
    import torch

    from streamkl.bench import run as harness
    from streamkl.bench.gate import RedGateError
    from streamkl.validation import BACKENDS

    console = _console()
    _check([backend], BACKENDS, "--backend")
    chosen = _suites(suites or [], baselines, isolated, shape=shape, mask=mask, dtype=dtype, direction=direction)
    if limit_mb < math.inf and not memory and not all(suite.isolated for suite in chosen.values()):
        raise UserError("--limit-mb needs the memory that --no-memory does not measure")
    if quick:
        chosen = {f"{name}-quick": suite.quick() for name, suite in chosen.items()}
    options = harness.Options(
        backend, torch.device(device), threads or torch.get_num_threads(), 0.2 if quick else seconds, memory, resume,
        output,
    )  # fmt: skip
    for name, suite in chosen.items():
        console.print(f"[bold]{name}[/]: {suite.question}")
        try:
            records = harness.run(name, suite, options, console)
        except RedGateError as error:
            console.print(f"[bold red]Wrong results, so no figures:[/] {error}", highlight=False)
            sys.exit(1)
        except RuntimeError as error:  # an engine that cannot run here, an implementation that failed
            raise UserError(str(error)) from None
        _show(records, console)
        peak = max(((r.resident_bytes or 0) / 1e6 for r in records if r.implementation == "streamkl"), default=0.0)
        if peak > limit_mb:
            sys.exit(f"{peak:,.0f} MB resident, more than {limit_mb:,.0f}")
    console.print(f"Results are in {output}.", highlight=False)


@app.command(cls=ManyValues)
def distill(
    model: str = typer.Option(..., help="The folder of a model."),
    length: list[int] = LENGTHS,
    materialised_up_to: int = typer.Option(2048, help="The longest sequence for the materialised loss."),
    seconds: float = typer.Option(10.0, help="Seconds of repetitions per call, at least five repetitions."),
    heads: int = typer.Option(1, help="Index heads."),
    head_dim: int = typer.Option(64, help="Width of an index head."),
    threads: int = typer.Option(0, help="CPU threads; torch's default if not given."),
    output: Path | None = typer.Option(None, help="Write the figures to this JSON file too."),  # noqa: B008
) -> None:
    """Measures a step of `streamkl distill` beside the frozen model's forward, and beside the materialised loss."""
    console = _console()
    with _measuring(model, threads):
        from streamkl.bench import distill as bench

        costs = bench.run(model, sorted(length), materialised_up_to, seconds, heads, head_dim)
    table = Table(title="A distillation step, bfloat16", title_justify="left", box=box.SIMPLE)
    for column in ("tokens", "call", "seconds", "times forward", "extra MB", "over forward, MB"):
        table.add_column(column, justify="left" if column == "call" else "right")
    forward = {cost.tokens: cost for cost in costs if cost.call == bench.FORWARD}
    for cost in costs:
        beside = forward[cost.tokens]
        more = (cost.extra_bytes - beside.extra_bytes) / 1e6
        times = cost.seconds / beside.seconds if cost.seconds and beside.seconds else math.nan
        table.add_row(
            f"{cost.tokens:,}", cost.call, f"{cost.seconds:.2f}", f"{times:.2f}",
            f"{cost.extra_bytes / 1e6:,.0f}", "" if cost is beside else f"{more:,.0f}",
        )  # fmt: skip
    console.print(table)
    if output is not None:
        _write_costs(output, model, costs)


@app.command(cls=ManyValues)
def attention(
    model: str = typer.Option(..., help="The folder of a model."),
    timed: list[int] = typer.Option([2048], help="Tokens of a sequence where time is measured, too."),  # noqa: B008
    length: list[int] = typer.Option([2048, 8192], help="Tokens of a sequence where memory is measured."),  # noqa: B008
    materialised_up_to: int = typer.Option(1024, help="The longest sequence for attention by its matrices."),
    seconds: float = typer.Option(10.0, help="Seconds of repetitions per call, at least five repetitions."),
    dtype: str = typer.Option("float32", help="Of both models: float32 or bfloat16."),
    checkpointing: bool = typer.Option(True, help="Whether the student checkpoints its layers."),
    threads: int = typer.Option(0, help="CPU threads; torch's default if not given."),
    output: Path | None = typer.Option(None, help="Write the figures to this JSON file too."),  # noqa: B008
) -> None:
    """Measures a step of attention distillation beside one of logits, and beside attention by its matrices."""
    console = _console()
    with _measuring(model, threads):
        from streamkl.bench import attention as bench

        costs = bench.run(model, timed, length, materialised_up_to, seconds, dtype, checkpointing)
    table = Table(title=f"A step of attention distillation, {dtype}", title_justify="left", box=box.SIMPLE)
    for column in ("tokens", "call", "seconds", "extra MB"):
        table.add_column(column, justify="left" if column == "call" else "right")
    for cost in costs:
        taken = "" if cost.seconds is None else f"{cost.seconds:.2f}"
        table.add_row(f"{cost.tokens:,}", cost.call, taken, f"{cost.extra_bytes / 1e6:,.0f}")
    console.print(table)
    for line in bench.summary(costs):
        console.print(line)
    if output is not None:
        _write_costs(output, model, costs, dtype=dtype, checkpointing=checkpointing)


@app.command()
def guard(
    band: float = typer.Option(1.25, help="By how many times a ratio may be more than that of the table."),
    seconds: float = typer.Option(1.0, help="Seconds of repetitions per call, at least five repetitions."),
    update: bool = typer.Option(False, help="Measure this machine, and write its row of the table."),
) -> None:
    """Fails if StreamKL has become slower beside PyTorch than the table of this instruction set says."""
    from streamkl.bench import guard as bench

    console, name = _console(), bench.instruction_set()
    if update:
        bench.update(bench.TABLE, seconds)
    expected = bench.read(bench.TABLE).get(name)
    if expected is None:
        console.print(f"The table has no ratios for {name}: --update measures them.", highlight=False)
        return
    verdicts = bench.check(expected, band, seconds)
    table = Table(title=f"Times over PyTorch's, {name}", title_justify="left", box=box.SIMPLE)
    for column in ("what", "ratio", "in the table", "times", "measured"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for v in verdicts:
        style = None if v.holds(band) else "bold red"
        row = (v.name, f"{v.ratio:.2f}", f"{v.expected:.2f}", f"{v.ratio / v.expected:.2f}", f"{v.tries}x")
        table.add_row(*row, style=style)
    console.print(table)
    slower = [v.name for v in verdicts if not v.holds(band)]
    if slower:
        console.print(f"[bold red]Slower by more than {band - 1:.0%}:[/] {'; '.join(slower)}", highlight=False)
        sys.exit(1)


@contextmanager
def _measuring(model: str, threads: int) -> Iterator[None]:
    """Checks the path of a model and sets the threads; what a measurement raises is an error of the user."""
    import torch

    from streamkl.bench.gate import RedGateError

    if threads:
        torch.set_num_threads(threads)
    try:
        check_model(model)
        yield
    except ImportError as error:
        raise UserError(f"a model runs through transformers: {how_to_install('hf')} ({error})") from None
    except (RedGateError, RuntimeError, ValueError, OSError) as error:
        raise UserError(str(error)) from None


def _write_costs(output: Path, model: str, costs: Iterable[Any], **more: Any) -> None:
    """Writes the costs of a model's calls as JSON, with the machine that they were measured on."""
    import json

    import torch

    from streamkl.bench import machine

    facts = {
        **machine.facts(torch.device("cpu")),
        "threads": torch.get_num_threads(),
        "model": Path(model).name,
        **more,
    }
    output.write_text(json.dumps({**facts, "costs": [cost._asdict() for cost in costs]}, indent=2) + "\n")


@app.command()
def show(file: Path = FILE) -> None:
    """Prints the results of a file as `run` does."""
    from streamkl.bench import report

    for name, results in report.suites(_records(file)).items():
        _console().print(f"[bold]{name}[/]")
        _show(results, _console())


@app.command()
def table(file: Path = FILE) -> None:
    """Prints Markdown tables and figures, for a page."""
    from streamkl.bench import report

    for name, results in report.suites(_records(file)).items():
        typer.echo(f"### {name}\n\n{report.where(results)}\n")
        for part in report.compact(results):
            typer.echo(f"{part.markdown()}\n")
        typer.echo("\n".join(f"- {line}" for line in report.summary(results)) + "\n")


@app.command(cls=ManyValues)
def plot(
    file: Path = FILE,
    output: Path = DIRECTORY,
) -> None:
    """Plots the results: time beside attention, speed-up over eager, memory."""
    try:
        from streamkl.bench import plots
    except ImportError:
        raise UserError(f"plots need matplotlib: {how_to_install('bench')}") from None
    written = plots.draw(_records(file), output)
    if not written:
        raise UserError(f"{file} has nothing to plot")
    for path in written:
        typer.echo(str(path))


@app.command(cls=ManyValues)
def prefill(
    model: str = typer.Argument(help="A folder with a checkpoint, or Qwen3-0.6B or Qwen3-8B for its shape."),
    tokens: list[int] = typer.Option([8192], help="Length of the prompt; one or several."),  # noqa: B008
    layers: int = typer.Option(0, help="How many of the model's layers; all if not given."),
    selector: str = typer.Option("indexer", help="indexer, oracle or window."),
    indexers: str = typer.Option("", help="A folder of indexers; untrained ones if not given."),
    topk: int = typer.Option(2048, help="How many keys are selected per query block."),
    query_block: int = typer.Option(64, help="How many queries share their top-k."),
    index_dim: int = typer.Option(128, help="Width of untrained indexers."),
    dtype: str = typer.Option("bfloat16", help="bfloat16, float16 or float32."),
    threads: int = typer.Option(0, help="CPU threads; torch's default if not given."),
    rounds: int = typer.Option(3, help="How often dense and sparse alternate."),
    keep_memory: bool = typer.Option(True, help="Freed memory stays with the process, dense and sparse."),
    memory: bool = typer.Option(True, help="Measure memory, dense and sparse in processes of their own."),
    output: Path = typer.Option(Path("prefill.jsonl"), help="The file that results are appended to."),  # noqa: B008
    picture: Path | None = typer.Option(None, help="Plot all results of the file into this PNG."),  # noqa: B008
) -> None:
    """Time to first token of a whole model through transformers, dense against sparse, broken down.

    A shape has random weights: a stress test, which says nothing about quality.
    """
    from streamkl.cli.prefill import run

    options = {
        "model": model, "layers": layers or None, "selector": selector, "indexers": indexers or None, "topk": topk,
        "query_block": query_block, "index_dim": index_dim, "dtype": dtype, "rounds": rounds,
        "keep_memory": keep_memory,
    }  # fmt: skip
    sys.exit(run(_console(), tokens, options, threads, memory, output, picture))


@app.command(cls=ManyValues)
def layer(
    model: str = typer.Argument("Qwen3-0.6B", help="Whose heads, e.g. Qwen3-0.6B or SmolLM2-135M."),
    tokens: int = typer.Option(32768, help="Queries and keys."),
    topk: int = typer.Option(2048, help="How many keys are selected per query block."),
    query_block: list[int] = typer.Option([64], help="How many queries share their top-k; several with spaces."),  # noqa: B008
    index_dim: int = typer.Option(128, help="Width of the indexer's one head."),
    training: bool = typer.Option(False, help="Forward and backward of attention, with gradients to q, k and v."),
    seconds: float = typer.Option(10.0, help="Seconds of repetitions of each."),
    rounds: int = typer.Option(5, help="The least number of repetitions, after an untimed one."),
) -> None:
    """One layer's selection and sparse attention beside dense attention, bfloat16, causal."""
    from streamkl.bench.gate import RedGateError
    from streamkl.bench.models import MODELS
    from streamkl.bench.prefill.layer import Layer
    from streamkl.bench.prefill.layer import run as measure

    _check([model], MODELS, "a model")
    try:
        job = Layer(MODELS[model], tokens, topk, tuple(query_block), index_dim, training=training)
        found = measure(job, seconds, rounds)
    except RedGateError as error:
        _console().print(f"[bold red]Wrong results, so no figures:[/] {error}", highlight=False)
        sys.exit(1)
    typer.echo(f"medians of {len(found.sdpa)} rounds, with the least and the most")
    typer.echo(f"dense attention {_spread(found.sdpa, 's')}")
    for block in job.query_blocks:
        taken = f"selection {_spread(found.selection[block], 's')}, attention {_spread(found.attention[block], 's')}"
        typer.echo(f"query blocks of {block}: {taken}: {_spread(found.ratios(block))} of dense attention")


def _spread(values: list[float], unit: str = "") -> str:
    """A median with the least and the most."""
    return f"{statistics.median(values):.3f}{unit} ({min(values):.3f} to {max(values):.3f})"


@app.command(cls=ManyValues)
def serve(
    model: str = typer.Argument(help="The folder of a model, as `vllm serve` takes it."),
    indexers: Path | None = typer.Option(None, help="A folder of indexers; none if the model has them."),  # noqa: B008
    topk: int = typer.Option(0, help="How many keys are selected per query block; as saved if not given."),
    query_block: int = typer.Option(64, help="How many queries share their top-k, with --topk."),
    decode: str = typer.Option("dense", help="How decoded tokens attend: dense or sparse."),
    prompt_tokens: list[int] = typer.Option([1024, 4096], help="Length of the prompts; several."),  # noqa: B008
    output_tokens: int = typer.Option(16, help="Length of the answers."),
    requests: int = typer.Option(8, help="How many requests of each length."),
    at_once: int = typer.Option(1, help="How many requests are under way."),
    rounds: int = typer.Option(2, help="How often a dense and a sparse server are started."),
    server: str = typer.Option("", help="Arguments of `vllm serve` for both, e.g. '--dtype float32'."),
    output: Path = typer.Option(Path("serve.jsonl"), help="The file of results; the plot is beside it."),  # noqa: B008
) -> None:
    """Dense and sparse servers of vLLM on 127.0.0.1 under the same load, one after the other.

    `vllm bench serve` sends the requests. The same command goes on where it was stopped.
    """
    from streamkl.bench.serve.records import Load
    from streamkl.bench.serve.run import Job
    from streamkl.cli.serve import run

    _check([decode], ("dense", "sparse"), "--decode")
    if indexers is None and (topk or decode != "dense"):
        raise UserError(
            "--topk and --decode are for --indexers: a model that was saved sparse is served as it was saved"
        )
    config = Path(model) / "config.json"
    if indexers is None and config.exists() and not json.loads(config.read_text()).get("streamkl"):
        raise UserError(f"{model} was not saved sparse: name its indexers by --indexers")
    sparse: dict[str, Any] = {} if indexers is None else {"indexers": str(indexers.resolve()), "decode": decode}
    if topk:
        sparse["selector"] = {"kind": "indexer", "topk": topk, "query_block": query_block}
    loads = tuple(Load(length, output_tokens, requests, at_once) for length in sorted(prompt_tokens))
    job = Job(model, sparse, tuple(shlex.split(server)), loads, rounds, output.with_suffix(".logs"))
    sys.exit(run(_console(), job, output))


def _records(file: Path) -> list[Record]:
    from streamkl.bench import records

    try:
        return records.read(file)
    except ValueError as error:
        raise UserError(str(error)) from None


def _suites(names: list[str], baselines: list[str], isolated: bool, **cell: str) -> dict[str, Suite]:
    """The suites of these names, or one of the given shape."""
    from dataclasses import replace

    from streamkl.bench.cells import DIRECTIONS, DTYPES, MASKS, Cell
    from streamkl.bench.implementations import BASELINES
    from streamkl.bench.suites import SUITES, Suite

    if bool(names) == bool(cell["shape"]):
        raise UserError(f"name suites ({', '.join(SUITES)}), or give a --shape")
    if names and (isolated or cell != {"shape": "", **CELL}):
        raise UserError("suites have cells of their own: --mask, --dtype, --direction and --isolated are for --shape")
    for option, allowed in (("mask", MASKS), ("dtype", DTYPES), ("direction", DIRECTIONS)):
        _check([cell[option]], allowed, f"--{option}")
    _check(names, SUITES, "a suite")
    chosen = BASELINES if baselines in ([], ["all"]) else () if baselines == ["none"] else tuple(baselines)
    _check(chosen, BASELINES, "a baseline (or none)")
    if not names:
        try:
            return {"shape": Suite("What does this shape cost?", (Cell.of_shape(**cell),), chosen, isolated=isolated)}
        except ValueError as error:
            raise UserError(str(error)) from None
    return {name: replace(SUITES[name], baselines=chosen) if baselines else SUITES[name] for name in names}


def _check(given: Iterable[str], allowed: Collection[str], what: str) -> None:
    for name in given:
        if name not in allowed:
            raise UserError(f"{what} is one of {', '.join(allowed)}, not {name!r}")


def _console() -> Console:
    """The console, wide enough for the tables where there is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=120)


def _show(records: list[Record], console: Console) -> None:
    from streamkl.bench import report

    console.print(report.where(records), highlight=False)
    for part in report.detailed(records):
        table = Table(title=part.title, title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0))
        for n, column in enumerate(part.columns):
            table.add_column(column, justify="left" if n < 2 else "right", no_wrap=True)
        for row in part.rows:
            table.add_row(*row, style="bold" if row[1].startswith("streamkl") else "")
        console.print(table)
    for line in report.skipped(records) + report.summary(records):
        console.print(line, highlight=False, soft_wrap=True)
