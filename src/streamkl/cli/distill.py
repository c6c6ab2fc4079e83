"""``streamkl distill``: flags of the settings' names, or a YAML file with keys of the same names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import typer

from streamkl.cli import training
from streamkl.distillation.settings import Settings

DOC = """Trains indexers for a frozen model by KL divergence from its own attention, one per layer.

Runs alone, or under `torchrun -m streamkl distill ...` on several processes.
"""


def command() -> Callable[..., None]:
    """The command, with a flag for each setting."""
    return training.command(Settings, lambda settings: run(settings), "distill", DOC)  # what `run` is when it is called


def run(settings: Settings) -> None:
    """Trains, or prints an estimate; errors that a user can fix end in a message, not in a traceback."""
    training.check_inputs(settings)
    if training.is_first():
        _warn_of_large_topk(settings)
    with training.told(settings):
        from streamkl.distillation.run import distill, prepare

        if settings.dry_run:
            from streamkl.distillation.estimate import estimate

            said = estimate(settings, lambda: prepare(settings))
            if training.is_first():
                typer.echo(said)
                _warn_of_small_topk(settings)
            return
        result = distill(settings)
    if not training.is_first():
        return
    typer.echo(
        f"Indexers are in {result.indexers}: {settings.measured} keys per query block of {settings.query_block}."
    )
    _warn_of_small_topk(settings)
    if result.model is not None:
        typer.echo(f"The model with them is in {result.model}.")
    training.say_figures(Path(settings.output), result.curves, result.skipped)


def _warn_of_large_topk(settings: Settings) -> None:
    if settings.measured >= settings.length:
        typer.echo(
            f"Recall and mass say nothing: a top-k of {settings.measured} keys holds all of {settings.length} tokens.",
            err=True,
        )


def _warn_of_small_topk(settings: Settings) -> None:
    if settings.measured <= settings.query_block:
        typer.echo(
            f"A top-k of {settings.measured} keys shared by a query block of {settings.query_block} holds only keys "
            f"on the block's diagonal: select more keys, or use a smaller query block, where the indexers are used."
        )
