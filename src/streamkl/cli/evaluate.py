"""``streamkl oracle`` and ``streamkl evaluate``: how sparse a model can be, and what a selector costs and gains."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from streamkl.cli.errors import UserError
from streamkl.cli.hints import say_slow_dtype
from streamkl.cli.hub import check_model
from streamkl.extras import how_to_install
from streamkl.text import files

Model = Annotated[str, typer.Argument(help="A model of transformers: a folder, or a name.")]
Text = Annotated[list[Path], typer.Option(help="Files of text or JSON lines, or folders of them.")]
Tasks = Annotated[list[str], typer.Option(help="needle, multikey, tracking, perplexity.")]
Lengths = Annotated[list[int], typer.Option(help="Tokens of a context, exactly.")]
Budgets = Annotated[list[int], typer.Option(help="How many keys are selected per query block.")]
QueryBlocks = Annotated[list[int], typer.Option(help="How many queries share their top-k.")]
Selectors = Annotated[list[str], typer.Option(help="oracle, window, random; or none.")]
Indexers = Annotated[list[Path], typer.Option(help="Folders of indexers, as `streamkl distill` writes them.")]
Contexts = Annotated[int, typer.Option(min=0, help="How many contexts of each length each task with answers has.")]
Segments = Annotated[int, typer.Option(min=0, help="How many passages of each length are scored for perplexity.")]
LayerSegments = Annotated[int, typer.Option(min=0, help="On how many passages recall and mass of layers are measured.")]
Seed = Annotated[int, typer.Option(help="Of the contexts: the same for every method, and for every run.")]
Decode = Annotated[str, typer.Option(help="How the tokens after the prompt attend: sparse or dense.")]
Dtype = Annotated[str, typer.Option(help="bfloat16, float16 or float32.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
Field = Annotated[str, typer.Option(help="The name of the text in JSON lines.")]
Encoding = Annotated[str, typer.Option(help="Of the text.")]
Output = Annotated[Path, typer.Option(help="The folder of the report; an interrupted run resumes there.")]

TASKS, LENGTHS, BUDGETS, QUERY_BLOCKS = ["needle", "perplexity"], [2048], [64, 128, 256, 512], [1, 64]


def oracle(
    model: Model,
    text: Text,
    tasks: Tasks = TASKS,
    lengths: Lengths = LENGTHS,
    budgets: Budgets = BUDGETS,
    query_blocks: QueryBlocks = QUERY_BLOCKS,
    selectors: Selectors = ["oracle", "window", "random"],  # noqa: B006
    contexts: Contexts = 200,
    segments: Segments = 40,
    layer_segments: LayerSegments = 2,
    seed: Seed = 0,
    decode: Decode = "sparse",
    dtype: Dtype = "bfloat16",
    device: Device = "cpu",
    field: Field = "text",
    encoding: Encoding = "utf-8",
    output: Output = Path("oracle-report"),
) -> None:
    """Measures how sparse a model can be: the oracle's keys, with a window and random keys as baselines.

    Needs no training. It can be interrupted; the same command resumes it.
    """
    sys.exit(_run(**{**locals(), "indexers": []}))


def evaluate(
    model: Model,
    text: Text,
    indexers: Indexers = [],  # noqa: B006
    tasks: Tasks = TASKS,
    lengths: Lengths = LENGTHS,
    budgets: Budgets = [256, 512],  # noqa: B006
    query_blocks: QueryBlocks = QUERY_BLOCKS,
    selectors: Selectors = ["oracle", "window"],  # noqa: B006
    contexts: Contexts = 200,
    segments: Segments = 40,
    layer_segments: LayerSegments = 2,
    seed: Seed = 0,
    decode: Decode = "sparse",
    dtype: Dtype = "bfloat16",
    device: Device = "cpu",
    field: Field = "text",
    encoding: Encoding = "utf-8",
    output: Output = Path("report"),
) -> None:
    """Measures what indexers cost and gain: dense attention, folders of indexers and selectors on the same contexts.

    It can be interrupted; the same command resumes it, and one with more contexts or methods adds to it.
    """
    sys.exit(_run(**locals()))


def _run(**given: Any) -> int:
    """Runs, and returns the exit code."""
    from rich.console import Console

    console = Console(stderr=True)
    try:
        plan, names = _plan(given)
        files(given["text"])
        check_model(given["model"])
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from None
    for length in plan.lengths:
        sparse = plan.methods(length)[1:]
        left_out = sorted({*plan.budgets} - {method.topk for method in sparse})
        if left_out and sparse:
            shown = ", ".join(map(str, left_out))
            console.print(f"{length:,} tokens: a top-k of {shown} keys is dense attention, and left out.")
    for topk, query_block in sorted(
        {(m.topk, m.query_block) for m in plan.methods(max(plan.lengths)) if m.only_diagonal}
    ):
        console.print(
            f"A top-k of {topk} keys shared by a query block of {query_block} holds only keys on the block's diagonal."
        )
    try:
        import torch

        from streamkl.bench import machine
        from streamkl.evaluation import report
        from streamkl.evaluation.haystack import Haystack
        from streamkl.evaluation.run import Evaluation
        from streamkl.evaluation.subject import Subject, digest, load_tokenizer
    except ImportError as error:
        raise UserError(f"this command needs transformers: {how_to_install('hf', 'bench')} ({error})") from None
    try:
        device = _device(given["device"])
        say_slow_dtype(given["dtype"], device.type)
        haystack = Haystack.read(
            given["text"], load_tokenizer(given["model"]), field=given["field"], encoding=given["encoding"]
        )
        with console.status(f"loading {given['model']}"):
            subject = Subject(
                given["model"], names, dtype=getattr(torch, given["dtype"]), device=device, decode=given["decode"]
            )  # fmt: skip
        digests = {name: digest(path) for name, path in names.items()}
        evaluation = Evaluation(plan, subject, haystack, {"model": Path(given["model"]).name, "indexers": digests})
        evaluation.check()
        done = _progress(evaluation, given["output"], console)
        threads = "1 thread" if torch.get_num_threads() == 1 else f"{torch.get_num_threads()} threads"
        written = report.write(given["output"], {**machine.facts(subject.model.device), "threads": threads})
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from None
    for task, table in written.tables.items():
        _show(report.TITLES.get(task, task), table)
    for path in written.files:
        typer.echo(str(path))
    if not done:
        console.print("Interrupted: the report covers the finished part. The same command resumes from here.")
    return 0 if done else 130


def _show(title: str, table: Any) -> None:
    """Prints one table of the report."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    shown = Table(title=title, title_justify="left", box=box.SIMPLE)
    for column in table.head:
        shown.add_column(column, no_wrap=True)
    for row in table.rows:
        shown.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 160).print(shown, markup=False)


