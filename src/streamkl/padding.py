"""Padded batches ``[B, heads, N, D]`` as packed ones: ``key_padding_mask [B, N]`` says which tokens are real.

Every row of the batch becomes up to five sequences: its padding on the left and on the right as queries without keys
and as keys without queries, and its real tokens. So padded queries see no key, padded keys are seen by none, and no
engine knows of padding. Nothing is read back from a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

TOKENS_FIRST = ("index_k", "index_w")
"""Tensors ``[B, N, dim]``, without heads."""
ROWS = ("teacher_lse", "teacher_rest", "row_weight")
"""Tensors ``[B, N]`` or ``[B, heads, N]``."""


def packed_call(
    function: Callable[..., Tensor], mask: Tensor, tensors: dict[str, Tensor | None], options: dict[str, Any]
) -> Tensor:
    """Calls a public function with packed tensors; rows come back ``[B, heads, N]``.

    Args:
        function: The public function.
        mask: ``[B, N]`` of bool, checked by `streamkl.validation.check_padding_mask`.
        tensors: The tensors of the call by name, dense.
        options: Its keyword arguments, dense.
    """
    batch, tokens = mask.shape
    cu_seqlens_q, cu_seqlens_k, first = torch.ops.streamkl.padded_sequences(mask)
    tensors = {name: None if x is None else _packed(name, x) for name, x in tensors.items()}
    options = {name: _packed_rows(x) if name in ROWS and x is not None else x for name, x in options.items()}
    if (topk := options.get("topk_indices")) is not None:
        options["topk_indices"] = _packed_topk(topk, first)
    result = function(**tensors, **options, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    return result.unflatten(1, (batch, tokens)).transpose(0, 1) if result.dim() == 2 else result


def sequences(mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``cu_seqlens_q`` and ``cu_seqlens_k [5B + 1]``, and the first real token of each row, ``[B]``."""
    batch, tokens = mask.shape
    count = mask.sum(1)
    first = torch.where(count > 0, mask.int().argmax(1) if tokens else count, 0)
    end, whole = first + count, torch.full_like(first, tokens)
    none = torch.zeros_like(first)
    # left padding: its queries, its keys; the real tokens; right padding: its queries, its keys
    queries = torch.stack((first, first, end, whole, whole), 1)
    keys = torch.stack((none, first, end, end, whole), 1)
    before = torch.arange(batch, device=mask.device)[:, None] * tokens
    start = none.new_zeros(1)
    return torch.cat((start, (before + queries).flatten())), torch.cat((start, (before + keys).flatten())), first


def _packed(name: str, x: Tensor) -> Tensor:
    """``[B * N, heads, D]`` of ``[B, heads, N, D]``."""
    return (x if name in TOKENS_FIRST else x.transpose(1, 2)).flatten(0, 1)


def _packed_rows(x: Tensor) -> Tensor:
    """``[B * N]`` of ``[B, N]``, or ``[heads, B * N]`` of ``[B, heads, N]``."""
    return x.flatten() if x.dim() == 2 else x.transpose(0, 1).flatten(1)


def _packed_topk(topk: Tensor, first: Tensor) -> Tensor:
    """``[B * N, K]`` or ``[heads, B * N, K]``, which count from the first real token; padded keys are left out.

    What is no key stays one, for the check of packed indices to refuse.
    """
    tokens, batch = topk.shape[-2], topk.shape[0]
    moved = topk - first.view(-1, *[1] * (topk.dim() - 1)).to(topk.dtype)
    moved = torch.where(moved < 0, -1, moved)
    moved = torch.where((topk < -1) | (topk >= tokens), batch * tokens, moved)
    return moved.flatten(0, 1) if topk.dim() == 3 else moved.transpose(0, 1).flatten(1, 2)
