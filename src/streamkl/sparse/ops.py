"""The registered operators of ``sparse``: selection of keys, and attention over the keys that were selected.

They see tensors as those of ``streamkl.ops`` do. ``block`` consecutive rows of a sequence share a list of keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from streamkl import engines, validation
from streamkl.ops import body, not_differentiable
from streamkl.problem import Problem, Side, Support

_KEYS = "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt? left, SymInt? right, SymInt block, str backend"
KEYS = 6
"""What every operator ends with, and how many they are."""
SCHEMAS = {
    "index_topk": "(Tensor q, Tensor k, Tensor? w, Tensor? lse, float? scale, bool relu, SymInt topk, SymInt lists, "
    f"{_KEYS}) -> Tensor",
    "attention_topk": f"(Tensor q, Tensor k, Tensor lse, float? scale, SymInt topk, SymInt lists, {_KEYS}) -> Tensor",
    "sparse_attention": f"(Tensor q, Tensor k, Tensor v, Tensor indices, float? scale, {_KEYS}) -> Tensor",
}
"""The operators by name; ``lists`` is how many lists of keys a batch element has, which packed sequences know alone."""

for _name, _schema in SCHEMAS.items():
    torch.library.define(f"streamkl::{_name}", _schema, tags=torch.Tag.pt2_compliant_tag)


def _engine(name: str, q: Tensor, k: Tensor, side: Side, keys: tuple[Any, ...]) -> tuple[Any, Support, int]:
    """The engine for an operator, what the rows may see, and how many of them share a list."""
    cu_seqlens_q, cu_seqlens_k, left, right, block, backend = keys
    support = Support.of(q, k, left, right, cu_seqlens_q, cu_seqlens_k)
    validation.check_cu_seqlens(cu_seqlens_q, cu_seqlens_k, support.nq, support.nk)
    engine = engines.choose(backend, q.device, Problem(side, side, support), name).engine
    return engine, support, block


@body("index_topk")
def _(
    q: Tensor,
    k: Tensor,
    w: Tensor | None,
    lse: Tensor | None,
    scale: float | None,
    relu: bool,
    topk: int,
    lists: int,
    *keys: Any,
) -> Any:
    side = Side.of(q, k, scale, relu, summed=True)
    engine, support, block = _engine("index_topk", q, k, side, keys)
    return engine.index_topk(support, side, q, k, w, lse, topk, block)


@body("attention_topk")
def _(q: Tensor, k: Tensor, lse: Tensor, scale: float | None, topk: int, lists: int, *keys: Any) -> Tensor:
    side = Side.of(q, k, scale)
    engine, support, block = _engine("attention_topk", q, k, side, keys)
    return engine.attention_topk(support, side, q, k, lse, topk, block)


@body("sparse_attention")
def _(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, scale: float | None, *keys: Any) -> Tensor:
    side = Side.of(q, k, scale)
    engine, support, block = _engine("sparse_attention", q, k, side, keys)
    wanted = support.list_count(block)
    if indices.shape[1] != wanted:
        raise ValueError(
            f"indices must have {wanted} lists, one for each block of {block} queries: got {indices.shape[1]}"
        )
    packed = keys[0] is not None
    if packed or indices.dtype != torch.int32 or not getattr(engine, "checks_lists", False):
        validation.check_topk(indices[:, None], support.nk, "indices")
    return engine.sparse_attention(support, side, q, k, v, indices, block)


@torch.library.register_fake("streamkl::index_topk")
@torch.library.register_fake("streamkl::attention_topk")
def _(q: Tensor, *args: Any) -> Tensor:
    topk, lists, *_ = args[-2 - KEYS :]  # both schemas end alike
    return q.new_empty((q.shape[0], lists, topk), dtype=torch.int32)


@torch.library.register_fake("streamkl::sparse_attention")
def _(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> Tensor:
    batch, heads, tokens = q.shape[:3]
    return q.new_empty((batch, tokens, heads, v.shape[3])).transpose(1, 2)


torch.library.register_autograd(
    "streamkl::sparse_attention",
    not_differentiable("streamkl: sparse_attention is not differentiated; run it under torch.no_grad()"),
)
