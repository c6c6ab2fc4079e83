"""From a caller's arguments to tensors in one layout and the keys that each row may see, or a ``ValueError``.

A packed (varlen) batch is given by ``cu_seqlens``. The operators check its values, so that a function that only calls
operators can be traced; a function that reads the values itself calls `check_sequences`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from streamkl import validation, value_checks
from streamkl.api import attention_lse
from streamkl.argument_checks import (
    DTYPES,
    Keys,
    canonical_tensors,
    check_choice,
    check_pair,
    check_scale,
    is_int,
    seen_keys,
)
from streamkl.problem import Support

SelectionBackend = Literal["auto", "triton", "cpu", "tiled"]


class IndexTensors(NamedTuple):
    """An indexer's tensors, as `indexer_kl` and `index_topk` take them.

    Attributes:
        index_q: ``[B, J, N, D]``, or packed ``[T, J, D]``.
        index_k: ``[B, N, D]``, or packed ``[T, D]``: one key for all ``J`` heads.
        index_w: ``[B, N, J]``, or packed ``[T, J]``: the heads' weights; ``None`` for 1.
    """

    index_q: Tensor
    index_k: Tensor
    index_w: Tensor | None


class SparseArguments(NamedTuple):
    """The checked arguments of ``sparse_attention``: q, k, v ``[B, H, N, D]``, ``indices [B, query_blocks, K]``.

    With a page table, k and v are ``[pages, Hkv, page_size, D]``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    indices: Tensor
    keys: Keys


class AttentionArguments(NamedTuple):
    """An attention and its log-sum-exp: ``q [B, H, Nq, D]``, ``k [B, Hkv, Nk, D]``, ``lse [B, H, Nq]``."""

    q: Tensor
    k: Tensor
    lse: Tensor
    scale: float
    support: Support
    packed: bool


class IndexArguments(NamedTuple):
    """An indexer's tensors: ``q [B, J, Nq, D]``, ``k [B, Nk, D]``, ``w [B, Nq, J]`` or ``None``."""

    q: Tensor
    k: Tensor
    w: Tensor | None
    scale: float
    relu: bool
    support: Support
    packed: bool


def sparse_attention_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    query_block: int,
    scale: float | None,
    causal: bool,
    window: tuple[int, int] | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    page_table: Tensor | None,
    backend: str,
) -> SparseArguments:
    """Checks a call of ``sparse_attention``; packed tensors come back with a batch of 1."""
    keys = seen_keys(causal, window, cu_seqlens_q, cu_seqlens_k)
    axes = ("batch", "heads", "tokens")
    if page_table is None:
        q, k, v = canonical_tensors({"q": q, "k": k, "v": v}, keys)
        check_pair("", q, k)
    else:
        q, k, v = _paged(q, k, v, page_table, keys)
        axes = ("pages", "heads", "tokens per page")
    if v.dtype != q.dtype:
        raise ValueError(f"v must be of the dtype of q and k, {q.dtype}: got {v.dtype}")
    for dim, axis in enumerate(axes):
        if v.shape[dim] != k.shape[dim]:
            raise ValueError(f"k and v must have the same {axis}: got {k.shape[dim]} and {v.shape[dim]}")
    check_scale("scale", scale)
    check_choice("backend", backend, validation.BACKENDS)
    check_query_block(query_block)
    if not isinstance(indices, Tensor):
        raise ValueError(f"indices must be a tensor: got {type(indices).__name__}")
    if indices.dim() != (2 if keys.packed else 3) or (not keys.packed and indices.shape[0] != q.shape[0]):
        wanted = "[query_blocks, K] with cu_seqlens" if keys.packed else f"[{q.shape[0]}, query_blocks, K]"
        raise ValueError(f"indices must be of shape {wanted}: got {list(indices.shape)}")
    if indices.dtype not in (torch.int32, torch.int64) or indices.device != q.device:
        raise ValueError(f"indices must be int32 or int64 on {q.device}: got {indices.dtype} on {indices.device}")
    return SparseArguments(q, k, v, indices.unsqueeze(0) if keys.packed else indices, keys)


