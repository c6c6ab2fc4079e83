"""The launch of sparse attention: a program per query block, key head and part of their rows."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from streamkl.engines.triton.kernels.attention import sparse_attention_kernel
from streamkl.engines.triton.launch import Launch, Tiling
from streamkl.engines.triton.meta import padded
from streamkl.problem import Problem, Side, Support


def sparse_attention(
    support: Support, side: Side, q: Tensor, k: Tensor, v: Tensor, indices: Tensor, query_block: int, arch: str
) -> tuple[list[Launch], Tensor]:
    """``[B, H, Nq, Dv]``, the transposed view of ``[B, Nq, H, Dv]``, over ``indices [B, query_blocks, K]``."""
    tiling = Tiling(Problem(side, side, support), (q, k, v), arch, "attention")
    make = torch.zeros if tiling.mask.packed else torch.empty  # zero where a query may belong to no sequence
    out = make(q.shape[0], q.shape[2], q.shape[1], v.shape[3], dtype=q.dtype, device=q.device).transpose(1, 2)
    columns = min(padded(v.shape[3]), tiling.config.grad)
    value = tiling.b._replace(dim=v.shape[3], block=columns, grad=columns, chunked=False)
    rows = min(tiling.config.rows, padded(query_block * tiling.b.per_kv))
    parts, pieces = math.ceil(query_block * tiling.b.per_kv / rows), math.ceil(v.shape[3] / columns)
    query_blocks = indices.shape[1]
    arguments: dict[str, Any] = {
        "q": q, "k": k, "v": v, "out": out, "strides_q": q.stride(), "strides_k": k.stride(), "strides_v": v.stride(),
        "strides_o": out.stride(), "topk": indices, "strides_t": indices.stride(), "columns": indices.shape[2],
        "cu": _starts(tiling, query_block), "extent": tiling.extent, "scale": side.scale, "query_block": query_block,
        "query_blocks": query_blocks, "kv_heads": side.kv_heads, "parts": parts, "pieces": pieces,
    }  # fmt: skip
    constants = {
        "SIDE": tiling.b, "VALUE": value, "MASK": tiling.mask, "ROWS": rows, "KEYS": tiling.config.keys,
        "SHARED": query_block > 1,
    }  # fmt: skip
    sequences = support.batch if support.cu_seqlens_q is None else min(1, support.cu_seqlens_q.shape[0] - 1)
    programs = query_blocks * side.kv_heads * sequences * parts * pieces
    return [tiling.launch(sparse_attention_kernel, programs, arguments, constants)], out


def _starts(tiling: Tiling, query_block: int) -> tuple[Any, ...] | None:
    """The starts of packed sequences, and the first query block of each, computed on the device."""
    cu = tiling.cu()
    if cu is None:
        return None
    query_blocks = (cu[0].diff() + (query_block - 1)) // query_block
    return *cu, (query_blocks.cumsum(0) - query_blocks).to(torch.int32)
