"""The registered operators of ``sparse``: selection of keys, and attention over selected keys.

Their tensors have the layout of ``streamkl.ops``. ``query_block`` consecutive rows of a sequence share their top-k.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException

from streamkl import engines, validation
from streamkl.ops import body, not_differentiable
from streamkl.problem import Problem, Side, Support

_KEYS = "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt? left, SymInt? right, SymInt query_block, str backend"
KEYS = 6
"""The last arguments of every operator, and how many they are."""
SCHEMAS = {
    "index_topk": "(Tensor q, Tensor k, Tensor? w, Tensor? lse, float? scale, bool relu, SymInt topk, "
    f"{_KEYS}) -> Tensor",
    "attention_topk": f"(Tensor q, Tensor k, Tensor lse, float? scale, SymInt topk, {_KEYS}) -> Tensor",
    "sparse_attention": f"(Tensor q, Tensor k, Tensor v, Tensor indices, float? scale, {_KEYS}) -> Tensor",
}
"""The operators by name."""

for _name, _schema in SCHEMAS.items():
    torch.library.define(f"streamkl::{_name}", _schema, tags=torch.Tag.pt2_compliant_tag)


def _engine(name: str, q: Tensor, k: Tensor, side: Side, keys: tuple[Any, ...]) -> tuple[Any, Support, int]:
    """The engine for an operator, the support, and the query block."""
    cu_seqlens_q, cu_seqlens_k, left, right, query_block, backend = keys
    support = Support.of(q, k, left, right, cu_seqlens_q, cu_seqlens_k)
    validation.check_cu_seqlens(cu_seqlens_q, cu_seqlens_k, support.nq, support.nk)
    engine = engines.choose(backend, q.device, Problem(side, side, support), name).engine
    return engine, support, query_block


@body("index_topk")
def _(
    q: Tensor,
    k: Tensor,
    w: Tensor | None,
    lse: Tensor | None,
    scale: float | None,
    relu: bool,
    topk: int,
    *keys: Any,
) -> Any:
    side = Side.of(q, k, scale, relu, head_summed=True)
    engine, support, query_block = _engine("index_topk", q, k, side, keys)
    return engine.index_topk(support, side, q, k, w, lse, topk, query_block)


@body("attention_topk")
def _(q: Tensor, k: Tensor, lse: Tensor, scale: float | None, topk: int, *keys: Any) -> Tensor:
    side = Side.of(q, k, scale)
    engine, support, query_block = _engine("attention_topk", q, k, side, keys)
    return engine.attention_topk(support, side, q, k, lse, topk, query_block)


@body("sparse_attention")
def _(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, scale: float | None, *keys: Any) -> Tensor:
    side = Side.of(q, k, scale)
    engine, support, query_block = _engine("sparse_attention", q, k, side, keys)
    wanted = support.query_block_count(query_block)
    if indices.shape[1] != wanted:
        raise ValueError(
            f"indices must have {wanted} query blocks, of {query_block} queries each: got {indices.shape[1]}"
        )
    packed = keys[0] is not None
    if packed or indices.dtype != torch.int32 or not getattr(engine, "checks_topk", False):
        validation.check_topk(indices[:, None], support.nk, "indices", getattr(engine, "first_wrong_row", None))
    return engine.sparse_attention(support, side, q, k, v, indices, query_block)


@torch.library.register_fake("streamkl::index_topk")
@torch.library.register_fake("streamkl::attention_topk")
def _(q: Tensor, *args: Any) -> Tensor:
    topk, cu_seqlens_q, *_, query_block, _ = args[-1 - KEYS :]  # both schemas end alike
    query_blocks = _traced_query_block_count(q.shape[2], query_block, packed=cu_seqlens_q is not None)
    return q.new_empty((q.shape[0], query_blocks, topk), dtype=torch.int32)


def _traced_query_block_count(nq: int, query_block: int, packed: bool) -> int:
    """The value of `Support.query_block_count`, as far as it is known while an operator is traced.

    In a packed batch it depends on the lengths of the sequences. For a dynamic length it is an expression that PyTorch
    would compare with 1 to see whether the result is contiguous, and that guard would exclude lengths as short as a
    query block. So it is an unknown size wherever sizes may be unknown.
    """
    if query_block == 1:
        return nq
    query_blocks = -(-nq // query_block)
    if isinstance(query_blocks, int) and not packed:
        return query_blocks
    try:
        return torch.library.get_ctx().new_dynamic_size()
    except DynamicOutputShapeException:  # torch.compile without capture_dynamic_output_shape_ops
        if packed:
            raise
        return query_blocks


@torch.library.register_fake("streamkl::sparse_attention")
def _(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> Tensor:
    batch, heads, tokens = q.shape[:3]
    return q.new_empty((batch, tokens, heads, v.shape[3])).transpose(1, 2)


torch.library.register_autograd(
    "streamkl::sparse_attention",
    not_differentiable("streamkl: sparse_attention is not differentiated; run it under torch.no_grad()"),
)
