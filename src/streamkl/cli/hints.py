"""Hints on stderr: what a command will do well, but slowly."""

from __future__ import annotations

import typer


def say_slow_dtype(dtype: str, device: str) -> None:
    """Says that float32 is faster, on a CPU that has no instructions for ``dtype``."""
    if device != "cpu" or dtype == "float32":
        return
    import torch

    from streamkl.engines import cpu

    if cpu.unsupported(torch.device("cpu")) is None and not cpu.multiplies(getattr(torch, dtype)):
        typer.echo(
            f"This CPU has no instructions for {dtype} and computes in float32: --dtype float32 saves the conversions, "
            "and takes about half the time.",
            err=True,
        )