def _name(path: Path) -> str:
    """The name of a folder of indexers: all runs of `streamkl distill` write one called ``indexers``."""
    path = path.absolute()
    return f"{path.parent.name}/{path.name}" if path.name == "indexers" else path.name


def _device(name: str) -> Any:
    """The device of a name.

    Raises:
        ValueError: There is none.
    """
    import torch

    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device is cpu or cuda: got {name!r}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no GPU here")
    return device


def _progress(evaluation: Any, output: Path, console: Any) -> bool:
    """Runs under a progress bar; False if the user stopped it."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.description}")
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as progress, _logged(progress, console):
        try:
            evaluation.run(output, progress)
        except KeyboardInterrupt:
            return False
    return True


@contextmanager
def _logged(progress: Any, console: Any, every: float = 60.0) -> Iterator[None]:
    """Prints a line every so often where there is no terminal to draw a bar on."""
    ended = threading.Event()

    def tell() -> None:
        while not ended.wait(every):
            for task in progress.tasks:
                console.print(f"{task.completed:.0f} of {task.total:.0f}, {task.description}", markup=False)

    thread = threading.Thread(target=tell, daemon=True)
    if not console.is_terminal:
        thread.start()
    try:
        yield
    finally:
        ended.set()


def _plan(given: dict[str, Any]) -> tuple[Any, dict[str, Path]]:
    """The plan, and the folders of indexers by name.

    Raises:
        ValueError: A name or a number is not allowed.
    """
    from streamkl.evaluation.methods import SELECTORS
    from streamkl.evaluation.plan import Plan

    for option, allowed in (("decode", ("dense", "sparse")), ("dtype", ("bfloat16", "float16", "float32"))):
        if given[option] not in allowed:
            raise ValueError(f"--{option} is one of {', '.join(allowed)}: got {given[option]!r}")
    selectors = [] if given["selectors"] == ["none"] else given["selectors"]
    for selector in selectors:
        if selector not in SELECTORS:
            raise ValueError(f"--selectors are of {', '.join(SELECTORS)}, or none: got {selector!r}")
    if given["output"].exists() and not given["output"].is_dir():
        raise ValueError(f"--output {given['output']} is a file: it names a folder")
    paths = dict.fromkeys(given["indexers"])
    alone = len({_name(path) for path in paths}) == len(paths)
    names = {_name(path) if alone else str(path): path for path in paths}
    for name in ("dense", *SELECTORS):
        if name in names:
            raise ValueError(f"--indexers {names[name]} has the name of another method: rename the folder")
    for path in paths:
        if not path.is_dir():
            raise ValueError(f"--indexers {path}: there is no such folder")
    numbers = {name: tuple(given[name]) for name in ("tasks", "lengths", "budgets", "query_blocks")}
    rest = {name: given[name] for name in ("contexts", "segments", "layer_segments", "seed")}
    return Plan(**numbers, selectors=(*selectors, *names), **rest), names
