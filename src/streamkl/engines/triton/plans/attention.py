"""The launches of sparse attention and its backward: programs over query blocks, and over blocks of keys."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from streamkl.engines.triton.kernels.groups import (
    AttentionCounts,
    AttentionKeyCounts,
    AttentionOut,
    AttentionRowPtrs,
    KeyPairs,
    PageArguments,
    Strided,
    TopkArguments,
)
from streamkl.engines.triton.kernels.sparse.attention import sparse_attention_kernel
from streamkl.engines.triton.kernels.sparse.backward import attention_keys_kernel, attention_queries_kernel
from streamkl.engines.triton.launch import Launch, Tiling, new_rows
from streamkl.engines.triton.meta import padded
from streamkl.engines.triton.plans.arguments import query_block_support, side_arguments
from streamkl.problem import AttentionOutput, Problem, Side, Support, is_half

MOST_KEYS = 32
"""Keys of a block of keys, at most: a query block has a bit for each."""


def sparse_attention(
    support: Support,
    side: Side,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    query_block: int,
    for_backward: bool,
    arch: str,
    page_table: Tensor | None = None,
) -> tuple[list[Launch], AttentionOutput]:
    """Output and row stats over ``indices [B, query_blocks, K]``; the output is a transposed ``[B, Nq, H, Dv]``."""
    tiling = Tiling(Problem(side, side, support), (q, k, v), arch, "attention")
    make = torch.zeros if tiling.mask.packed else torch.empty  # zero where a query may belong to no sequence
    shape = (q.shape[0], q.shape[2], q.shape[1], v.shape[3])
    out = make(shape, dtype=q.dtype, device=q.device).transpose(1, 2)
    rest = q.new_empty(0)
    if for_backward and is_half(q.dtype):
        rest = make(shape, dtype=q.dtype, device=q.device).transpose(1, 2)
    m, ln_l = (new_rows(q, side.heads, tiling.mask.packed, value) for value in (-torch.inf, 0.0))
    columns = min(padded(v.shape[3]), tiling.config.grad)
    value = tiling.b._replace(dim=v.shape[3], block=columns, grad=columns, chunked=False)
    arguments: dict[str, Any] = {
        "side": side_arguments(side, q, k), "v": Strided(v, *v.stride()),
        "pages": None if page_table is None else _page_arguments(page_table, k),
        "out": _out_arguments(AttentionOutput(out, rest, m, ln_l)),
    }  # fmt: skip
    pieces = math.ceil(v.shape[3] / columns)
    launch = _query_launch(sparse_attention_kernel, tiling, indices, query_block, pieces, arguments, VALUE=value)
    return [launch], AttentionOutput(out, rest, m, ln_l)


def sparse_attention_backward(
    support: Support,
    side: Side,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    query_block: int,
    output: AttentionOutput,
    d_out: Tensor,
    arch: str,
    d_lse: Tensor | None = None,
) -> tuple[list[Launch], tuple[Tensor, Tensor, Tensor]]:
    """Gradients to q, k and v: a pass over queries, which makes the row vectors of the pass over keys."""
    values = Side.of(d_out, v, 1.0)
    problem, tensors = Problem(values, side, support), (q, k, v, d_out)
    over_queries, over_keys = (Tiling(problem, tensors, arch, f"attention_{kind}") for kind in ("queries", "keys"))
    make = torch.zeros if over_keys.mask.packed else torch.empty  # zero where a token may belong to no sequence
    dq, dk, dv = (make(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    output = output._replace(m=output.m.contiguous(), ln_l=output.ln_l.contiguous())
    d_lse = None if d_lse is None else d_lse.float().contiguous()
    rows = AttentionRowPtrs(*(torch.empty_like(output.m) for _ in range(3)))
    both: dict[str, Any] = {"side": side_arguments(side, q, k), "value": side_arguments(values, d_out, v)}
    given = _out_arguments(output)._replace(d_lse=d_lse)
    queries = _query_launch(
        attention_queries_kernel, over_queries, indices, query_block, over_queries.b.pieces,
        {**both, "given": given, "rows_out": rows, "dq_ptr": dq}, VALUE=over_queries.a,
    )  # fmt: skip
    keys = min(over_keys.config.keys, MOST_KEYS)
    blocks, pieces = over_keys.blocks(support.nk, keys), max(over_keys.a.pieces, over_keys.b.pieces)
    arguments = {
        **both, "pairs": _key_pairs(support, indices, query_block, keys, blocks), "m_ptr": output.m, "stats": rows,
        "dk_ptr": dk, "dv_ptr": dv, "support": over_keys.support_arguments(),
        "counts": AttentionKeyCounts(query_block, blocks, side.kv_heads, pieces),
    }  # fmt: skip
    constants = {
        "SIDE": over_keys.b, "VALUE": over_keys.a, "MASK": over_keys.mask, "ROWS": over_keys.config.rows, "KEYS": keys,
    }  # fmt: skip
    programs = blocks * side.kv_heads * support.batch * pieces
    return [queries, over_keys.launch(attention_keys_kernel, programs, arguments, constants)], (dq, dk, dv)


def _page_arguments(page_table: Tensor, k: Tensor) -> PageArguments:
    """The page table as kernels read it; ``k [pages, Hkv, page_size, D]``."""
    page_table = page_table.contiguous()
    return PageArguments(page_table, page_table.shape[1], k.shape[2])


def _out_arguments(output: AttentionOutput) -> AttentionOut:
    """The output as kernels write and read it."""
    out, rest, m, ln_l = output
    return AttentionOut(
        Strided(out, *out.stride()), Strided(rest, *rest.stride()) if rest.dim() == out.dim() else None, m, ln_l
    )  # fmt: skip


def _query_launch(
    kernel: Any,
    tiling: Tiling,
    indices: Tensor,
    query_block: int,
    pieces: int,
    arguments: dict[str, Any],
    **constants: Any,
) -> Launch:
    """A launch over query blocks, key heads, parts of their rows and pieces of the columns."""
    rows = min(tiling.config.rows, padded(query_block * tiling.b.per_kv))
    parts = math.ceil(query_block * tiling.b.per_kv / rows)
    query_blocks, kv_heads = indices.shape[1], tiling.problem.b.kv_heads
    per_batch, per_query_block, per_column = indices.stride()
    selected = Strided(indices, per_batch, None, per_query_block, per_column)
    arguments = {
        **arguments, "topk": TopkArguments(selected, indices.shape[2], None),
        "support": query_block_support(tiling, query_block),
        "counts": AttentionCounts(query_block, query_blocks, kv_heads, parts, pieces),
    }  # fmt: skip
    constants = {
        "SIDE": tiling.b, "MASK": tiling.mask, "ROWS": rows, "KEYS": tiling.config.keys, "SHARED": query_block > 1,
        **constants,
    }  # fmt: skip
    support = tiling.support
    sequences = support.batch if support.cu_seqlens_q is None else min(1, support.cu_seqlens_q.shape[0] - 1)
    return tiling.launch(kernel, query_blocks * kv_heads * sequences * parts * pieces, arguments, constants)


def _key_pairs(support: Support, indices: Tensor, query_block: int, keys: int, blocks: int) -> KeyPairs:
    """The query blocks that select keys of each of ``blocks`` blocks of ``keys`` keys, sorted on the device.

    It takes a few numbers per selected key, whose count is known without reading one: a pair that is selected by
    several keys leaves places free at the end.
    """
    batch, query_blocks, _ = indices.shape
    if blocks == 0:  # no sequence, or no key
        return KeyPairs(*(indices.new_empty(0, dtype=dtype) for dtype in (torch.int64, torch.int32, torch.int32)))
    number = torch.arange(query_blocks, device=indices.device)
    if support.cu_seqlens_q is None or support.cu_seqlens_k is None:
        first_query, first_block, k_len = number * query_block, 0, support.nk
    else:
        starts_q, starts_k = support.cu_seqlens_q.long(), support.cu_seqlens_k.long()
        each = (starts_q.diff() + (query_block - 1)) // query_block
        first = each.cumsum(0) - each
        sequence = torch.searchsorted(first, number, right=True) - 1  # of each query block
        first_query = (number - first[sequence]) * query_block
        first_block = (starts_k[sequence] // keys + sequence)[:, None]
        k_len = torch.where(first_query < starts_q.diff()[sequence], starts_k.diff()[sequence], 0)[:, None]
    none = batch * blocks * query_blocks  # the pair of what is no key
    pair = torch.arange(batch, device=indices.device)[:, None, None] * blocks + (first_block + indices // keys)
    pair = torch.where((indices >= 0) & (indices < k_len), pair * query_blocks + number[:, None], none)
    ordered = (pair * keys + indices % keys).flatten().sort().values
    pair, bit = ordered // keys, ordered % keys
    place = (pair.diff(prepend=pair.new_full((1,), -1)) != 0).cumsum(0) - 1
    bits = torch.zeros_like(pair).scatter_add_(0, place, 1 << bit).to(torch.int32)
    found = torch.full_like(pair, none).scatter_(0, place, pair)
    of_blocks = torch.arange(batch * blocks + 1, device=indices.device) * query_blocks
    start = torch.searchsorted(found, of_blocks)
    query = first_query[found % max(1, query_blocks)].to(torch.int32)
    return KeyPairs(start, query, bits)
