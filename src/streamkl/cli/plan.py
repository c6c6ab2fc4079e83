"""``streamkl plan``: memory, traffic and time of a distillation step on paper, and the flags to use."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from streamkl.cli.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from streamkl.plan import Plan

HARDWARE = "Assumptions"


def plan(
    model: str = typer.Option(..., help="The folder of a model, or its config.json."),
    tokens: str = typer.Option(..., help="Tokens of a sequence: 4096, 128K, 1M."),
    gpus: int = typer.Option(1, min=1, help="GPUs, one rank each."),
    batch: int = typer.Option(1, min=1, help="Sequences of a step, on each group of ranks that shares them."),
    heads: int = typer.Option(1, min=1, help="Index heads; those of the model if it has indexers."),
    head_dim: int = typer.Option(64, min=1, help="Width of an index head."),
    dtype: str = typer.Option("bfloat16", help="Dtype of the frozen model: bfloat16, float16 or float32."),
    context_parallel: int = typer.Option(0, min=0, help="Ranks that share a sequence; the fewest that fit if 0."),
    tensor_parallel: int = typer.Option(1, min=1, help="Ranks that share the teacher's heads and MLPs."),
    shard_teacher: bool | None = typer.Option(
        None, help="Shard the teacher's weights over all ranks; only where it has to be, if not given."
    ),
    latent: bool = typer.Option(
        False, help="Latent attention exchanges its latent, in a loop of your own: `streamkl distill` exchanges keys."
    ),
    memory: float = typer.Option(80.0, help="GB of a GPU.", rich_help_panel=HARDWARE),
    headroom: float = typer.Option(
        0.1, help="Share of it for the allocator, kernels and the process itself.", rich_help_panel=HARDWARE
    ),
    flops: float = typer.Option(989.0, help="TFLOP/s of a GPU.", rich_help_panel=HARDWARE),
    projections: float = typer.Option(0.45, help="Share of it in projections and MLPs.", rich_help_panel=HARDWARE),
    attention: float = typer.Option(0.5, help="Share of it in the teacher's attention.", rich_help_panel=HARDWARE),
    loss: float = typer.Option(0.3, help="Share of it in the passes of the loss.", rich_help_panel=HARDWARE),
    bandwidth: float = typer.Option(350.0, help="GB/s that a GPU receives from its node.", rich_help_panel=HARDWARE),
    node_bandwidth: float = typer.Option(
        40.0, help="GB/s that a GPU receives from other nodes.", rich_help_panel=HARDWARE
    ),
    node: int = typer.Option(8, help="GPUs of a node.", rich_help_panel=HARDWARE),
    as_json: bool = typer.Option(False, "--json", help="Print all figures as JSON."),
    output: Path | None = typer.Option(None, help="Write all figures to this .json file too."),  # noqa: B008
) -> None:
    """Plans a distillation from a model's config: memory per rank, traffic, time on paper, and the flags to use.

    Memory and traffic are formulas that tests compare with counted bytes. Times are arithmetic at assumed speeds:
    nothing was measured. Exits with 1 if no layout fits.
    """
    from streamkl.plan import Assumptions, Run, choose, read
    from streamkl.plan.run import parse_tokens

    try:
        teacher = read(model)
        own = (teacher.index_heads, teacher.index_dim) if teacher.index_heads else (heads, head_dim)
        run = Run(
            parse_tokens(tokens), batch, gpus, max(context_parallel, 1), tensor_parallel, index_heads=own[0],
            index_dim=own[1], dtype=dtype, latent=latent,
        )  # fmt: skip
        given = Assumptions(
            memory, headroom, flops, projections, attention, loss, bandwidth, node_bandwidth, node
        )  # fmt: skip
        found = choose(teacher, run, given, context=context_parallel or None, sharded=shard_teacher)
    except ValueError as error:
        raise UserError(str(error)) from None
    text = json.dumps(found.to_dict(), indent=1)
    if output is not None:
        try:
            output.write_text(text + "\n")
        except OSError as error:
            raise UserError(f"the plan cannot be written: {error}") from None
    if as_json:
        typer.echo(text)
    else:
        from rich.console import Console

        show(found, Console(), model)
    sys.exit(0 if found.fits else 1)


def show(found: Plan, console: Console, path: str) -> None:
    """Prints a plan of the model at a path."""
    from rich.table import Table

    run, model, given = found.run, found.model, found.assumptions
    of = found.memory
    layout = f"{run.data} x {run.context}" + (f" x {run.tensor}" if run.tensor > 1 else "")
    console.print(
        f"{model.name}, {_weights(model.weights)} frozen weights, {model.learning} indexers of "
        f"{run.index_heads} x {run.index_dim}; {run.tokens:,} tokens on {run.ranks} GPUs: {layout} (data x context"
        f"{' x tensor' if run.tensor > 1 else ''} parallel){', teacher sharded' if run.sharded else ''}",
        highlight=False,
    )
    rows = Table("memory per rank", "GB", title_justify="left")
    rows.add_row("teacher", _giga(of.teacher))
    rows.add_row("indexers, gradients, optimizer", _giga(of.indexers))
    for name, size in of.moments.items():
        rows.add_row(f"  {name}{', the peak of a step' if name == of.moment else ''}", _giga(size))
    if of.gathered:
        rows.add_row("sharded layers while they are whole", _giga(of.gathered))
    rows.add_row("peak", f"{_giga(of.peak)} of {given.memory:g}", style="bold")
    console.print(rows)
    layer, traffic = found.traffic.layer, found.traffic
    rows = Table("received by a rank", "MB", title_justify="left")
    for name, size in (
        ("keys of a layer", layer.keys), ("values of a layer", layer.values),
        ("index keys of a layer", layer.index_keys), ("gradients of index keys of a layer", layer.gradients),
        ("all layers, per step", traffic.learning), ("the teacher's weights, per step", traffic.weights),
        ("gradients of the indexers, per step", traffic.gradients),
        ("hidden states and heads, per step", traffic.heads),
    ):  # fmt: skip
        if size:
            rows.add_row(name, f"{size / 1e6:,.1f}")
    if rows.row_count:
        console.print(rows)
    work, time = found.arithmetic, found.seconds
    rows = Table("a step of a rank", "TFLOP", "s, assumed", title_justify="left")
    rows.add_row("projections and MLPs", _tera(work.projections), f"{time.projections:.2f}")
    rows.add_row("teacher's attention", _tera(work.attention), f"{time.attention:.2f}")
    rows.add_row("LSE of the teacher, loss and gradients", _tera(work.lse + work.loss), f"{time.loss:.2f}")
    rows.add_row("keys", "", f"{time.keys:.2f}")
    rows.add_row("weights, gradients, heads", "", f"{time.rest:.2f}")
    rows.add_row("step", "", f"{time.step:.2f}", style="bold")
    console.print(rows)
    console.print(
        f"{found.tokens_per_second:,.0f} tokens/s, {found.gpu_hours_per_billion:,.0f} GPU-hours per billion tokens, if "
        f"a GPU has {given.flops:g} TFLOP/s, used to {given.projections:.0%} in projections, {given.attention:.0%} in "
        f"attention and {given.loss:.0%} in the loss; if it receives {given.bandwidth:g} GB/s within a node of "
        f"{given.node} and {given.node_bandwidth:g} GB/s between nodes; and nothing overlaps. Assumed, not measured.",
        highlight=False,
    )
    for line in advice(found, path):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def advice(found: Plan, path: str) -> list[str]:
    """What to do with the model at a path: the command, or what would make it fit."""
    run = found.run
    if not found.fits:
        usable = found.assumptions.usable
        return [
            f"It does not fit: the smallest peak is {found.memory.peak / 1e9:.1f} GB, and a GPU has "
            f"{usable / 1e9:.1f} GB without the headroom."
        ]
    launcher = "streamkl distill" if run.ranks == 1 else f"torchrun {_launch(found)} -m streamkl distill"
    file = Path(path)  # a config may lie apart from its model
    folder = (
        shlex.quote(path) if file.is_dir() else shlex.quote(str(file.parent)) if file.name == "config.json" else "MODEL"
    )
    command = f"{launcher} --model {folder} --text TEXT --output OUTPUT {' '.join(found.flags)}"
    if found.model.positions and run.tokens > found.model.positions:
        command = (
            f"The model was made for {found.model.positions:,} tokens, and `streamkl distill` refuses longer "
            f"sequences: change its RoPE and max_position_embeddings first. Then:\n{command}"
        )
    if run.latent:
        return ["`streamkl distill` does not exchange latents: this is a plan for a loop of your own."]
    if run.context == 1 and run.tensor == 1 and not run.sharded:
        alone = "One device is enough" if run.ranks == 1 else "One device is enough; the others train on other text"
        return [f"{alone}: nothing is sharded.", command]
    return [command]


def _launch(found: Plan) -> str:
    """The fewest nodes that have as many ranks each."""
    ranks = found.run.ranks
    nodes = next(n for n in range(-(-ranks // found.assumptions.node), ranks + 1) if ranks % n == 0)
    if nodes == 1:
        return f"--nproc-per-node {ranks}"
    return f"--nnodes {nodes} --nproc-per-node {ranks // nodes} --rdzv-backend c10d --rdzv-endpoint HOST:PORT"


def _weights(count: int) -> str:
    return f"{count / 1e9:.1f} billion" if count >= 1e8 else f"{count:,}"


def _giga(size: float) -> str:
    return f"{size / 1e9:,.2f}"


def _tera(count: float) -> str:
    return f"{count / 1e12:,.1f}"
