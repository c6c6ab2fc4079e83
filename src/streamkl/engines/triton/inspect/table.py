"""The rows of the table: which variants are compiled for a target."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch

from streamkl.engines.triton.inspect.budget import TARGETS
from streamkl.engines.triton.inspect.matrix import (
    ATTENTION_DIMS,
    ATTENTION_KINDS,
    COMPRESSED_KINDS,
    DIMS,
    GATHERED_KINDS,
    INDEX_DIMS,
    INDEX_KINDS,
    INDEXERS,
    KINDS,
    SELECTION_KINDS,
    Variant,
)

ALIKE = {"sm_89": "sm_86"}
"""Targets whose kernels are another's: the same tables of tiles, limits and instructions, and so the same PTX."""


def variants(targets: Iterable[str] = tuple(TARGETS), quick: bool = False) -> list[Variant]:
    """The variants to compile: bfloat16, aligned and not, and float16 in the gradients, where its kernels differ.

    Misaligned heads are read in chunks. So the kernels that sum over keys are the same for all head dims, and those of
    gradients for all teachers' dims: they have rows for heads of 128, and of 64, 128 and 256.
    ``quick`` leaves out wide heads, all but one target of each kind of tensor core, and on all but one of these targets
    heads of 64, except for kinds that have no wider ones. Of targets whose kernels are another's (`ALIKE`) the whole
    table has these rows, too.
    """
    found = []
    for arch in targets:
        if quick and arch not in ("sm_80", "sm_90", "sm_100", "gfx942"):
            continue
        found += _of_target(arch, quick or arch in ALIKE)
    return found


def _of_target(arch: str, quick: bool) -> list[Variant]:
    found = []
    for kind, dims in itertools.product(KINDS, DIMS):
        if kind.endswith("_both") and max(dims) > 64:
            continue  # the gradients of both sides are computed apart
        narrow = dims == (64, 64) and (arch == "sm_90" or kind.endswith("_both"))
        if quick and not narrow and dims != (128, 128):
            continue
        found.append(Variant(arch, kind, dims, torch.bfloat16, True))
        if dims in ((64, 64), (128, 128)) and not quick:
            found.append(Variant(arch, kind, dims, torch.bfloat16, True, worst=True))
        if quick and (dims != (128, 128) or arch != "sm_90" or kind not in ("mixture", "train_group")):
            continue
        gradient = kind not in ("lse", "paired", "mixture")
        if dims == (128, 128) or (gradient and dims[0] == dims[1]):
            found.append(Variant(arch, kind, dims, torch.float16 if gradient else torch.bfloat16, False))
        if gradient and not quick:
            found.append(Variant(arch, kind, dims, torch.float16, True))
    found += _indexers(arch, quick) + _gathered(arch, quick) + _compressed(arch, quick)
    return found + _attention(arch, quick) + _selection(arch, quick)


def _indexers(arch: str, quick: bool) -> list[Variant]:
    """The same for indexers; other dtypes and misaligned tensors only with many heads, whose kernels do more."""
    found = []
    for kind, dims, indexer in itertools.product(INDEX_KINDS, INDEX_DIMS, INDEXERS):
        if kind == "lse_index" and (dims[0] != dims[1] or indexer == INDEXERS[0]):
            continue  # it has one side, and one head without a weight is like any other head
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


def _gathered(arch: str, quick: bool) -> list[Variant]:
    """The same over selected keys: one head of an indexer, or many, and head by head."""
    one, many = (Variant(arch, "", dims, torch.bfloat16, True) for dims in INDEX_DIMS)
    one, many = one._replace(indexer=INDEXERS[0]), many._replace(indexer=INDEXERS[-1])
    if quick:
        found = [many._replace(kind="train_gathered")]
        return [one._replace(kind="mixture_gathered"), *found] if arch in ("sm_90", "gfx942") else found
    found = []
    for kind in GATHERED_KINDS:
        gradient = kind.startswith(("backward", "train"))
        per_head = [Variant(arch, kind, (dim, dim), torch.bfloat16, True) for dim in (64, 128)]
        if kind in ("paired_gathered", "backward_gathered"):
            found += per_head
        if kind == "backward_both_gathered":
            found += per_head[:1]
        if kind in ("paired_gathered", "backward_both_gathered"):
            continue
        found += [variant._replace(kind=kind) for variant in ((many,) if kind == "lse_index_gathered" else (one, many))]
        other = many._replace(kind=kind, dtype=torch.float16 if gradient else torch.bfloat16)
        found += [other._replace(aligned=False), other._replace(worst=True)]
    return found


def _compressed(arch: str, quick: bool) -> list[Variant]:
    """The same for keys that stand for several tokens, with many index heads."""
    kinds = ("train_index_max",) if quick else COMPRESSED_KINDS
    return [Variant(arch, kind, (128, 128), torch.bfloat16, True, INDEXERS[-1]) for kind in kinds]


def _attention(arch: str, quick: bool) -> list[Variant]:
    """Sparse attention and its backward; misaligned, and packed in a window, with heads of 128."""
    if quick:
        kinds = ("attention_block", "attention_backward_block") if arch in ("sm_90", "gfx942") else ("attention_block",)
        return [Variant(arch, kind, (128, 128), torch.bfloat16, True) for kind in kinds]
    found = [
        Variant(arch, kind, dims, torch.bfloat16, True)
        for kind, dims in itertools.product(ATTENTION_KINDS, ATTENTION_DIMS)
    ]
    others = [
        variant._replace(dtype=torch.float16 if "backward" in variant.kind else torch.bfloat16)
        for variant in found
        if variant.dims == (128, 128)
    ]
    found += [variant._replace(aligned=False) for variant in others]
    return found + [variant._replace(worst=True) for variant in others]


def _selection(arch: str, quick: bool) -> list[Variant]:
    """Selection by one index head or many; misaligned, and packed in a window, with many."""
    if quick:
        return [Variant(arch, "index_topk_block", (128, 128), torch.bfloat16, True, INDEXERS[-1])]
    found = []
    for kind in SELECTION_KINDS:
        one, many = (
            Variant(arch, kind, dims, torch.bfloat16, True, indexer)
            for dims, indexer in (((64, 64), INDEXERS[0]), ((128, 128), INDEXERS[-1]))
        )
        found += [one, many, many._replace(aligned=False), many._replace(worst=True)]
    return found
