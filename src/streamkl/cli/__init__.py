"""The command line, ``streamkl``: one module a command, loaded when it is called."""

from __future__ import annotations

import sys
from importlib import metadata

import typer

from streamkl.cli import bench

app = typer.Typer(
    help="Attention distillation by KL divergence, tile by tile.", no_args_is_help=True, add_completion=False
)


app.add_typer(bench.app, name="bench")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"streamkl {metadata.version('streamkl')}")
        raise typer.Exit


@app.callback()
def main(
    version: bool = typer.Option(False, "--version", callback=_show_version, is_eager=True, help="Print the version."),
) -> None:
    """Attention distillation by KL divergence, tile by tile, in O(N) memory."""


@app.command()
def build(force: bool = typer.Option(False, help="Build it again even if the cache has it.")) -> None:
    """Builds the CPU engine now instead of on first use, and says where it is kept."""
    from streamkl.engines.cpu.build import BuildError
    from streamkl.engines.cpu.build import build as build_engine

    try:
        typer.echo(str(build_engine(force)))
    except BuildError as error:
        sys.exit(str(error))


@app.command()
def doctor() -> None:
    """Says which engine each device gets and why, checks it, and says what is missing and how to get it.

    Exits with 1 if something must be mended before streamkl can work.
    """
    from streamkl.cli.doctor import run

    sys.exit(run())
