"""From variants to figures: compiled once, kept beside the CPU engine's builds, and read again in no time."""

from __future__ import annotations

import hashlib
import itertools
import json
import multiprocessing
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

from streamkl import cache
from streamkl.engines.triton.inspect import binary, budget
from streamkl.engines.triton.inspect.compiler import compile_launch
from streamkl.engines.triton.inspect.matrix import (
    ATTENTION_DIMS,
    ATTENTION_KINDS,
    DIMS,
    INDEX_DIMS,
    INDEX_KINDS,
    INDEXERS,
    KINDS,
    LISTED_KINDS,
    Variant,
    launches,
)
from streamkl.engines.triton.launch import Launch

READ = ("binary.py", "budget.py", "compiler.py")
"""The modules beside this one that figures depend on: how a kernel is compiled, and what is read of it."""


class Figures(NamedTuple):
    """One kernel of a variant: how it was cut, and what its binary says."""

    variant: str
    arch: str
    kind: str
    kernel: str
    config: str
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


def variants(targets: Iterable[str] = tuple(budget.TARGETS), quick: bool = False) -> list[Variant]:
    """What is compiled: bfloat16, aligned and not, and float16 where its kernels differ, in those of gradients.

    Quick leaves the wide heads out, of the targets all but one of each kind of tensor core, and on two of these the
    heads of 64, but for the kinds that have no wider ones.
    """
    found = []
    for arch in targets:
        if quick and arch not in ("sm_80", "sm_90", "sm_100", "gfx942"):
            continue
        for kind, dims in itertools.product(KINDS, DIMS):
            if kind.endswith("_both") and max(dims) > 64:
                continue  # both sides' gradients are made apart
            narrow = dims == (64, 64) and (arch in ("sm_90", "gfx942") or kind.endswith("_both"))
            if quick and not narrow and dims != (128, 128):
                continue
            found.append(Variant(arch, kind, dims, torch.bfloat16, True))
            if dims in ((64, 64), (128, 128)) and not quick:
                found.append(Variant(arch, kind, dims, torch.bfloat16, True, worst=True))
            if quick and (dims != (128, 128) or arch != "sm_90"):
                continue
            gradient = kind not in ("lse", "paired", "mixture")
            found.append(Variant(arch, kind, dims, torch.float16 if gradient else torch.bfloat16, False))
            if gradient and not quick:
                found.append(Variant(arch, kind, dims, torch.float16, True))
        found += _indexers(arch, quick) + _listed(arch, quick) + _attention(arch, quick)
    return found


def _indexers(arch: str, quick: bool) -> list[Variant]:
    """The same for indexers; other dtypes and misaligned ones with many heads alone, whose kernels have more to do."""
    found = []
    for kind, dims, indexer in itertools.product(INDEX_KINDS, INDEX_DIMS, INDEXERS):
        if kind == "lse_index" and (dims[0] != dims[1] or indexer == INDEXERS[0]):
            continue  # of one side, and one head without a weight is a head like any other
        if quick and (kind not in ("mixture_index", "train_index") or dims != (128, 128) or indexer != INDEXERS[-1]):
            continue
        found.append(Variant(arch, kind, dims, torch.bfloat16, True, indexer))
        if quick or indexer != INDEXERS[-1]:
            continue
        gradient = kind not in ("lse_index", "mixture_index")
        found.append(Variant(arch, kind, dims, torch.float16 if gradient else torch.bfloat16, False, indexer))
        if gradient:
            found.append(Variant(arch, kind, dims, torch.float16, True, indexer))
    return found


