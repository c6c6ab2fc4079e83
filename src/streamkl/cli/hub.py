"""Models that are not a local folder."""

from __future__ import annotations

from pathlib import Path

import typer


def tell_of_hub(model: str) -> None:
    """Prints that a model is looked for on the hub, which may take long and fail for other reasons."""
    # The same rule as check_checkpoint, which cannot be imported without transformers.
    if not model.startswith((".", "~", "/")) and not Path(model).exists():
        typer.echo(f"There is no folder {model} here: it is looked for on the hub.", err=True)
