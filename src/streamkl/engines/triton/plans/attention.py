"""The launch of sparse attention: a program per query block, key head and part of their rows."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from streamkl.engines.triton.kernels.groups import AttentionCounts, Strided, SupportArguments, TopkArguments
from streamkl.engines.triton.kernels.sparse.attention import sparse_attention_kernel
from streamkl.engines.triton.launch import Launch, Tiling
from streamkl.engines.triton.meta import padded
from streamkl.engines.triton.plans.arguments import side_arguments
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
    per_batch, per_query_block, per_column = indices.stride()
    selected = Strided(indices, per_batch, None, per_query_block, per_column)
    arguments: dict[str, Any] = {
        "side": side_arguments(side, q, k), "v": Strided(v, *v.stride()), "out": Strided(out, *out.stride()),
        "topk": TopkArguments(selected, indices.shape[2], None), "support": _support(tiling, query_block),
        "counts": AttentionCounts(query_block, query_blocks, side.kv_heads, parts, pieces),
    }  # fmt: skip
    constants = {
        "SIDE": tiling.b, "VALUE": value, "MASK": tiling.mask, "ROWS": rows, "KEYS": tiling.config.keys,
        "SHARED": query_block > 1,
    }  # fmt: skip
    sequences = support.batch if support.cu_seqlens_q is None else min(1, support.cu_seqlens_q.shape[0] - 1)
    programs = query_blocks * side.kv_heads * sequences * parts * pieces
    return [tiling.launch(sparse_attention_kernel, programs, arguments, constants)], out


def _support(tiling: Tiling, query_block: int) -> SupportArguments:
    """The support with the first query block of each packed sequence, computed on the device."""
    support = tiling.support_arguments()
    if support.packed is None:
        return support
    query_blocks = (support.packed.q_ptr.diff() + (query_block - 1)) // query_block
    first = (query_blocks.cumsum(0) - query_blocks).to(torch.int32)
    return support._replace(packed=support.packed._replace(query_block_ptr=first))
