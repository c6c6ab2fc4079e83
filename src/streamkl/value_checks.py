"""Checks that read the values of tensors: always of those on the CPU, elsewhere only under ``STREAMKL_CHECK=1``.

So no check synchronises, and ``torch.compile`` traces through: the operators call them, and what does their work.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import Tensor

TOPK_CHUNK = 1 << 17
"""How many indices are sorted at a time to see that none is there twice."""


def check_cu_seqlens(cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, nq: int, nk: int) -> None:
    """Checks that ``cu_seqlens`` start at 0, do not fall and end within the tensors."""
    for name, cu, tokens in (("cu_seqlens_q", cu_seqlens_q, nq), ("cu_seqlens_k", cu_seqlens_k, nk)):
        if cu is None or not may_read(cu):
            continue
        starts = cu.tolist()
        if starts[0] != 0:
            raise ValueError(f"{name} must start at 0: got {starts[0]}")
        for n in range(len(starts) - 1):
            if starts[n + 1] < starts[n]:
                raise ValueError(f"{name} must not fall: got {starts[n + 1]} after {starts[n]} at position {n + 1}")
        if starts[-1] > tokens:
            raise ValueError(f"{name} must end within the {tokens} tokens given: got {starts[-1]}")


def check_topk(
    topk: Tensor | None,
    nk: int,
    whose: str = "topk_indices",
    first_wrong_row: Callable[[Tensor, int], int] | None = None,
) -> None:
    """Checks that ``topk [B, topk_heads, Nq, K]`` holds keys from 0 to ``nk - 1``, or -1, and no key twice in a row.

    An engine may have a faster ``first_wrong_row`` than the one here, with the same result.
    """
    if topk is None or not may_read(topk) or topk.numel() == 0:
        return
    wrong = (first_wrong_row or _first_wrong_row)(topk, nk)
    if wrong < 0:
        return
    _, topk_heads, rows, _ = topk.shape
    row = topk[wrong // (topk_heads * rows), wrong // rows % topk_heads, wrong % rows].tolist()
    for key in row:
        if not -1 <= key < nk:
            raise ValueError(f"{whose} must be keys from 0 to {nk - 1}, or -1 for none: got {key}")
    twice = next(key for n, key in enumerate(row) if key >= 0 and key in row[:n])
    raise ValueError(f"{whose} must not have a key twice in a row: got {twice}")


def _first_wrong_row(topk: Tensor, nk: int) -> int:
    """The first row of ``topk [B, topk_heads, Nq, K]`` that breaks the rule of `check_topk`, or -1, by sorting."""
    step, before = max(1, TOPK_CHUNK // topk.shape[3]), 0
    for part in (part for batch in topk for head in batch for part in head.split(step)):
        keys = part.sort(-1).values
        twice = ((keys[:, 1:] == keys[:, :-1]) & (keys[:, 1:] >= 0)).any(-1)
        wrong = twice | (keys[:, 0] < -1) | (keys[:, -1] >= nk)
        if bool(wrong.any()):
            return before + int(wrong.nonzero()[0])
        before += len(part)
    return -1


def check_page_table(page_table: Tensor, cu_seqlens_k: Tensor, pages: int, page_size: int) -> None:
    """Checks that the page table has room for every sequence, and that the pages that they fill exist."""
    if not may_read(page_table) or not may_read(cu_seqlens_k):
        return
    filled = (cu_seqlens_k.diff() + (page_size - 1)) // page_size  # pages of each sequence
    if bool((filled > page_table.shape[1]).any()):
        longest, columns = int(cu_seqlens_k.diff().max()), page_table.shape[1]
        raise ValueError(
            f"page_table has room for {columns * page_size} keys of a sequence, in {columns} pages of {page_size}: got "
            f"a sequence of {longest} keys"
        )
    used = torch.arange(page_table.shape[1], device=page_table.device) < filled[:, None]
    wrong = used & ((page_table < 0) | (page_table >= pages))
    if bool(wrong.any()):
        raise ValueError(f"page_table must name pages from 0 to {pages - 1}: got {int(page_table[wrong][0])}")


def check_row_weight(row_weight: Tensor | None) -> None:
    """Checks that row weights are finite and not negative."""
    if row_weight is None or not may_read(row_weight):
        return
    good = torch.isfinite(row_weight) & (row_weight >= 0)
    if not bool(good.all()):
        raise ValueError(f"row_weight must be finite and not negative: got {row_weight[~good][0].item()}")


def check_padding_holes(mask: Tensor) -> None:
    """Checks that the real tokens of each row of ``mask [B, N]`` are next to each other."""
    if not may_read(mask):
        return
    starts = (mask[:, 1:] & ~mask[:, :-1]).sum(1) + mask[:, :1].sum(1)
    if bool((starts > 1).any()):
        raise ValueError(
            f"key_padding_mask must have its real tokens next to each other, with padding on the left or right: got "
            f"{int(starts.max())} runs of real tokens in row {int(starts.argmax())}"
        )


def check_teacher_mass(mass: Tensor, lse: Tensor) -> None:
    """Checks that the teacher's probabilities, normalised by ``teacher_lse [B, H, Nq]``, sum to 1 in every row.

    ``mass [B, R, Nq]`` holds the sums. An LSE of another mask, scale or logarithm is off by far more than the rounding
    of logits of its size, which is allowed for. A sum of nan is that of a row that is not finite, whose loss is nan.
    """
    if not may_read(mass):
        return
    allowed = lse.abs().unflatten(1, (mass.shape[1], -1)).amax(2)
    allowed.nan_to_num_(0.0, 0.0).mul_(64 * torch.finfo(torch.float32).eps).add_(0.01)  # in place: [B, R, Nq] is long
    wrong = (mass - 1).abs_() > allowed
    if bool(wrong.any()):
        raise ValueError(
            f"teacher_lse must be the natural log-sum-exp of the teacher's scaled logits over exactly the keys allowed "
            f"here, so that its probabilities sum to 1: got rows that sum to {mass[wrong][0].item():.4g}"
        )


def may_read(tensor: Tensor) -> bool:
    """Whether reading the values of a tensor synchronises nothing, or is asked for."""
    return tensor.device.type == "cpu" or os.environ.get("STREAMKL_CHECK") == "1"
