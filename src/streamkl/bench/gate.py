"""The gate: before anything is timed, the engine must satisfy the accuracy rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import streamkl
from streamkl.bench.cells import Cell
from streamkl.testing import STUDENT, Case, IndexerHeads, check_accuracy, make_case, make_indexer_case

TOKENS = 645
"""Tokens of the problem that stands for a cell: several tiles of rows and keys and a remainder, cheap in float64."""


class RedGateError(RuntimeError):
    """The engine is wrong in a cell; the message says in which, and by how much."""


def check(cell: Cell, backend: str, device: torch.device, threads: int) -> float:
    """Holds a forward, and a forward and backward, of the cell's layout to the accuracy rule.

    Returns:
        The largest ratio of an error to its bound, at most 1.

    Raises:
        RedGateError: The rule is broken.
    """
    torch.set_num_threads(threads)
    worst = 0.0
    for wanted in (cell.wanted,) if cell.indexer else ((), cell.wanted or STUDENT):
        case, function = _stand_in(cell, wanted, device)
        errors = check_accuracy(case, backend, function)
        if not errors.worst <= 1:
            raise RedGateError(f"{cell}, {threads} threads, {_what(wanted)}: {errors}")
        worst = max(worst, errors.worst)
    return worst


def _stand_in(cell: Cell, wanted: tuple[str, ...], device: torch.device) -> tuple[Case, Callable[..., Tensor]]:
    """The small problem that stands for a cell, and the function that runs it."""
    dtype, h = getattr(torch, cell.dtype), cell.heads
    same: dict[str, Any] = {
        "dims": cell.dims, "dtypes": (dtype, dtype), "batch": 1, "tokens": (TOKENS, TOKENS // cell.key_span),
        "causal": cell.causal, "guard": False, "device": device,
    }  # fmt: skip
    if not cell.indexer:
        return make_case(heads=h, wanted=wanted, **same), streamkl.attention_kl
    weight_dtype = torch.float32 if cell.weighted else None
    heads = IndexerHeads(h.teacher, h.teacher_kv, h.student)
    of_keys = {"teacher_lse": True, "teacher_rest": cell.rest, "key_span": cell.key_span}
    return make_indexer_case(heads=heads, weight_dtype=weight_dtype, **of_keys, **same), streamkl.indexer_kl


def key(cell: Cell) -> tuple[object, ...]:
    """Cells with the same key pass or fail together."""
    return cell.heads, cell.dims, cell.mask, cell.dtype, cell.wanted or STUDENT, cell.indexer, cell.key_span, cell.rest


def _what(wanted: tuple[str, ...]) -> str:
    return f"gradients to {', '.join(wanted)}" if wanted else "forward alone"
