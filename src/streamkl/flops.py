"""FLOP formulas for ``torch.utils.flop_counter``: products over the allowed pairs, two FLOPs a multiply-add.

``import streamkl.flops`` registers them; do so before a ``FlopCounterMode`` is made. It is not part of ``import
streamkl``, because the counter loads triton.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from streamkl.ops import Options
from streamkl.problem import Sequence, Support


def allowed_pairs(support: Support) -> int:
    """How many pairs of a row and a key one head has, over the whole batch."""
    return sum(_pairs(support, seq) for seq in support.sequences())


def _pairs(support: Support, seq: Sequence) -> int:
    rows = torch.arange(*support.live_rows(seq)) + seq.diagonal
    first = torch.zeros_like(rows) if support.left is None else (rows - support.left).clamp_min(0)
    last = (
        torch.full_like(rows, seq.k_len) if support.right is None else (rows + support.right + 1).clamp_max(seq.k_len)
    )
    return int((last - first).sum())


def _without_output(formula: Any, *args: Any, out_val: Any = None, **kwargs: Any) -> int:
    return formula(*args, **kwargs)


def _logsumexp(q: Tensor, k: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, *args: Any) -> int:
    support = Support.of(q, k, *args[2:4], cu_seqlens_q, cu_seqlens_k)
    return 2 * allowed_pairs(support) * q.shape[1] * q.shape[3]


def _rows_backward(*args: Any) -> int:
    of_a, of_b = (3 if want else 1 for want in args[20:])
    return _products(args[6:12], Options(*args[12:20]), of_a, of_b)


def _products(tensors: tuple[Any, ...], options: Options, of_a: int, of_b: int) -> int:
    """FLOPs of ``of_a`` products a tile on side ``a`` and ``of_b`` on side ``b``."""
    a_q, _, b_q, b_k, *cu_seqlens = tensors
    pairs = allowed_pairs(Support.of(b_q, b_k, options.left, options.right, *cu_seqlens))
    return 2 * pairs * (of_a * a_q.shape[1] * a_q.shape[3] + of_b * b_q.shape[1] * b_q.shape[3])


for _name, _formula in {
    "logsumexp": _logsumexp,
    "paired_rows": lambda *args: _products(args[:6], Options(*args[6:]), 1, 1),
    "mixture_rows": lambda *args: _products(args[:6], Options(*args[8:]), 1, 1),
    "train": lambda *args: _products(args[:6], Options(*args[11:]), 1, 3),
    "rows_backward": _rows_backward,
}.items():
    _op = getattr(torch.ops.streamkl, _name)
    register_flop_formula(_op, get_raw=True)(functools.partial(_without_output, _formula))
