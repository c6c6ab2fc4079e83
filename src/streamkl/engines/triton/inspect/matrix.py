"""The variants that can be compiled: every kind of kernel for the usual head dims, and the launches of each."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from streamkl.engines.triton.launch import Launch
from streamkl.engines.triton.plans import attention, dense, gathered, selection
from streamkl.problem import Inputs, Problem, Side, Support
from streamkl.state import RowStats

DIMS = ((64, 64), (128, 128), (192, 128), (256, 256), (576, 128))
"""Head dims of side ``a`` and side ``b``: latent attention has 192 and, absorbed, 576."""

KINDS = ("lse", "paired", "mixture", "backward", "backward_both", "backward_group", "train", "train_group", "queries",
         "queries_group")  # fmt: skip
"""The engine's functions: ``_both`` for gradients of both sides, ``_group`` for head means, ``queries`` for the
deterministic pair."""

INDEX_KINDS = ("lse_index", "mixture_index", "backward_index", "train_index", "queries_index")
"""The same for an indexer against the mean of all heads."""

GATHERED_KINDS = ("lse_gathered", "lse_index_gathered", "paired_gathered", "mixture_gathered", "backward_gathered",
                "backward_both_gathered", "train_gathered")  # fmt: skip
"""The same over selected keys: against an indexer, or head by head."""

COMPRESSED_KINDS = ("lse_index_span", "mixture_index_span", "train_index_span", "queries_index_span",
                    "mixture_index_max", "train_index_max", "queries_index_max", "train_gathered_max")  # fmt: skip
"""The same for an indexer whose keys stand for several tokens each: ``_max`` for the largest of their targets."""

ATTENTION_KINDS = ("attention", "attention_block", "attention_paged", "attention_paged_block", "attention_backward",
                   "attention_backward_block")  # fmt: skip
"""Sparse attention, of keys in pages too, and its backward, over a per-query top-k or one shared by a query block."""

ATTENTION_DIMS = {(64, 64): (16, 4), (128, 128): (32, 8), (576, 512): (128, 1)}
"""Head dims of keys and values, and query and key heads."""

SELECTION_KINDS = ("index_topk", "index_topk_block")
"""Selection by an indexer, per query or shared by a query block: its scores, and their ranking."""

INDEX_DIMS = {(128, 128): (32, 8), (576, 128): (128, 1)}
"""Head dims of teacher and indexer, and the teacher's query and key heads."""

TOKENS, HEADS, KV_HEADS, SELECTED, QUERY_BLOCK, PAGE, KEY_SPAN = 4096, 16, 4, 2048, 64, 64, 4


class Indexer(NamedTuple):
    """The number of index heads, and whether each has a weight."""

    heads: int
    weighted: bool

    def __str__(self) -> str:
        return f" J={self.heads}{' weighted' if self.weighted else ''}"


INDEXERS = (Indexer(1, False), Indexer(1, True), Indexer(64, True))


class Variant(NamedTuple):
    """One thing to compile for an architecture."""

    arch: str
    kind: str
    dims: tuple[int, int]
    dtype: torch.dtype
    aligned: bool
    indexer: Indexer | None = None
    worst: bool = False

    def __str__(self) -> str:
        dims = f"{self.dims[0]}" if self.dims[0] == self.dims[1] else f"{self.dims[0]}/{self.dims[1]}"
        rest = f"{'' if self.aligned else ' misaligned'}{' worst' if self.worst else ''}"
        return f"{self.arch} {self.kind} {dims}{self.indexer or ''} {str(self.dtype)[6:]}{rest}"