def _listed(arch: str, quick: bool) -> list[Variant]:
    """The same over keys that queries name: one head of an indexer, or many, and head by head."""
    one, many = (Variant(arch, "", dims, torch.bfloat16, True) for dims in INDEX_DIMS)
    one, many = one._replace(indexer=INDEXERS[0]), many._replace(indexer=INDEXERS[-1])
    if quick:
        found = [many._replace(kind="train_listed")]
        return [one._replace(kind="mixture_listed"), *found] if arch in ("sm_90", "gfx942") else found
    found = []
    for kind in LISTED_KINDS:
        gradient = kind.startswith(("backward", "train"))
        per_head = [Variant(arch, kind, (dim, dim), torch.bfloat16, True) for dim in (64, 128)]
        if kind in ("paired_listed", "backward_listed"):
            found += per_head
        if kind == "backward_both_listed":
            found += per_head[:1]
        if kind in ("paired_listed", "backward_both_listed"):
            continue
        found += [variant._replace(kind=kind) for variant in ((many,) if kind == "lse_index_listed" else (one, many))]
        other = many._replace(kind=kind, dtype=torch.float16 if gradient else torch.bfloat16)
        found += [other._replace(aligned=False), other._replace(worst=True)]
    return found


def _attention(arch: str, quick: bool) -> list[Variant]:
    """Sparse attention; misaligned, and packed in a window, with heads of 128."""
    if quick:
        return [Variant(arch, "attention_block", (128, 128), torch.bfloat16, True)]
    found = [
        Variant(arch, kind, dims, torch.bfloat16, True)
        for kind, dims in itertools.product(ATTENTION_KINDS, ATTENTION_DIMS)
    ]
    return [
        *found, *(variant._replace(aligned=False) for variant in found if variant.dims == (128, 128)),
        *(variant._replace(worst=True) for variant in found if variant.dims == (128, 128)),
    ]  # fmt: skip


def figures(variant: Variant) -> list[Figures]:
    """The figures of each of a variant's kernels, compiled or remembered."""
    return [_remembered(variant, launch) for launch in launches(variant)]


def all_figures(wanted: Sequence[Variant], processes: int | None = None) -> Iterator[tuple[Variant, list[Figures]]]:
    """The figures of many variants as they are ready, compiled on all cores."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes or os.cpu_count(), context) as pool:
        running = {pool.submit(figures, variant): variant for variant in wanted}
        try:
            for done in as_completed(running):
                yield running[done], done.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _remembered(variant: Variant, launch: Launch) -> Figures:
    path = cache.directory() / "kernels" / f"{_key(variant, launch)}.json"
    if path.exists():
        return Figures(**json.loads(path.read_text()))
    made = _figures(variant, launch)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(made._asdict()))
    temporary.replace(path)
    return made


def _figures(variant: Variant, launch: Launch) -> Figures:
    constants = launch.constants
    config = f"{constants['ROWS']}x{constants['KEYS']}, {launch.warps} warps, {launch.stages} stages"
    name, limit = launch.kernel.__name__, budget.TARGETS[variant.arch].shared
    try:
        read = binary.read(compile_launch(launch, variant.arch, variant.aligned))
    except Exception as error:  # whatever the compiler says, the other kernels go on
        said = [f"does not compile: {str(error).splitlines()[0] if str(error) else type(error).__name__}"]
        return Figures(
            str(variant), variant.arch, variant.kind, name, config, 0, 0, 0, limit, {}, 0, 0, {}, 0, 0, 0, 0, said
        )
    half = variant.dtype != torch.float32
    clocks = budget.clocks(read, launch, variant.arch)
    return Figures(
        str(variant), variant.arch, variant.kind, name, config, read.registers, read.spills, read.shared, limit,
        read.mma, read.exp, read.loop.instructions, read.loop.mix, *clocks, clocks.ceiling,
        budget.violations(read, launch, variant.arch, half),
    )  # fmt: skip


def _key(variant: Variant, launch: Launch) -> str:
    """Changes with the kernel and all that it calls, how it is cut, its arguments, Triton, and what is read of it."""
    arguments = {name: _described(value) for name, value in launch.arguments.items()}
    cut = (launch.kernel.cache_key, arguments, launch.constants, launch.warps, launch.stages)
    digest = hashlib.sha256(f"{triton.__version__} {variant} {cut}".encode())
    for name in READ:
        digest.update((Path(__file__).parent / name).read_bytes())
    return digest.hexdigest()[:24]


def _described(value: Any) -> Any:
    """What a kernel is compiled for of an argument: of a tensor, its dtype."""
    if isinstance(value, tuple):
        return tuple(_described(x) for x in value)
    return str(value.dtype) if isinstance(value, torch.Tensor) else value
