"""FLOP formulas for ``torch.utils.flop_counter``: products over the allowed pairs, two FLOPs per multiply-add.

``import streamkl.flops`` registers them; do so before a ``FlopCounterMode`` is made. ``import streamkl`` leaves it out,
because the counter loads triton.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from streamkl.ops import bound
from streamkl.problem import Sequence, Support


def allowed_pairs(support: Support) -> int:
    """How many pairs of a row and a key one head has, over the whole batch.

    Where keys are selected, every live row has ``K`` pairs, padding included.
    """
    if support.topk is not None:
        rows = (last - first for first, last in map(support.live_rows, support.sequences()))
        return sum(rows) * support.topk.shape[3]
    return sum(_pairs(support, seq) for seq in support.sequences())


def _pairs(support: Support, seq: Sequence) -> int:
    rows = torch.arange(*support.live_rows(seq), device="cpu") + seq.diagonal
    first = torch.zeros_like(rows) if support.left is None else (rows - support.left).clamp_min(0)
    last = (
        torch.full_like(rows, seq.k_len) if support.right is None else (support.last_key(rows) + 1).clamp_max(seq.k_len)
    )
    return int((last - first).sum())


def _flops(operator: str, formula: Any, *args: Any, out_val: Any = None) -> int:
    return formula(bound(operator, args))


def _logsumexp(given: Any) -> int:
    return _product(given.q, _pairs_of(given.q, given.k, given))


def _forward(given: Any) -> int:
    return _products(given, 1, 1)


def _train(given: Any) -> int:
    return _products(given, 1, 3)


def _rows_backward(given: Any) -> int:
    return _products(given, 3 if given.want_a else 1, 3 if given.want_b else 1)


def _products(given: Any, of_a: int, of_b: int) -> int:
    """FLOPs of ``of_a`` products per tile on side ``a`` and ``of_b`` on side ``b``."""
    pairs = _pairs_of(given.b_q, given.b_k, given)
    return of_a * _product(given.a_q, pairs) + of_b * _product(given.b_q, pairs)


def _pairs_of(q: Tensor, k: Tensor, given: Any) -> int:
    return allowed_pairs(
        Support.of(q, k, given.left, given.right, given.cu_seqlens_q, given.cu_seqlens_k, given.topk, given.key_span)
    )  # fmt: skip


def _product(q: Tensor, pairs: int) -> int:
    """FLOPs of one product of all heads."""
    return 2 * pairs * q.shape[1] * q.shape[3]


for _name, _formula in {
    "logsumexp": _logsumexp,
    "paired_rows": _forward,
    "mixture_rows": _forward,
    "train": _train,
    "rows_backward": _rows_backward,
}.items():
    _op = getattr(torch.ops.streamkl, _name)
    register_flop_formula(_op, get_raw=True)(functools.partial(_flops, _name, _formula))
