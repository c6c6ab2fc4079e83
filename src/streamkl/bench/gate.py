"""The gate: before anything is timed, the engine must be right, by the project's own accuracy rule."""

from __future__ import annotations

import torch

import streamkl
from streamkl.bench.cells import Cell
from streamkl.testing import STUDENT, IndexerHeads, check_accuracy, make_case, make_indexer_case

TOKENS = 645
"""Tokens of the problem that stands for a cell: several tiles each way and a remainder, small enough for float64."""


class RedGateError(RuntimeError):
    """The engine is wrong in a cell; the message says in which, and by how much."""


def check(cell: Cell, backend: str, device: torch.device, threads: int) -> float:
    """Holds a forward, and a forward and backward, of the cell's layout to the accuracy rule.

    Returns:
        The largest ratio of an error to what the rule allows, at most 1.

    Raises:
        RedGateError: The rule is broken.
    """
    torch.set_num_threads(threads)
    dtype = getattr(torch, cell.dtype)
    worst = 0.0
    if cell.indexer:
        heads = IndexerHeads(cell.heads.teacher, cell.heads.teacher_kv, cell.heads.student)
        case = make_indexer_case(
            heads=heads, dims=cell.dims, dtypes=(dtype, dtype), weight_dtype=torch.float32 if cell.weighted else None,
            batch=1, tokens=(TOKENS, TOKENS), teacher_lse=True, causal=cell.causal, guard=False, device=device,
        )  # fmt: skip
        errors = check_accuracy(case, backend, streamkl.indexer_kl)
        if not errors.worst <= 1:
            raise RedGateError(f"{cell}, {threads} threads: {errors}")
        return errors.worst
    for wanted in ((), cell.wanted or STUDENT):
        case = make_case(
            heads=cell.heads, dims=cell.dims, dtypes=(dtype, dtype), batch=1, tokens=(TOKENS, TOKENS), wanted=wanted,
            causal=cell.causal, guard=False, device=device,
        )  # fmt: skip
        errors = check_accuracy(case, backend)
        if not errors.worst <= 1:
            raise RedGateError(f"{cell}, {threads} threads, {_what(wanted)}: {errors}")
        worst = max(worst, errors.worst)
    return worst


def key(cell: Cell) -> tuple[object, ...]:
    """Cells with the same key pass or fail together."""
    return cell.heads, cell.dims, cell.mask, cell.dtype, cell.wanted or STUDENT, cell.indexer


def _what(wanted: tuple[str, ...]) -> str:
    return f"gradients to {', '.join(wanted)}" if wanted else "forward alone"
