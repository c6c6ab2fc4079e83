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
from streamkl.problem import Support

FLOATS = validation.DTYPES
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
        if list(index_w.shape) != wanted or index_w.dtype not in FLOATS or index_w.device != index_q.device:
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


def check_selection(topk: int, query_block: int, backend: str) -> None:
    """Checks the options of a selection."""
    check_count(topk)
    validation.check_query_block(query_block)
    if backend not in get_args(SelectionBackend):
        raise ValueError(f"backend must be one of {', '.join(map(repr, get_args(SelectionBackend)))}: got {backend!r}")


def _scale(scale: float | None, q: Tensor) -> float:
    return float(q.shape[-1]) ** -0.5 if scale is None else scale


def _support(checked: validation.LSEArguments) -> Support:
    keys = checked.keys
    return Support.of(checked.q, checked.k, keys.left, keys.right, keys.cu_seqlens_q, keys.cu_seqlens_k)
