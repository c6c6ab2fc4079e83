"""The registered operators of ``sparse``: selection of keys, and attention over selected keys.

Their tensors have the layout of ``streamkl.ops``. ``query_block`` consecutive rows of a sequence share their top-k.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException

from streamkl import engines, validation
from streamkl.ops import body, bound, not_differentiable
from streamkl.problem import Problem, Side, Support

_KEYS = "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt? left, SymInt? right, SymInt query_block, str backend"
"""The last arguments of every operator."""
SCHEMAS = {
    "index_topk": "(Tensor q, Tensor k, Tensor? w, Tensor? lse, float? scale, bool relu, SymInt topk, "
    f"{_KEYS}) -> Tensor",
    "attention_topk": f"(Tensor q, Tensor k, Tensor lse, float? scale, SymInt topk, {_KEYS}) -> Tensor",
    "sparse_attention": f"(Tensor q, Tensor k, Tensor v, Tensor indices, float? scale, {_KEYS}) -> Tensor",
}
"""The operators by name."""

for _name, _schema in SCHEMAS.items():
    torch.library.define(f"streamkl::{_name}", _schema, tags=torch.Tag.pt2_compliant_tag)


def _engine(name: str, side: Side, given: Any) -> tuple[Any, Support]:
    """The engine for an operator, and the support."""
    support = Support.of(given.q, given.k, given.left, given.right, given.cu_seqlens_q, given.cu_seqlens_k)
    validation.check_cu_seqlens(given.cu_seqlens_q, given.cu_seqlens_k, support.nq, support.nk)
    return engines.choose(given.backend, given.q.device, Problem(side, side, support), name).engine, support


@body("index_topk")
def _(*args: Any) -> Any:
    given = bound("index_topk", args)
    side = Side.of(given.q, given.k, given.scale, given.relu, head_summed=True)
    engine, support = _engine("index_topk", side, given)
    return engine.index_topk(support, side, given.q, given.k, given.w, given.lse, given.topk, given.query_block)


@body("attention_topk")
def _(*args: Any) -> Tensor:
    given = bound("attention_topk", args)
    side = Side.of(given.q, given.k, given.scale)
    engine, support = _engine("attention_topk", side, given)
    return engine.attention_topk(support, side, given.q, given.k, given.lse, given.topk, given.query_block)


@body("sparse_attention")
def _(*args: Any) -> Tensor:
    given = bound("sparse_attention", args)
    side, indices = Side.of(given.q, given.k, given.scale), given.indices
    engine, support = _engine("sparse_attention", side, given)
    wanted = support.query_block_count(given.query_block)
    if indices.shape[1] != wanted:
        raise ValueError(
            f"indices must have {wanted} query blocks, of {given.query_block} queries each: got {indices.shape[1]}"
        )
    packed = given.cu_seqlens_q is not None
    if packed or indices.dtype != torch.int32 or not getattr(engine, "checks_topk", False):
        validation.check_topk(indices[:, None], support.nk, "indices", getattr(engine, "first_wrong_row", None))
    return engine.sparse_attention(support, side, given.q, given.k, given.v, indices, given.query_block)


def _empty_topk(operator: str, *args: Any) -> Tensor:
    given = bound(operator, args)
    batch, _, tokens, _ = given.q.shape
    query_blocks = _traced_query_block_count(tokens, given.query_block, packed=given.cu_seqlens_q is not None)
    return given.q.new_empty((batch, query_blocks, given.topk), dtype=torch.int32)


for _name in ("index_topk", "attention_topk"):
    torch.library.register_fake(f"streamkl::{_name}", functools.partial(_empty_topk, _name))


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
def _(*args: Any) -> Tensor:
    given = bound("sparse_attention", args)
    batch, heads, tokens, _ = given.q.shape
    return given.q.new_empty((batch, tokens, heads, given.v.shape[3])).transpose(1, 2)


torch.library.register_autograd(
    "streamkl::sparse_attention",
    not_differentiable("streamkl: sparse_attention is not differentiated; run it under torch.no_grad()"),
)
