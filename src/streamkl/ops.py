"""The registered operators: schemas, bodies, fakes and gradients. ``loss.py`` composes a loss of them.

An operator sees q and k as ``[B, H, N, D]`` and row vectors as ``[B, heads, Nq]``; a packed (varlen) batch has
``B = 1`` and ``cu_seqlens``. Its body builds the `Problem` and hands it to the engine; nothing is computed here but
reductions. Side ``a`` is the target, side ``b`` is compared with it (`Problem`); an indexer is a head-summed side
``b``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from streamkl import engines, validation
from streamkl.problem import Inputs, Problem, Side, Support, compute_dtype
from streamkl.state import RowStats, relative_to_first_head

_KEYS = "Tensor? topk, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k"
_TENSORS = f"Tensor a_q, Tensor a_k, Tensor b_q, Tensor b_k, Tensor? b_w, {_KEYS}"
_STATS = "Tensor m_a, Tensor ln_l_a, Tensor m_b, Tensor ln_l_b"
_OPTIONS = (
    "float? a_scale, float? b_scale, bool a_relu, bool b_relu, bool b_head_summed, SymInt? left, SymInt? right, "
    "bool deterministic, str backend"
)
SCHEMAS = {
    "logsumexp": f"(Tensor q, Tensor k, Tensor? w, {_KEYS}, float? scale, bool relu, bool head_summed, "
    "SymInt? left, SymInt? right, bool checked, ScalarType dtype, str backend) -> (Tensor m, Tensor ln_l)",
    "checked_weight": "(Tensor row_weight, ScalarType dtype) -> Tensor",
    "checked_mass": "(Tensor weight, Tensor mass, Tensor lse) -> Tensor",
    "paired_rows": f"({_TENSORS}, {_OPTIONS}) -> (Tensor kl, Tensor mean, {_STATS})",
    "mixture_rows": f"({_TENSORS}, Tensor m_a, Tensor ln_l_a, bool checked, {_OPTIONS}) "
    "-> (Tensor kl, Tensor m_b, Tensor ln_l_b, Tensor mass)",
    "rows_backward": f"(Tensor row_grad, Tensor? mean, {_STATS}, {_TENSORS}, {_OPTIONS}, bool want_a, bool want_b) "
    "-> (Tensor d_a_q, Tensor d_a_k, Tensor d_b_q, Tensor d_b_k, Tensor d_b_w)",
    "train": f"({_TENSORS}, {_STATS}, Tensor weight, {_OPTIONS}) "
    "-> (Tensor loss, Tensor d_b_q, Tensor d_b_k, Tensor d_b_w)",
    "scale_gradient": "(Tensor gradient, Tensor upstream, ScalarType dtype) -> Tensor",
}
"""The operators of the namespace ``streamkl``, by name.

``checked`` says that an earlier operator has checked ``topk``: the first one of a loss does, and no other.
"""


class Tensors(NamedTuple):
    """The tensors of a divergence, in the order of its schema; ``b_w [B, J, Nq]``, ``topk [B, topk_heads, Nq, K]``."""

    a_q: Tensor
    a_k: Tensor
    b_q: Tensor
    b_k: Tensor
    b_w: Tensor | None
    topk: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None


class Options(NamedTuple):
    """The numbers of a divergence, in the order of its schema."""

    a_scale: float | None
    b_scale: float | None
    a_relu: bool
    b_relu: bool
    b_head_summed: bool
    left: int | None
    right: int | None
    deterministic: bool
    backend: str


def divided(args: tuple[Any, ...], *counts: int) -> list[tuple[Any, ...]]:
    """An operator's arguments split into runs of the given lengths; the rest comes last."""
    runs, start = [], 0
    for count in counts:
        runs.append(args[start : start + count])
        start += count
    return [*runs, args[start:]]


TENSORS, STATS, OPTIONS = len(Tensors._fields), len(RowStats._fields), len(Options._fields)


