"""``streamkl tokenize``: text to token shards, with a progress bar."""

from __future__ import annotations

import os
from pathlib import Path

import typer

from streamkl.cli.errors import UserError
from streamkl.cli.hub import check_model
from streamkl.extras import how_to_install


def tokenize(
    model: str = typer.Option(..., help="The model whose tokenizer is used: a folder, or a name on the hub."),
    text: list[str] = typer.Option(  # noqa: B008
        ..., help="A file of text, a .jsonl file, a folder of such, or dataset:NAME@SPLIT; one or several."
    ),
    output: Path = typer.Option(..., help="The folder of token shards; `streamkl distill --text` takes it."),  # noqa: B008
    field: str = typer.Option("text", help="The field of a JSONL line or of a dataset's row that has the text."),
    encoding: str = typer.Option("utf-8", help="The encoding of files of text."),
    workers: int = typer.Option(0, min=0, help="Processes that tokenize; one per core if 0."),
    shard_tokens: int = typer.Option(
        1 << 27, min=1, help="A shard ends with the piece of a million characters that makes it as long."
    ),
) -> None:
    """Tokenizes text once, in parallel, into shards that training runs read piece by piece.

    The same command resumes after an interruption.
    """
    try:
        check_model(model)
    except ValueError as error:
        raise UserError(str(error)) from None
    try:
        from streamkl.distillation.tokenizing import Progress, expand, whole_shards
        from streamkl.distillation.tokenizing import tokenize as make
    except ImportError as error:
        raise UserError(f"tokenizing needs transformers: {how_to_install('hf')} ({error})") from None
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    try:
        sources = [Path(source) for source in expand(text)]
        known = all(source.is_file() for source in sources)
        total = sum(source.stat().st_size for source in sources) if known else None
        with Bar(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task("reading", total=total)

            if whole := whole_shards(output):
                bar.console.print(f"{output} has {whole} whole shards: reading goes on after them.")

            def tell(done: Progress) -> None:
                bar.update(task, completed=done.characters, description=f"{done.tokens:,} tokens, {done.shards} shards")

            done = make(
                model, text, output, field=field, encoding=encoding, workers=workers or os.cpu_count() or 1,
                shard_tokens=shard_tokens, tell=tell,
            )  # fmt: skip
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from None
    except KeyboardInterrupt:
        typer.echo("Stopped: the same command resumes after the last whole shard.", err=True)
        raise typer.Exit(130) from None
    typer.echo(f"{output} has {done.tokens:,} tokens in {done.shards} shards, of {done.characters:,} characters.")
