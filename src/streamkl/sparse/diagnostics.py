"""Diagnostics of selected keys: the attention mass that they hold, and their recall of the oracle's keys."""

from __future__ import annotations

import itertools
from typing import Literal

import torch
from torch import Tensor

from streamkl.problem import Sequence
from streamkl.sparse import ops as _ops  # noqa: F401  # registers the operators
from streamkl.sparse.arguments import (
    AttentionArguments,
    attention_arguments,
    check_count,
    check_sequences,
    selected_arguments,
)

GATHERED = 2**22
"""How many elements of gathered keys a block of rows may have: 16 MB in float32."""


@torch.no_grad()
def attention_mass(
    q: Tensor,
    k: Tensor,
    indices: Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: tuple[int, int] | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    lse: Tensor | None = None,
    reduction: Literal["mean", "none"] = "mean",
) -> Tensor:
    """The share of the attention's probability that the selected keys hold: what sparse attention over them keeps.

    For query ``i`` it is the sum, over its selected keys, of the head mean of the softmax over all allowed keys.
    Selected keys are gathered, so work is linear in ``Nq * K`` once the log-sum-exp is known, and nothing of size
    ``Nq * Nk`` is allocated.

    Args:
        q: ``[B, H, Nq, D]``, or packed ``[Tq, H, D]``: the teacher's queries.
        k: ``[B, Hkv, Nk, D]``, or packed ``[Tk, Hkv, D]``, where ``Hkv`` divides ``H``.
        indices: ``[B, Nq, K]``, packed ``[Tq, K]``, int32 or int64: the selected keys, no key twice, padded with -1,
            in a packed batch counted from the first key of the sequence. Keys that a query may not see are ignored.
        scale: Multiplies the products; ``1/sqrt(D)`` if not given.
        causal: Query ``i`` sees keys ``j <= i + Nk - Nq``.
        window: ``(left, right)`` keys around key ``i + Nk - Nq``; a negative side is unbounded.
        cu_seqlens_q: ``[sequences + 1]``: where each packed sequence's queries start, and the end.
        cu_seqlens_k: The same for the keys.
        lse: ``[B, H, Nq]``, packed ``[H, Tq]``: what `streamkl.attention_lse` returns; computed if not given.
        reduction: ``"mean"`` over the queries that see a key, 0 if there is none, or ``"none"``.

    Returns:
        From 0 to 1, float32 (float64 if the inputs are); with ``"none"`` ``[B, Nq]``, packed ``[Tq]``, and 0 for a
        query that sees no key. Not differentiated.

    Raises:
        ValueError: An argument is wrong; the message says what was given and what was expected.

    Examples:
        >>> import torch
        >>> from streamkl import attention_mass
        >>> q, k = torch.zeros(1, 4, 8, 16), torch.zeros(1, 2, 8, 16)  # attends to all keys alike
        >>> indices = torch.tensor([0, 1]).expand(1, 8, 2)
        >>> attention_mass(q, k, indices, causal=False)
        tensor(0.2500)
    """
    _check_reduction(reduction)
    attention = attention_arguments(q, k, scale, causal, window, cu_seqlens_q, cu_seqlens_k, lse)
    check_sequences(attention.support)
    selected = selected_arguments(indices, attention)
    dtype = torch.promote_types(q.dtype, torch.float32)
    mass = torch.zeros(selected.shape[:2], dtype=dtype, device=q.device)
    block = max(1, GATHERED // max(1, selected.shape[2] * q.shape[-1]))
    counted = 0
    for seq in attention.support.sequences():
        first, last = attention.support.live_rows(seq)
        counted += last - first
        for start in range(first, last, block):
            rows = slice(seq.q_start + start, seq.q_start + min(start + block, last))
            keys = selected[seq.batch, rows].long()
            mass[seq.batch, rows] = _gathered_mass(attention, seq, rows, keys, dtype)
    return _reduced(mass, counted, reduction, attention.packed)


@torch.no_grad()
def topk_recall(
    q: Tensor,
    k: Tensor,
    indices: Tensor,
    *,
    topk: int | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: tuple[int, int] | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    lse: Tensor | None = None,
    reduction: Literal["mean", "none"] = "mean",
) -> Tensor:
    """The share of the oracle's keys, those that attention attends to most, that are selected.

    The oracle's keys of a query are the ``topk`` of the highest head-mean attention, equal ones by lower index
    (`streamkl.sparse.oracle_topk`).

    Args:
        q: ``[B, H, Nq, D]``, or packed ``[Tq, H, D]``: the teacher's queries.
        k: ``[B, Hkv, Nk, D]``, or packed ``[Tk, Hkv, D]``, where ``Hkv`` divides ``H``.
        indices: ``[B, Nq, K]``, packed ``[Tq, K]``, int32 or int64: the selected keys, no key twice, padded with -1,
            in a packed batch counted from the first key of the sequence.
        topk: How many keys the oracle selects; ``K`` if not given.
        scale: Multiplies the products; ``1/sqrt(D)`` if not given.
        causal: Query ``i`` sees keys ``j <= i + Nk - Nq``.
        window: ``(left, right)`` keys around key ``i + Nk - Nq``; a negative side is unbounded.
        cu_seqlens_q: ``[sequences + 1]``: where each packed sequence's queries start, and the end.
        cu_seqlens_k: The same for the keys.
        lse: ``[B, H, Nq]``, packed ``[H, Tq]``: what `streamkl.attention_lse` returns; computed if not given.
        reduction: ``"mean"`` over the queries that see a key, 0 if there is none, or ``"none"``.

    Returns:
        The recall, from 0 to 1, float32; with ``"none"`` ``[B, Nq]``, packed ``[Tq]``, and 0 for a query that sees no
        key. A query that sees fewer than ``topk`` keys has fewer to recall.

    Raises:
        ValueError: An argument is wrong; the message says what was given and what was expected.

    Examples:
        >>> import torch
        >>> from streamkl import topk_recall
        >>> from streamkl.sparse import oracle_topk
        >>> _ = torch.manual_seed(0)
        >>> q, k = torch.randn(1, 8, 64, 32), torch.randn(1, 2, 64, 32)
        >>> topk_recall(q, k, oracle_topk(q, k, topk=16))
        tensor(1.)
    """
    _check_reduction(reduction)
    attention = attention_arguments(q, k, scale, causal, window, cu_seqlens_q, cu_seqlens_k, lse)
    selected = selected_arguments(indices, attention)
    topk = selected.shape[2] if topk is None else topk
    check_count(topk)
    support = attention.support
    oracle = torch.ops.streamkl.attention_topk(
        attention.q, attention.k, attention.lse, attention.scale, topk, support.cu_seqlens_q, support.cu_seqlens_k,
        support.left, support.right, 1, "auto",
    )  # fmt: skip
    recall = torch.zeros(selected.shape[:2], device=q.device)
    rows = max(1, GATHERED // max(1, selected.shape[2], topk))
    for batch, start in itertools.product(range(support.batch), range(0, support.nq, rows)):
        if selected.shape[2]:
            at = batch, slice(start, start + rows)
            recall[at] = _recall(oracle[at], selected[at])
    counted = sum(last - first for first, last in map(support.live_rows, support.sequences()))
    return _reduced(recall, counted, reduction, attention.packed)


def _recall(oracle: Tensor, selected: Tensor) -> Tensor:
    """The share of the keys ``oracle [rows, topk]`` that are in ``selected [rows, K]``, 0 where there is none."""
    selected = selected.to(oracle.dtype).sort(-1).values
    at = torch.searchsorted(selected, oracle).clamp_(max=selected.shape[1] - 1)
    found = (selected.gather(-1, at) == oracle) & (oracle >= 0)
    return found.sum(-1) / (oracle >= 0).sum(-1).clamp_(min=1)


def _gathered_mass(
    attention: AttentionArguments, seq: Sequence, rows: slice, keys: Tensor, dtype: torch.dtype
) -> Tensor:
    """The mass of ``keys [rows, K]``, head mean: ``[rows]``."""
    allowed = attention.support.allowed(keys, rows.start - seq.q_start + seq.diagonal, seq.k_len)
    keys = torch.where(allowed, keys, 0) + seq.k_start
    heads, kv_heads = attention.q.shape[1], attention.k.shape[1]
    group = heads // kv_heads
    total = torch.zeros(keys.shape[0], dtype=dtype, device=keys.device)
    for kv in range(kv_heads):
        at = seq.batch, slice(kv * group, (kv + 1) * group), rows
        gathered = attention.k[seq.batch, kv][keys].to(dtype)  # [rows, K, D]
        a = attention.q[at].transpose(0, 1).to(dtype) @ gathered.mT * attention.scale  # [rows, group, K]
        p = (a - attention.lse[at].mT[..., None].to(dtype)).exp_()
        total += p.masked_fill_(~allowed[:, None], 0.0).sum((1, 2))
    return total / heads


def _check_reduction(reduction: str) -> None:
    if reduction not in ("mean", "none"):
        raise ValueError(f"reduction must be 'mean' or 'none': got {reduction!r}")


def _reduced(rows: Tensor, counted: int, reduction: str, packed: bool) -> Tensor:
    """Row values ``[B, Nq]``, 0 in rows that do not count, or their mean over the ``counted`` ones."""
    if reduction == "mean":
        return rows.sum() / max(1, counted)
    return rows[0] if packed else rows
