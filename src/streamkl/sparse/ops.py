"""The registered operators of ``sparse``: selection of keys, and attention over selected keys.

Their tensors have the layout of ``streamkl.ops``. ``query_block`` consecutive rows of a sequence share their top-k.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException

from streamkl import engines, value_checks
from streamkl.ops import body, bound, fields_of, not_differentiable
from streamkl.problem import AttentionOutput, Problem, Side, Support, compute_dtype, is_half

_KEYS = "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt? left, SymInt? right, SymInt query_block, str backend"
"""The last arguments of every operator."""
_ATTENTION = f"Tensor q, Tensor k, Tensor v, Tensor indices, float? scale, {_KEYS}"
SCHEMAS = {
    "index_topk": "(Tensor q, Tensor k, Tensor? w, float? scale, bool relu, bool normalise, bool sort, SymInt topk, "
    f"{_KEYS}) -> Tensor",
    "attention_topk": f"(Tensor q, Tensor k, Tensor lse, float? scale, SymInt topk, {_KEYS}) -> Tensor",
    "sparse_attention": f"({_ATTENTION}, bool for_backward, Tensor? page_table) "
    "-> (Tensor out, Tensor rest, Tensor m, Tensor ln_l)",
    "sparse_attention_backward": "(Tensor d_out, Tensor? d_lse, Tensor out, Tensor rest, Tensor m, Tensor ln_l, "
    f"{_ATTENTION}) -> (Tensor d_q, Tensor d_k, Tensor d_v)",
}
"""The operators by name."""

for _name, _schema in SCHEMAS.items():
    torch.library.define(f"streamkl::{_name}", _schema, tags=torch.Tag.pt2_compliant_tag)


def _engine(name: str, side: Side, given: Any, page_table: Tensor | None = None) -> tuple[Any, Support]:
    """The engine for an operator, and the support; with a page table ``k`` is ``[pages, Hkv, page_size, D]``."""
    support = Support.of(given.q, given.k, given.left, given.right, given.cu_seqlens_q, given.cu_seqlens_k)
    if page_table is not None:
        pages, _, page_size, _ = given.k.shape
        value_checks.check_page_table(page_table, given.cu_seqlens_k, pages, page_size)
        support = replace(support, nk=page_table.numel() * page_size)
    value_checks.check_cu_seqlens(given.cu_seqlens_q, given.cu_seqlens_k, support.nq, support.nk)
    return engines.choose(given.backend, given.q.device, Problem(side, side, support), name).engine, support


@body("index_topk")
def _(*args: Any) -> Any:
    given = bound("index_topk", args)
    side = Side.of(given.q, given.k, given.scale, given.relu, head_summed=True)
    engine, support = _engine("index_topk", side, given)
    return engine.index_topk(
        support, side, given.q, given.k, given.w, given.normalise, given.sort, given.topk, given.query_block
    )


@body("attention_topk")
def _(*args: Any) -> Tensor:
    given = bound("attention_topk", args)
    side = Side.of(given.q, given.k, given.scale)
    engine, support = _engine("attention_topk", side, given)
    return engine.attention_topk(support, side, given.q, given.k, given.lse, given.topk, given.query_block)


@body("sparse_attention")
def _(*args: Any) -> AttentionOutput:
    given = bound("sparse_attention", args)
    side, indices = Side.of(given.q, given.k, given.scale), given.indices
    engine, support = _engine("sparse_attention", side, given, given.page_table)
    wanted = support.query_block_count(given.query_block)
    if indices.shape[1] != wanted:
        blocks, queries = "block" if wanted == 1 else "blocks", "query" if given.query_block == 1 else "queries"
        raise ValueError(
            f"indices must have {wanted} query {blocks}, of {given.query_block} {queries} each: got {indices.shape[1]}"
        )
    packed = given.cu_seqlens_q is not None
    if packed or indices.dtype != torch.int32 or not getattr(engine, "checks_topk", False):
        nk = support.nk if given.page_table is None else given.page_table.shape[1] * given.k.shape[2]
        value_checks.check_topk(indices[:, None], nk, "indices", getattr(engine, "first_wrong_row", None))
    return engine.sparse_attention(
        support, side, given.q, given.k, given.v, indices, given.query_block, given.for_backward, given.page_table
    )


@body("sparse_attention_backward")
def _(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    given = bound("sparse_attention_backward", args)
    side = Side.of(given.q, given.k, given.scale)
    engine, support = _engine("sparse_attention_backward", side, given)
    # `indices` were checked by the forward.
    return engine.sparse_attention_backward(
        support, side, given.q, given.k, given.v, given.indices, given.query_block, fields_of(AttentionOutput, given),
        given.d_out, given.d_lse,
    )  # fmt: skip


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
def _(*args: Any) -> tuple[Tensor, ...]:
    given = bound("sparse_attention", args)
    batch, heads, tokens, _ = given.q.shape
    out, rest = (given.q.new_empty((batch, tokens, heads, given.v.shape[3])).transpose(1, 2) for _ in range(2))
    m, ln_l = (given.q.new_empty((batch, heads, tokens), dtype=compute_dtype(given.q.dtype)) for _ in range(2))
    return out, rest if given.for_backward and is_half(given.q.dtype) else given.q.new_empty(0), m, ln_l


@torch.library.register_fake("streamkl::sparse_attention_backward")
def _(*args: Any) -> tuple[Tensor, ...]:
    given = bound("sparse_attention_backward", args)
    return tuple(x.new_empty(x.shape) for x in (given.q, given.k, given.v))


class _Tensors(NamedTuple):
    """The tensors that sparse attention and its backward read."""

    q: Tensor
    k: Tensor
    v: Tensor
    indices: Tensor
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None


class _Options(NamedTuple):
    """The numbers that they read."""

    scale: float | None
    left: int | None
    right: int | None
    query_block: int
    backend: str


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    given = bound("sparse_attention", inputs)
    ctx.names, ctx.options = given._fields, fields_of(_Options, given)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, *fields_of(_Tensors, given))


def _backward(
    ctx: Any, d_out: Tensor | None, _rest: object, _m: object, d_lse: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Gradients to q, k and v. Of the row stats ``m`` is a constant, and ``ln_l`` has the gradient of their sum."""
    if d_out is None and d_lse is None:
        return (None,) * len(ctx.names)
    out, rest, m, ln_l, *tensors = ctx.saved_tensors  # read once: checkpointing unpacks them at each reading
    d_out = torch.zeros_like(out) if d_out is None else d_out
    given = {**_Tensors(*tensors)._asdict(), **ctx.options._asdict()}
    gradients = torch.ops.streamkl.sparse_attention_backward(
        d_out, d_lse, out, rest, m, ln_l, *(given[name] for name in ctx.names if name in given)
    )
    found = dict(zip(("q", "k", "v"), gradients, strict=True))
    needs = zip(ctx.names, ctx.needs_input_grad, strict=True)
    return tuple(found[name] if need and name in found else None for name, need in needs)


torch.library.register_autograd("streamkl::sparse_attention", _backward, setup_context=_save)
torch.library.register_autograd(
    "streamkl::sparse_attention_backward",
    not_differentiable("streamkl: the gradient of sparse_attention is not differentiated a second time"),
)
