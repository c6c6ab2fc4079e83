"""Models that are no folder here."""

from __future__ import annotations

from pathlib import Path

import typer


def tell_of_hub(model: str) -> None:
    """Says that a model is looked for on the hub, which may take long and fail for other reasons than a wrong path."""
    # names are told from paths as by check_checkpoint, whose package cannot be imported without transformers
    if not model.startswith((".", "~", "/")) and not Path(model).exists():
        typer.echo(f"There is no folder {model} here: it is looked for on the hub.", err=True)
