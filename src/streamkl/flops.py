"""FLOP formulas for ``torch.utils.flop_counter``: products over the allowed pairs, two FLOPs per multiply-add.

``import streamkl.flops`` registers them; do so before a ``FlopCounterMode`` is made. It is not part of ``import
streamkl``, because the counter loads triton.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from streamkl.ops import OPTIONS, STATS, TENSORS, Options, Tensors, divided
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
        torch.full_like(rows, seq.k_len) if support.right is None else (rows + support.right + 1).clamp_max(seq.k_len)
    )
    return int((last - first).sum())


def _without_output(formula: Any, *args: Any, out_val: Any = None, **kwargs: Any) -> int:
    return formula(*args, **kwargs)


def _logsumexp(q: Tensor, k: Tensor, w: Tensor | None, *args: Any) -> int:
    (topk, cu_seqlens_q, cu_seqlens_k), (_, _, _, left, right, *_) = divided(args, 3)
    support = Support.of(q, k, left, right, cu_seqlens_q, cu_seqlens_k, topk)
    return 2 * allowed_pairs(support) * q.shape[1] * q.shape[3]


def _forward(*args: Any) -> int:
    return _products(args[:TENSORS], args[-OPTIONS:], 1, 1)


def _train(*args: Any) -> int:
    return _products(args[:TENSORS], args[-OPTIONS:], 1, 3)


def _rows_backward(*args: Any) -> int:
    _, tensors, options, wanted = divided(args, 2 + STATS, TENSORS, OPTIONS)
    return _products(tensors, options, *(3 if want else 1 for want in wanted))


def _products(given: tuple[Any, ...], numbers: tuple[Any, ...], of_a: int, of_b: int) -> int:
    """FLOPs of ``of_a`` products per tile on side ``a`` and ``of_b`` on side ``b``."""
    a_q, _, b_q, b_k, _, topk, cu_seqlens_q, cu_seqlens_k = Tensors(*given)
    options = Options(*numbers)
    pairs = allowed_pairs(Support.of(b_q, b_k, options.left, options.right, cu_seqlens_q, cu_seqlens_k, topk))
    return 2 * pairs * (of_a * a_q.shape[1] * a_q.shape[3] + of_b * b_q.shape[1] * b_q.shape[3])


for _name, _formula in {
    "logsumexp": _logsumexp,
    "paired_rows": _forward,
    "mixture_rows": _forward,
    "train": _train,
    "rows_backward": _rows_backward,
}.items():
    _op = getattr(torch.ops.streamkl, _name)
    register_flop_formula(_op, get_raw=True)(functools.partial(_without_output, _formula))
