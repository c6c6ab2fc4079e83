"""The launch of sparse attention: a program for each list, key head and part of the rows that share them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from streamkl.engines.triton.kernels.attention import sparse_attention_kernel
from streamkl.engines.triton.launch import Launch, Sweep
from streamkl.engines.triton.meta import padded
from streamkl.problem import Problem, Side, Support


def sparse_attention(
    support: Support, side: Side, q: Tensor, k: Tensor, v: Tensor, indices: Tensor, block: int, arch: str
) -> tuple[list[Launch], Tensor]:
    """``[B, H, Nq, Dv]``, the transposed view of ``[B, Nq, H, Dv]``, over the keys of ``indices [B, lists, K]``."""
    sweep = Sweep(Problem(side, side, support), (q, k, v), arch, "attention")
    make = torch.zeros if sweep.mask.packed else torch.empty  # zero where a query may belong to no sequence
    out = make(q.shape[0], q.shape[2], q.shape[1], v.shape[3], dtype=q.dtype, device=q.device).transpose(1, 2)
    columns = min(padded(v.shape[3]), sweep.config.grad)
    value = sweep.b._replace(dim=v.shape[3], block=columns, grad=columns, chunked=False)
    rows = min(sweep.config.rows, padded(block * sweep.b.share))
    parts, pieces = math.ceil(block * sweep.b.share / rows), math.ceil(v.shape[3] / columns)
    lists = indices.shape[1]
    arguments: dict[str, Any] = {
        "q": q, "k": k, "v": v, "out": out, "strides_q": q.stride(), "strides_k": k.stride(), "strides_v": v.stride(),
        "strides_o": out.stride(), "topk": indices, "strides_t": indices.stride(), "columns": indices.shape[2],
        "cu": _starts(sweep, block), "extent": sweep.extent, "scale": side.scale, "block": block, "lists": lists,
        "units": side.kv_heads, "parts": parts, "pieces": pieces,
    }  # fmt: skip
    constants = {
        "SIDE": sweep.b, "VALUE": value, "MASK": sweep.mask, "ROWS": rows, "KEYS": sweep.config.keys,
        "SHARED": block > 1,
    }  # fmt: skip
    sequences = support.batch if support.cu_seqlens_q is None else min(1, support.cu_seqlens_q.shape[0] - 1)
    programs = lists * side.kv_heads * sequences * parts * pieces
    return [sweep.launch(sparse_attention_kernel, programs, arguments, constants)], out


def _starts(sweep: Sweep, block: int) -> tuple[Any, ...] | None:
    """The starts of packed sequences, and the first list of each, which their lengths tell without reading them."""
    cu = sweep.cu()
    if cu is None:
        return None
    lists = (cu[0].diff() + (block - 1)) // block
    return *cu, (lists.cumsum(0) - lists).to(torch.int32)