def sink_rows(sink: Tensor, q: Tensor, packed: bool) -> Tensor:
    """Checks sinks ``[H]`` and returns them as rows ``[B, H, Nq]``, packed ``[H, Tq]``, in the dtype of an LSE."""
    canonical_tensors({"q": q}, Keys(None, None, None, None, packed))
    is_sink = isinstance(sink, Tensor) and sink.shape == q.shape[1:2] and sink.is_floating_point()
    if not is_sink or sink.device != q.device:
        got = f"{sink.dtype} {list(sink.shape)} on {sink.device}" if isinstance(sink, Tensor) else type(sink).__name__
        raise ValueError(f"sink must be a tensor of [{q.shape[1]}] logits, one per head, on {q.device}: got {got}")
    rows = sink.to(torch.promote_types(q.dtype, torch.float32))[:, None]
    return rows.expand(-1, q.shape[0]) if packed else rows.expand(q.shape[0], -1, q.shape[2])


def attention_arguments(
    q: Tensor,
    k: Tensor,
    scale: float | None,
    causal: bool,
    window: tuple[int, int] | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    lse: Tensor | None,
) -> AttentionArguments:
    """Checks attention's arguments, and computes its log-sum-exp where it is not given."""
    checked = validation.attention_lse_arguments(q, k, scale, causal, window, cu_seqlens_q, cu_seqlens_k, None, "auto")
    packed = checked.keys.packed
    rows = [q.shape[1], q.shape[0]] if packed else [*q.shape[:3]]
    if lse is None:
        lse = attention_lse(
            q, k, scale=scale, causal=causal, window=window, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k
        )
    elif list(lse.shape) != rows or lse.dtype not in (torch.float32, torch.float64) or lse.device != q.device:
        raise ValueError(
            f"lse must be of shape {rows}, float32 or float64, on {q.device}: "
            f"got {list(lse.shape)}, {lse.dtype}, on {lse.device}"
        )
    lse = lse.unsqueeze(0) if packed else lse
    return AttentionArguments(checked.q, checked.k, lse, _scale(scale, q), _support(checked), packed)


def attention_support(
    q: Tensor,
    k: Tensor,
    scale: float | None,
    causal: bool,
    window: tuple[int, int] | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
) -> tuple[Support, bool]:
    """Checks attention's arguments; returns what its rows may see, and whether it is packed."""
    checked = validation.attention_lse_arguments(q, k, scale, causal, window, cu_seqlens_q, cu_seqlens_k, None, "auto")
    support = _support(checked)
    check_sequences(support)
    return support, checked.keys.packed


def index_arguments(
    index_q: Tensor,
    index_k: Tensor,
    index_w: Tensor | None,
    index_scale: float | None,
    activation: str | None,
    causal: bool,
    window: tuple[int, int] | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
) -> IndexArguments:
    """Checks an indexer's tensors."""
    packed = cu_seqlens_q is not None
    q_shape, k_shape = ("[tokens, heads, dim]", "[tokens, dim]") if packed else (
        "[batch, heads, tokens, dim]", "[batch, tokens, dim]"
    )  # fmt: skip
    for name, x, shape, rank in (("index_q", index_q, q_shape, 3), ("index_k", index_k, k_shape, 2)):
        if not isinstance(x, Tensor) or x.dim() != rank + (not packed):
            got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name} must be a tensor of shape {shape}: got {got}")
    if activation not in ("relu", None):
        raise ValueError(f"activation must be 'relu' or None: got {activation!r}")
    for what, q_size, k_size in (
        ("dtype", index_q.dtype, index_k.dtype),
        ("head dim", index_q.shape[-1], index_k.shape[-1]),
        ("batch", *((0, 0) if packed else (index_q.shape[0], index_k.shape[0]))),
    ):
        if q_size != k_size:
            raise ValueError(f"index_q and index_k must have the same {what}: got {q_size} and {k_size}")
    one_head = index_k.unsqueeze(1)  # the key head that all index heads share
    checked = validation.attention_lse_arguments(
        index_q, one_head, index_scale, causal, window, cu_seqlens_q, cu_seqlens_k, None, "auto"
    )
    if index_w is not None:
        wanted = [*index_q.shape[:2]] if packed else [index_q.shape[0], index_q.shape[2], index_q.shape[1]]
        if list(index_w.shape) != wanted or index_w.dtype not in DTYPES or index_w.device != index_q.device:
            raise ValueError(
                f"index_w must be a floating-point tensor of shape {wanted} on {index_q.device}: "
                f"got {list(index_w.shape)}, {index_w.dtype}, on {index_w.device}"
            )
        index_w = index_w.unsqueeze(0) if packed else index_w
    return IndexArguments(
        checked.q, checked.k.squeeze(1), index_w, _scale(index_scale, index_q), activation == "relu", _support(checked),
        packed,
    )  # fmt: skip