def _empty_rows(q: Tensor, dtype: torch.dtype, head_summed: bool = False) -> Tensor:
    batch, heads, tokens = q.shape[:3]
    return q.new_empty((batch, 1 if head_summed else heads, tokens), dtype=dtype)


def body(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers the implementation of an operator, for every device, with autocast off inside."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(first: Tensor, *args: object) -> Any:
            device = first.device.type
            if device == "meta" or not torch.is_autocast_enabled(device):
                return function(first, *args)
            with torch.autocast(device, enabled=False):
                return function(first, *args)

        torch.library.impl(f"streamkl::{name}", "CompositeExplicitAutograd", run)
        return function

    return register


for _name, _schema in SCHEMAS.items():
    torch.library.define(f"streamkl::{_name}", _schema, tags=torch.Tag.pt2_compliant_tag)


def _problem(given: tuple[Any, ...], numbers: tuple[Any, ...]) -> tuple[engines.Engine, Problem, Inputs]:
    tensors, options = Tensors(*given), Options(*numbers)
    inputs = Inputs(*tensors[:5])
    a = Side.of(inputs.a_q, inputs.a_k, options.a_scale, options.a_relu)
    b = Side.of(inputs.b_q, inputs.b_k, options.b_scale, options.b_relu, options.b_head_summed)
    support = _support(inputs.b_q, inputs.b_k, options.left, options.right, tensors[5:])
    problem = Problem(a, b, support, options.deterministic)
    return engines.choose(options.backend, inputs.b_q.device, problem).engine, problem, inputs


def _support(q: Tensor, k: Tensor, left: int | None, right: int | None, keys: tuple[Tensor | None, ...]) -> Support:
    topk, cu_seqlens_q, cu_seqlens_k = keys
    support = Support.of(q, k, left, right, cu_seqlens_q, cu_seqlens_k, topk)
    validation.check_cu_seqlens(support.cu_seqlens_q, support.cu_seqlens_k, support.nq, support.nk)
    return support


def _check_topk(engine: engines.Engine, support: Support, checked: bool = False) -> None:
    if not checked:
        validation.check_topk(support.topk, support.nk, first_wrong_row=getattr(engine, "first_wrong_row", None))


@body("logsumexp")
def _(q: Tensor, k: Tensor, w: Tensor | None, *args: Any) -> tuple[Tensor, Tensor]:
    keys, (scale, relu, head_summed, left, right, checked, dtype, backend) = divided(args, 3)
    support, side = _support(q, k, left, right, keys), Side.of(q, k, scale, relu, head_summed)
    engine = engines.choose(backend, q.device, Problem(side, side, support)).engine
    _check_topk(engine, support, checked)
    return engine.logsumexp(support, side, q, k, w, dtype)


@body("checked_weight")
def _(row_weight: Tensor, dtype: torch.dtype) -> Tensor:
    validation.check_row_weight(row_weight)
    return row_weight.to(dtype, copy=True, memory_format=torch.contiguous_format)


@body("checked_mass")
def _(weight: Tensor, mass: Tensor, lse: Tensor) -> Tensor:
    none = (lse == -torch.inf).unflatten(1, (weight.shape[1], -1)).any(2)  # the LSE of a dead row
    mass = torch.where(none, torch.inf, mass)
    validation.check_teacher_mass(torch.where(weight == 0, 1.0, mass), lse)
    return weight.clone()


@body("paired_rows")
def _(*args: Any) -> tuple[Tensor, ...]:
    engine, problem, inputs = _problem(*divided(args, TENSORS))
    _check_topk(engine, problem.support)
    kl, mean, (m_a, ln_l_a, m_b, ln_l_b) = engine.paired_rows(problem, inputs)
    nan = _nan_unless_finite(kl)
    return kl + nan, mean, m_a + nan, ln_l_a, m_b + nan, ln_l_b


@body("mixture_rows")
def _(*args: Any) -> tuple[Tensor, ...]:
    tensors, (m_a, ln_l_a, checked), options = divided(args, TENSORS, 3)
    engine, problem, inputs = _problem(tensors, options)
    _check_topk(engine, problem.support, checked)
    kl, m_b, ln_l_b, s = engine.mixture_rows(problem, inputs, m_a, relative_to_first_head(ln_l_a, problem.head_group))
    nan = _nan_unless_finite(kl)
    return kl + nan, m_b + nan, ln_l_b, s * torch.exp(-ln_l_a[:, :: problem.head_group])


@body("rows_backward")
def _(row_grad: Tensor, mean: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    stats, tensors, options, (want_a, want_b) = divided(args, STATS, TENSORS, OPTIONS)
    engine, problem, inputs = _problem(tensors, options)
    gradients = engine.backward(problem, inputs, RowStats(*stats), mean, row_grad, want_a, want_b)
    return tuple(_or_empty(grad, row_grad) for grad in gradients)


@body("train")
def _(*args: Any) -> tuple[Tensor, ...]:
    tensors, stats, (weight,), options = divided(args, TENSORS, STATS, 1)
    engine, problem, inputs = _problem(tensors, options)
    # `topk` was checked by the logsumexp of a side, which comes before.
    loss, gradients, mass = engine.train(problem, inputs, RowStats(*stats), weight)
    validation.check_teacher_mass(torch.where(stats[2] == -torch.inf, 1.0, mass), stats[0])
    return loss + _nan_unless_finite(loss), *(_or_empty(grad, loss) for grad in gradients[2:])


def _nan_unless_finite(kl: Tensor) -> Tensor:
    """0 for a finite divergence, nan for any other: added to a divergence and to the row max that gradients use.

    A logit of side ``b`` that is -inf makes the divergence inf or nan, depending on whether a probability underflows.
    """
    return kl - kl


def _or_empty(gradient: Tensor | None, like: Tensor) -> Tensor:
    """A gradient, or an empty tensor for ``None``: an operator can only return tensors."""
    return like.new_empty(0) if gradient is None else gradient


@body("scale_gradient")
def _(gradient: Tensor, upstream: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty(gradient.shape, dtype=dtype, device=gradient.device)
    # In pieces: the float32 product of the whole gradient would be a temporary as large as the gradient.
    for to, piece in zip(out.view(-1).split(1 << 18), gradient.view(-1).split(1 << 18), strict=True):
        to.copy_(piece * upstream)
    return out


@torch.library.register_fake("streamkl::logsumexp")
def _(q: Tensor, k: Tensor, w: Tensor | None, *args: Any) -> tuple[Tensor, Tensor]:
    head_summed, dtype = args[5], args[-2]
    return _empty_rows(q, dtype, head_summed), _empty_rows(q, dtype, head_summed)


@torch.library.register_fake("streamkl::checked_weight")
def _(row_weight: Tensor, dtype: torch.dtype) -> Tensor:
    return row_weight.new_empty(row_weight.shape, dtype=dtype)


@torch.library.register_fake("streamkl::checked_mass")
def _(weight: Tensor, mass: Tensor, lse: Tensor) -> Tensor:
    return torch.empty_like(weight)


@torch.library.register_fake("streamkl::paired_rows")
def _(a_q: Tensor, a_k: Tensor, b_q: Tensor, *args: object) -> tuple[Tensor, ...]:
    return tuple(_empty_rows(b_q, compute_dtype(a_q.dtype, b_q.dtype)) for _ in range(6))


@torch.library.register_fake("streamkl::mixture_rows")
def _(a_q: Tensor, a_k: Tensor, b_q: Tensor, *args: Any) -> tuple[Tensor, ...]:
    head_summed = Options(*args[-OPTIONS:]).b_head_summed
    return tuple(_empty_rows(b_q, compute_dtype(a_q.dtype, b_q.dtype), head_summed) for _ in range(4))


@torch.library.register_fake("streamkl::rows_backward")
def _(row_grad: Tensor, mean: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    _, inputs, _, (want_a, want_b) = divided(args, STATS, 5, TENSORS - 5 + OPTIONS)
    wanted = (want_a, want_a, want_b, want_b, want_b)
    return tuple(
        x.new_empty(x.shape) if want and x is not None else row_grad.new_empty(0)
        for x, want in zip(inputs, wanted, strict=True)
    )


@torch.library.register_fake("streamkl::train")
def _(a_q: Tensor, a_k: Tensor, b_q: Tensor, b_k: Tensor, b_w: Tensor | None, *args: object) -> tuple[Tensor, ...]:
    shapes = ((), b_q.shape, b_k.shape, (0,) if b_w is None else b_w.shape)
    return tuple(b_q.new_empty(shape, dtype=compute_dtype(a_q.dtype, b_q.dtype)) for shape in shapes)


@torch.library.register_fake("streamkl::scale_gradient")
def _(gradient: Tensor, upstream: Tensor, dtype: torch.dtype) -> Tensor:
    return gradient.new_empty(gradient.shape, dtype=dtype)


def _save_paired(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _save_rows(ctx, inputs, *output[1:])


def _save_mixture(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _save_rows(ctx, inputs, None, *inputs[TENSORS : TENSORS + 2], *output[1:3])


def _save_rows(ctx: Any, inputs: tuple[Any, ...], mean: Tensor | None, *stats: Tensor) -> None:
    ctx.arguments, ctx.options = len(inputs), inputs[-OPTIONS:]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:TENSORS], mean, *stats)


def _rows_backward(ctx: Any, row_grad: Tensor | None, *_: object) -> tuple[Tensor | None, ...]:
    if row_grad is None:
        return (None,) * ctx.arguments
    tensors, (mean,), stats = divided(ctx.saved_tensors, TENSORS, 1)
    needs = ctx.needs_input_grad[:5]
    want_a, want_b = any(needs[:2]), any(needs[2:])
    gradients = torch.ops.streamkl.rows_backward(row_grad, mean, *stats, *tensors, *ctx.options, want_a, want_b)
    wanted = (grad if need else None for grad, need in zip(gradients, needs, strict=True))
    return (*wanted, *(None,) * (ctx.arguments - 5))


for _name, _save in (("paired_rows", _save_paired), ("mixture_rows", _save_mixture)):
    torch.library.register_autograd(f"streamkl::{_name}", _rows_backward, setup_context=_save)


def _save_train(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.arguments = len(inputs)
    ctx.set_materialize_grads(False)  # the gradients are outputs too: allocate no zeros of their size
    ctx.dtypes = [None if x is None else x.dtype for x in inputs[2:5]]
    ctx.save_for_backward(*output[1:])


def _train_backward(ctx: Any, upstream: Tensor | None, *_: object) -> tuple[Tensor | None, ...]:
    if upstream is None:
        return (None,) * ctx.arguments
    gradients = (
        torch.ops.streamkl.scale_gradient(gradient, upstream, dtype) if need else None
        for gradient, dtype, need in zip(ctx.saved_tensors, ctx.dtypes, ctx.needs_input_grad[2:5], strict=True)
    )
    return (None, None, *gradients, *(None,) * (ctx.arguments - 5))


torch.library.register_autograd("streamkl::train", _train_backward, setup_context=_save_train)


def not_differentiable(what: str) -> Callable[..., None]:
    """The backward of an operator without one: it raises, and says what to do."""

    def raise_error(ctx: Any, *_: object) -> None:
        raise RuntimeError(what)

    return raise_error


for _name, _what in {
    "rows_backward": "streamkl: the gradient of the loss is not differentiated a second time",
    "scale_gradient": "streamkl: the gradient of the loss is not differentiated a second time",
    "logsumexp": "streamkl: attention_lse is not differentiated; detach q and k, or the result",
}.items():
    torch.library.register_autograd(f"streamkl::{_name}", not_differentiable(_what))
