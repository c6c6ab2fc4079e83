"""``streamkl finetune``: flags of the settings' names, or a YAML file with keys of the same names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import typer

from streamkl.cli import training
from streamkl.distillation.settings import FinetuneSettings

DOC = """Trains a model with sparse attention on text, and its indexers on the keys that they select.

The stage after `streamkl distill`: the language-model loss trains the model, KL divergence its indexers. Runs alone, or
under `torchrun -m streamkl finetune ...` on several processes.
"""


def command() -> Callable[..., None]:
    """The command, with a flag for each setting."""
    return training.command(
        FinetuneSettings, lambda settings: run(settings), "finetune", DOC
    )  # what `run` is when it is called


def run(settings: FinetuneSettings) -> None:
    """Trains, or prints an estimate; errors that a user can fix end in a message, not in a traceback."""
    training.check_inputs(settings)
    with training.told(settings):
        from streamkl.distillation.finetune import finetune, prepare

        if settings.dry_run:
            from streamkl.distillation.estimate import estimate

            said = estimate(settings, lambda: prepare(settings))
            if training.is_first():
                typer.echo(said)
            return
        result = finetune(settings)
    if training.is_first():
        training.say_figures(Path(settings.output), result.curves, result.skipped)
        typer.echo(f"The sparse model is in {result.model}.")
