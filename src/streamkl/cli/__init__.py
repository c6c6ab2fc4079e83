"""The command line, ``streamkl``: one module per command, loaded when it is called."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

import typer

from streamkl.cli import bench, distill, evaluate, finetune, lm_eval, plan, tokenize
from streamkl.cli.errors import UserError
from streamkl.cli.many import ManyValues

app = typer.Typer(
    help="Attention distillation by KL divergence, tile by tile.", no_args_is_help=True, add_completion=False
)


app.add_typer(bench.app, name="bench")
app.command(name="distill", cls=ManyValues)(distill.command())
app.command(name="finetune", cls=ManyValues)(finetune.command())
app.command(cls=ManyValues)(tokenize.tokenize)
app.command()(plan.plan)
app.command(cls=ManyValues)(evaluate.oracle)
app.command(cls=ManyValues)(evaluate.evaluate)
app.command("lm-eval", context_settings=lm_eval.SETTINGS)(lm_eval.lm_eval)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"streamkl {metadata.version('streamkl')}")
        raise typer.Exit


@app.callback()
def main(
    version: bool = typer.Option(False, "--version", callback=_show_version, is_eager=True, help="Print the version."),
) -> None:
    """Attention distillation by KL divergence, tile by tile, in O(N) memory."""


@app.command(cls=ManyValues)
def build(force: bool = typer.Option(False, help="Build it again even if the cache has it.")) -> None:
    """Builds the CPU engine now instead of on first use, and prints its path."""
    from streamkl.engines.cpu.build import BuildError
    from streamkl.engines.cpu.build import build as build_engine

    try:
        typer.echo(str(build_engine(force)))
    except BuildError as error:
        raise UserError(str(error)) from None


@app.command()
def doctor() -> None:
    """Prints which engine each device gets and why, checks it, and says what is missing and how to get it.

    Exits with 1 if something must be fixed before streamkl can work.
    """
    from streamkl.cli.doctor import run

    sys.exit(run())


@app.command(cls=ManyValues)
def kernels(
    target: list[str] = typer.Option([], help="Only this target, such as sm_90; one or several."),  # noqa: B008
    kind: list[str] = typer.Option([], help="Only this kind of kernel, such as paired; one or several."),  # noqa: B008
    dim: list[int] = typer.Option([], help="Only teachers with heads of this width; one or several."),  # noqa: B008
    quick: bool = typer.Option(False, help="Head dim 128 on four targets, 64 on two of them, as in CI."),
    check: bool = typer.Option(False, help="Exit with 1 if a kernel is over its budget."),
    output: Path | None = typer.Option(None, help="Write the figures to this file too, .json or .md."),  # noqa: B008
) -> None:
    """Compiles every Triton kernel for GPUs that need not be present, and prints figures of the binaries.

    Registers, spills, shared memory, tensor-core instructions, and a static ceiling: an upper bound, not measured.
    """
    import os

    if os.environ.get("TRITON_INTERPRET") == "1":
        raise UserError("TRITON_INTERPRET=1 is set: nothing would be compiled")
    try:
        from streamkl.cli.kernels import run
    except ImportError as error:
        raise UserError(f"Triton compiles the kernels: pip install triton ({error})") from None
    sys.exit(run(target, kind, dim, quick, check, output))


@app.command(cls=ManyValues)
def selfcheck(
    device: str = typer.Option("cpu", help="cpu or cuda."),
    backend: str = typer.Option("auto", help="The engine."),
    seeds: int = typer.Option(300, help="How many seeded problems the accuracy check runs."),
    quick: bool = typer.Option(False, help="Small problems and few repetitions: shows that everything works."),
    vllm: bool = typer.Option(False, help="Check the plugin for vLLM instead, in vLLM's environment."),
    vllm_backend: str = typer.Option("", help="The attention backend of vLLM, with --vllm."),
    output: Path = typer.Option(Path("selfcheck"), help="Where the .json and .md files go."),  # noqa: B008
) -> None:
    """Checks correctness, determinism and memory on a device, then measures; writes a report that can be posted.

    Exits with 1 if a check failed; then nothing is measured.
    """
    import torch

    from streamkl import engines
    from streamkl.cli.selfcheck import run, run_vllm

    try:
        chosen = torch.device(device)
        if chosen.type == "cuda" and not torch.cuda.is_available():
            raise UserError("torch finds no GPU here; `streamkl doctor` says what it sees")
        engines.choose(backend, chosen)
    except (RuntimeError, ModuleNotFoundError) as error:
        raise UserError(str(error)) from None
    if vllm:
        sys.exit(run_vllm(vllm_backend, output))
    sys.exit(run(chosen, backend, seeds, quick, output))
