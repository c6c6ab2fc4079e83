"""From variants to figures of their binaries, checked against the budgets."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import NamedTuple

import torch

from streamkl.engines.triton.inspect import budget, kept
from streamkl.engines.triton.inspect.matrix import DIMS, Variant, launches
from streamkl.engines.triton.launch import Launch


class Figures(NamedTuple):
    """One kernel of a variant: its config and the figures of its binary; rows of equal IR have equal ``ir``."""

    variant: str
    arch: str
    kind: str
    kernel: str
    config: str
    ir: str
    registers: int
    spills: int
    shared: int
    shared_limit: int
    mma: dict[str, int]
    exp: int
    loop_instructions: int
    loop_mix: dict[str, int]
    mma_clocks: float
    issue_clocks: float
    exp_clocks: float
    ceiling: float
    broken: list[str]


def figures(variant: Variant) -> list[Figures]:
    """The figures of each of a variant's kernels, compiled or remembered."""
    return [_figures(variant, launch) for launch in launches(variant)]


def all_figures(wanted: Sequence[Variant], processes: int | None = None) -> Iterator[tuple[Variant, list[Figures]]]:
    """The figures of many variants as they are ready, compiled on all cores.

    Variants that may be the same kernel differ in the head dim only. They are ordered so that the first of them is
    done before the next one starts. Triton's own files, a megabyte per kernel, are not kept.
    """
    context = multiprocessing.get_context("spawn")
    order = sorted(wanted, key=lambda variant: DIMS.index(variant.dims) if variant.dims in DIMS else len(DIMS))
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(processes or os.cpu_count(), context, _compile_in, (folder,)) as pool,
    ):
        running = {pool.submit(figures, variant): variant for variant in order}
        try:
            for done in as_completed(running):
                yield running[done], done.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _compile_in(folder: str) -> None:
    os.environ["TRITON_CACHE_DIR"] = folder


def _figures(variant: Variant, launch: Launch) -> Figures:
    constants = launch.constants
    config = f"{constants['ROWS']}x{constants['KEYS']}, {launch.warps} warps, {launch.stages} stages"
    name, limit = launch.kernel.__name__, budget.TARGETS[variant.arch].shared
    row = (str(variant), variant.arch, variant.kind, name, config)
    try:
        ir, read = kept.binary_of(launch, variant.arch, variant.aligned)
    except Exception as error:  # whatever the compiler says, the other kernels are still compiled
        said = [f"does not compile: {str(error).splitlines()[0] if str(error) else type(error).__name__}"]
        return Figures(*row, "", 0, 0, 0, limit, {}, 0, 0, {}, 0, 0, 0, 0, said)
    half = variant.dtype != torch.float32
    clocks = budget.clocks(read, launch, variant.arch)
    return Figures(
        *row, ir, read.registers, read.spills, read.shared, limit, read.mma, read.exp, read.loop.instructions,
        read.loop.mix, *clocks, clocks.ceiling, budget.violations(read, launch, variant.arch, half),
    )  # fmt: skip