def selected_arguments(indices: Tensor, attention: AttentionArguments) -> Tensor:
    """Checks selected keys ``[B, Nq, K]``, packed ``[Tq, K]``; returns ``[B, Nq, K]``."""
    batch, tokens, keys = attention.q.shape[0], attention.q.shape[2], attention.k.shape[2]
    wanted = [tokens] if attention.packed else [batch, tokens]
    if not isinstance(indices, Tensor) or list(indices.shape[:-1]) != wanted:
        got = list(indices.shape) if isinstance(indices, Tensor) else type(indices).__name__
        raise ValueError(f"indices must be of shape {[*wanted, 'K']}: got {got}")
    if indices.dtype not in (torch.int32, torch.int64) or indices.device != attention.q.device:
        raise ValueError(
            f"indices must be int32 or int64 on {attention.q.device}: got {indices.dtype} on {indices.device}"
        )
    indices = indices.unsqueeze(0) if attention.packed else indices
    value_checks.check_topk(indices.unsqueeze(1), keys, "indices")
    return indices


def check_sequences(support: Support) -> None:
    """Checks the values of a support's ``cu_seqlens``, which it reads."""
    value_checks.check_cu_seqlens(support.cu_seqlens_q, support.cu_seqlens_k, support.nq, support.nk)


def check_count(topk: int) -> None:
    """Checks the number of keys to select."""
    if isinstance(topk, bool) or not isinstance(topk, int) or topk < 1:
        raise ValueError(f"topk must be a positive integer: got {topk!r}")


def check_query_block(query_block: int) -> None:
    """Checks how many queries share their top-k."""
    if not is_int(query_block) or query_block < 1:
        raise ValueError(f"query_block must be a positive integer: got {query_block!r}")


def check_selection(topk: int, query_block: int, backend: str) -> None:
    """Checks the options of a selection."""
    check_count(topk)
    check_query_block(query_block)
    if backend not in get_args(SelectionBackend):
        raise ValueError(f"backend must be one of {', '.join(map(repr, get_args(SelectionBackend)))}: got {backend!r}")


def _paged(q: Tensor, k: Tensor, v: Tensor, page_table: Tensor, keys: Keys) -> list[Tensor]:
    """Checks keys and values in pages; returns ``q [1, H, Tq, D]``, ``k`` and ``v [pages, Hkv, page_size, D]``."""
    if not keys.packed or keys.cu_seqlens_k is None:
        raise ValueError("page_table needs packed queries: give cu_seqlens_q and cu_seqlens_k, too")
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in (q, k, v)):
        raise ValueError(
            "sparse_attention has no gradients with a page_table: call it under torch.no_grad(), or without pages"
        )
    (q,) = canonical_tensors({"q": q}, keys)
    pages = {
        name: x.transpose(1, 2) if isinstance(x, Tensor) and x.dim() == 4 else x for name, x in (("k", k), ("v", v))
    }
    k, v = canonical_tensors(pages, keys._replace(packed=False), "[pages, page_size, heads, dim] with a page_table")
    sequences = keys.cu_seqlens_k.shape[0] - 1
    if not isinstance(page_table, Tensor) or page_table.dim() != 2 or page_table.shape[0] != sequences:
        got = list(page_table.shape) if isinstance(page_table, Tensor) else type(page_table).__name__
        raise ValueError(f"page_table must be of shape [{sequences}, pages], a row per sequence: got {got}")
    if page_table.dtype not in (torch.int32, torch.int64) or page_table.device != q.device:
        raise ValueError(
            f"page_table must be int32 or int64 on {q.device}: got {page_table.dtype} on {page_table.device}"
        )
    if k.device != q.device:
        raise ValueError(f"k must be on the device of q, {q.device}: got {k.device}")
    if k.shape[2] == 0:
        raise ValueError("a page of k must have at least one token: got none")
    check_pair("", q, k, same_batch=False)
    return [q, k, v]


def _scale(scale: float | None, q: Tensor) -> float:
    return float(q.shape[-1]) ** -0.5 if scale is None else scale


def _support(checked: validation.LSEArguments) -> Support:
    keys = checked.keys
    return Support.of(checked.q, checked.k, keys.left, keys.right, keys.cu_seqlens_q, keys.cu_seqlens_k)