def launches(variant: Variant) -> list[Launch]:
    """The passes of a variant, on meta tensors; kernels that only prepare row vectors are left out.

    Causal, or, as ``worst``, packed sequences with a window on both sides, a relu, and sizes that 16 does not divide;
    the backward of sparse attention then has the gradient of its log-sum-exp, too.
    """
    if variant.kind in ATTENTION_KINDS:
        return _attention(variant)
    if variant.kind in SELECTION_KINDS:
        return _selection(variant)
    arch, kind, dims, _, _, indexer, worst = variant
    makers = gathered if "_gathered" in kind else dense
    runs, span = KEY_SPAN if kind.endswith("_max") else 1, KEY_SPAN if kind in COMPRESSED_KINDS else 1
    kind = kind.removesuffix("_max").removesuffix("_span").removesuffix("_gathered")
    batch, tokens = (1, TOKENS + 1) if worst else (2, TOKENS)
    group, both = kind in ("mixture", "backward_group", "train_group", "queries_group"), kind.endswith("_both")
    heads, kv_heads = (HEADS, KV_HEADS) if indexer is None else INDEX_DIMS[dims]
    distributions = 1 if indexer is not None else KV_HEADS if group else HEADS

    def tensor(heads: int, dim: int, tokens: int = tokens) -> Tensor:
        return _tensor(variant, batch, heads, tokens, dim)

    def rows(heads: int) -> Tensor:
        return torch.empty(batch, heads, tokens, device="meta")

    if indexer is None:
        student = (tensor(distributions, dims[1]), tensor(KV_HEADS, dims[1]), None)
    else:
        w = torch.empty(batch, tokens, indexer.heads, device="meta").mT if indexer.weighted else None
        student = (tensor(indexer.heads, dims[1]), tensor(1, dims[1], tokens // span), w)
    heads, kv_heads = heads * runs, kv_heads * runs
    inputs = Inputs(tensor(heads, dims[0]), tensor(kv_heads, dims[0], tokens // span), *student)
    a = Side.of(inputs.a_q, inputs.a_k)
    b = Side.of(inputs.b_q, inputs.b_k, relu=worst or indexer is not None, head_summed=indexer is not None)
    support = replace(_support(inputs.b_q, inputs.b_k, worst), key_span=span)
    if makers is gathered:
        support = replace(support, topk=torch.empty(batch, 1, tokens, SELECTED, dtype=torch.int32, device="meta"))
    problem = Problem(a, b, support, deterministic=kind.startswith("queries"), runs=runs)
    stats = RowStats(rows(heads), rows(heads), rows(distributions), rows(distributions))
    if kind == "lse":
        made = makers.logsumexp(support, a, inputs.a_q, inputs.a_k, None, arch)[0]
    elif kind == "lse_index":
        made = makers.logsumexp(support, b, inputs.b_q, inputs.b_k, inputs.b_w, arch)[0]
    elif kind == "paired":
        made = makers.paired_rows(problem, inputs, arch)[0]
    elif kind.startswith("mixture"):
        made = makers.mixture_rows(problem, inputs, stats.m_a, stats.ln_l_a, arch)[0]
    elif kind.startswith("train"):
        made = makers.train(problem, inputs, stats, rows(distributions), arch)[0]
    else:
        mean = rows(heads) if both else None
        made = makers.backward(problem, inputs, stats, mean, rows(distributions), both, True, arch)[0]
    return [launch for launch in made if "ROWS" in launch.constants]


def _attention(variant: Variant) -> list[Launch]:
    """The launches of sparse attention, or of its backward."""
    heads, kv_heads = ATTENTION_DIMS[variant.dims]
    paged = "paged" in variant.kind
    batch, tokens = (1, TOKENS + 1) if variant.worst else (1 if paged else 2, TOKENS)
    query_block = QUERY_BLOCK if variant.kind.endswith("_block") else 1
    q, k, v = (
        _tensor(variant, batch, count, tokens, dim)
        for count, dim in ((heads, variant.dims[0]), (kv_heads, variant.dims[0]), (kv_heads, variant.dims[1]))
    )
    indices = torch.empty(batch, tokens // query_block, SELECTED, dtype=torch.int32, device="meta")
    support, page_table = _support(q, k, variant.worst), None
    if paged:
        starts = torch.empty(8, dtype=torch.int32, device="meta")
        support = replace(support, cu_seqlens_q=starts, cu_seqlens_k=starts)
        page_table = torch.empty(7, TOKENS // PAGE, dtype=torch.int32, device="meta")
        k, v = (_tensor(variant, TOKENS, PAGE, kv_heads, dim).transpose(1, 2) for dim in variant.dims)
    given = (support, Side.of(q, k), q, k, v, indices, query_block)
    backward = "backward" in variant.kind
    made, output = attention.sparse_attention(*given, backward, variant.arch, page_table)
    if backward:
        d_out = _tensor(variant, batch, heads, tokens, variant.dims[1])
        d_lse = torch.empty(batch, heads, tokens, device="meta") if variant.worst else None
        made = attention.sparse_attention_backward(*given, output, d_out, variant.arch, d_lse)[0]
    return made


def _selection(variant: Variant) -> list[Launch]:
    """One launch of each kernel of a selection."""
    assert variant.indexer is not None
    heads, weighted = variant.indexer
    batch, tokens = (1, TOKENS + 1) if variant.worst else (2, TOKENS)
    query_block = QUERY_BLOCK if variant.kind.endswith("_block") else 1
    q, k = (_tensor(variant, batch, count, tokens, variant.dims[1]) for count in (heads, 1))
    w = torch.empty(batch, tokens, heads, device="meta").mT if weighted else None
    lse = torch.empty(batch, 1, tokens, device="meta") if variant.worst else None
    side = Side.of(q, k, relu=True, head_summed=True)
    made, _ = selection.index_topk(
        _support(q, k, variant.worst), side, q, k, w, lse, SELECTED, query_block, tokens // query_block, variant.arch
    )
    return [made[0], made[-1]]


def _tensor(variant: Variant, batch: int, heads: int, tokens: int, dim: int) -> Tensor:
    columns = dim if variant.aligned else dim + 1
    return torch.empty(batch, heads, tokens, columns, dtype=variant.dtype, device="meta")[..., :dim]


def _support(q: Tensor, k: Tensor, worst: bool) -> Support:
    starts = torch.empty(8, dtype=torch.int32, device="meta") if worst else None
    return Support.of(q, k, 1000 if worst else None, 3 if worst else 0, starts, starts)
