"""The loss as people write it today. Each baseline gives row losses, ``[B, R, N]``, in one or several runs of queries.

Products are in the inputs' dtype, softmaxes in float32. All have the same signature: the four tensors, and whether the
mask is causal.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

CHUNK = 512
"""Queries that the chunked baseline takes at a time."""


def eager(teacher_q: Tensor, teacher_k: Tensor, student_q: Tensor, student_k: Tensor, causal: bool) -> Iterator[Tensor]:
    """Both matrices in memory."""
    yield eager_rows(teacher_q, teacher_k, student_q, student_k, causal, 0)


def compiled(
    teacher_q: Tensor, teacher_k: Tensor, student_q: Tensor, student_k: Tensor, causal: bool
) -> Iterator[Tensor]:
    """The same through ``torch.compile``."""
    yield torch.compile(eager_rows, dynamic=False)(teacher_q, teacher_k, student_q, student_k, causal, 0)


def chunked(
    teacher_q: Tensor, teacher_k: Tensor, student_q: Tensor, student_k: Tensor, causal: bool
) -> Iterator[Tensor]:
    """The same for a few queries at a time, against only the keys that a causal mask lets them see."""
    tokens = teacher_q.shape[2]
    for first in range(0, tokens, CHUNK):
        last = min(first + CHUNK, tokens)
        seen = last if causal else tokens
        rows, keys = slice(first, last), slice(0, seen)
        yield eager_rows(
            teacher_q[:, :, rows], teacher_k[:, :, keys], student_q[:, :, rows], student_k[:, :, keys], causal, first
        )


def composed(
    teacher_q: Tensor, teacher_k: Tensor, student_q: Tensor, student_k: Tensor, causal: bool
) -> Iterator[Tensor]:
    """From the outputs and log-sum-exps of three calls of stock attention.

    ``KL = s_t <q_t, sum p k_t> - s_s <q_s, sum p k_s> - LSE_t + LSE_s``. Attention rounds the sums to the inputs'
    dtype, and large terms cancel; the error that is reported beside its time shows it.
    """
    teacher_k, student_k = _every_head(teacher_k, teacher_q), _every_head(student_k, student_q)
    mean_teacher, lse_teacher = _attention(teacher_q, teacher_k, teacher_k, causal)
    mean_student, _ = _attention(teacher_q, teacher_k, student_k, causal)
    _, lse_student = _attention(student_q, student_k, student_k, causal)
    dtype = lse_teacher.dtype
    scale = teacher_q.shape[-1] ** -0.5
    a = (teacher_q.to(dtype) * mean_teacher.to(dtype)).sum(-1)
    b = (student_q.to(dtype) * mean_student.to(dtype)).sum(-1)
    yield scale * (a - b) - lse_teacher + lse_student


def eager_indexer(
    teacher_q: Tensor, teacher_k: Tensor, index_q: Tensor, index_k: Tensor, index_w: Tensor | None, causal: bool
) -> Iterator[Tensor]:
    """The loss of an indexer as frameworks write it: softmaxes summed over heads, normalised, KL divergence.

    ``index_k`` is ``[B, 1, N, D]``, ``index_w [B, N, J]``.
    """
    with torch.no_grad():
        p = _logits(teacher_q, teacher_k, causal, 0).softmax(-1).sum(1, keepdim=True)
        p = functional.normalize(p, p=1, dim=-1)
    x = (index_q @ index_k.mT).float().mul(index_q.shape[-1] ** -0.5).relu()
    b = x.sum(1, keepdim=True) if index_w is None else (x * index_w.mT[..., None]).sum(1, keepdim=True)
    log_q = _hide(b, causal, 0).log_softmax(-1)
    yield functional.kl_div(log_q, p, reduction="none").sum(-1)


def eager_rows(
    teacher_q: Tensor, teacher_k: Tensor, student_q: Tensor, student_k: Tensor, causal: bool, first: int
) -> Tensor:
    """The row losses of queries that start at query ``first``, with their matrices."""
    log_q = _logits(student_q, student_k, causal, first).log_softmax(-1)
    a = _logits(teacher_q, teacher_k, causal, first)
    if a.requires_grad:  # the derivative at a probability of 0 would not be finite; otherwise softmax is faster
        return functional.kl_div(log_q, a.log_softmax(-1), reduction="none", log_target=True).sum(-1)
    p = a.softmax(-1)
    if teacher_q.shape[1] != student_q.shape[1]:
        p = p.unflatten(1, (student_q.shape[1], -1)).mean(2)
    return functional.kl_div(log_q, p, reduction="none").sum(-1)


def _logits(q: Tensor, k: Tensor, causal: bool, first: int) -> Tensor:
    """``[B, H, queries, keys]``; finite where the mask forbids a pair, so that 0 times a logarithm stays 0."""
    products = q @ _every_head(k, q).mT
    return _hide(products.to(torch.promote_types(products.dtype, torch.float32)) * q.shape[-1] ** -0.5, causal, first)


def _hide(x: Tensor, causal: bool, first: int) -> Tensor:
    if not causal:
        return x
    rows = torch.arange(first, first + x.shape[2], device=x.device)[:, None]
    keys = torch.arange(x.shape[3], device=x.device)
    return x.masked_fill(keys > rows, torch.finfo(x.dtype).min)


def _every_head(k: Tensor, q: Tensor) -> Tensor:
    """The keys once for every query head."""
    return k if k.shape[1] == q.shape[1] else k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)


def _attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of the stock kernel behind ``scaled_dot_product_attention``."""
    if q.is_cuda:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, is_causal=causal)[:2]
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, is_causal=causal)
