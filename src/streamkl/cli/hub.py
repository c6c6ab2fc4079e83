"""Models that are not a local folder."""

from __future__ import annotations

import typer

from streamkl.hub import check_path


def check_model(model: str) -> None:
    """Prints that a model is looked for on the hub, which may take long and fail for other reasons.

    Raises:
        ValueError: It is a path, and nothing is there.
    """
    if not check_path(model):
        typer.echo(f"There is no folder {model} here: it is looked for on the hub.", err=True)
