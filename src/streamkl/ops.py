"""The registered operators: schemas, bodies, fakes and gradients. ``loss.py`` composes a loss of them.

An operator sees q and k as ``[B, H, N, D]`` and row vectors as ``[B, heads, Nq]``; a packed batch has ``B = 1`` and
``cu_seqlens``. Its body builds the `Problem` and hands it to the engine; nothing is computed here but reductions.
Side ``a`` weighs the logarithms, side ``b`` is compared with it (`Problem`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from streamkl import engines, validation
from streamkl.problem import Inputs, Problem, Side, Support, compute_dtype
from streamkl.state import Normalisers, relative_to_first_head

_TENSORS = "Tensor a_q, Tensor a_k, Tensor b_q, Tensor b_k, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k"
_NORM = "Tensor m_a, Tensor ln_l_a, Tensor m_b, Tensor ln_l_b"
_OPTIONS = (
    "float? a_scale, float? b_scale, bool a_relu, bool b_relu, SymInt? left, SymInt? right, "
    "bool deterministic, str backend"
)
SCHEMAS = {
    "logsumexp": "(Tensor q, Tensor k, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, float? scale, bool relu, "
    "SymInt? left, SymInt? right, ScalarType dtype, str backend) -> (Tensor m, Tensor ln_l)",
    "checked_weight": "(Tensor row_weight, ScalarType dtype) -> Tensor",
    "paired_rows": f"({_TENSORS}, {_OPTIONS}) -> (Tensor kl, Tensor mean, {_NORM})",
    "mixture_rows": f"({_TENSORS}, Tensor m_a, Tensor ln_l_a, {_OPTIONS}) -> (Tensor kl, Tensor m_b, Tensor ln_l_b)",
    "rows_backward": f"(Tensor row_grad, Tensor? mean, {_NORM}, {_TENSORS}, {_OPTIONS}, bool want_a, bool want_b) "
    "-> (Tensor d_a_q, Tensor d_a_k, Tensor d_b_q, Tensor d_b_k)",
    "train": f"({_TENSORS}, {_NORM}, Tensor weight, {_OPTIONS}) -> (Tensor loss, Tensor d_b_q, Tensor d_b_k)",
    "scale_gradient": "(Tensor gradient, Tensor upstream, ScalarType dtype) -> Tensor",
}
"""The operators of the namespace ``streamkl``, by name."""


class Options(NamedTuple):
    """The numbers of a divergence, in the order of its schema."""

    a_scale: float | None
    b_scale: float | None
    a_relu: bool
    b_relu: bool
    left: int | None
    right: int | None
    deterministic: bool
    backend: str


def _empty_rows(q: Tensor, dtype: torch.dtype) -> Tensor:
    return q.new_empty(q.shape[:3], dtype=dtype)


def _body(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers the implementation of an operator, for every device, with autocast off inside."""

    def register(body: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(body)
        def run(first: Tensor, *args: object) -> Any:
            device = first.device.type
            if device == "meta" or not torch.is_autocast_enabled(device):
                return body(first, *args)
            with torch.autocast(device, enabled=False):
                return body(first, *args)

        torch.library.impl(f"streamkl::{name}", "CompositeExplicitAutograd", run)
        return body

    return register


for _name, _schema in SCHEMAS.items():
    torch.library.define(f"streamkl::{_name}", _schema, tags=torch.Tag.pt2_compliant_tag)


def _problem(tensors: tuple[Any, ...], options: Options) -> tuple[engines.Engine, Problem, Inputs]:
    inputs = Inputs(*tensors[:4])
    a = Side.of(inputs.a_q, inputs.a_k, options.a_scale, options.a_relu)
    b = Side.of(inputs.b_q, inputs.b_k, options.b_scale, options.b_relu)
    support = _support(inputs.b_q, inputs.b_k, options.left, options.right, *tensors[4:])
    problem = Problem(a, b, support, options.deterministic)
    return engines.choose(options.backend, inputs.b_q.device, problem).engine, problem, inputs


def _support(q: Tensor, k: Tensor, left: int | None, right: int | None, *cu_seqlens: Tensor | None) -> Support:
    support = Support.of(q, k, left, right, *cu_seqlens)
    validation.check_cu_seqlens(support.cu_seqlens_q, support.cu_seqlens_k, support.nq, support.nk)
    return support


@_body("logsumexp")
def _(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    scale: float | None,
    relu: bool,
    left: int | None,
    right: int | None,
    dtype: torch.dtype,
    backend: str,
) -> tuple[Tensor, Tensor]:
    support, side = _support(q, k, left, right, cu_seqlens_q, cu_seqlens_k), Side.of(q, k, scale, relu)
    engine = engines.choose(backend, q.device, Problem(side, side, support)).engine
    return engine.logsumexp(support, side, q, k, dtype)


@_body("checked_weight")
def _(row_weight: Tensor, dtype: torch.dtype) -> Tensor:
    validation.check_row_weight(row_weight)
    return row_weight.to(dtype, copy=True, memory_format=torch.contiguous_format)


@_body("paired_rows")
def _(*args: Any) -> tuple[Tensor, ...]:
    engine, problem, inputs = _problem(args[:6], Options(*args[6:]))
    kl, mean, norm = engine.paired_rows(problem, inputs)
    return kl, mean, *norm


@_body("mixture_rows")
def _(*args: Any) -> tuple[Tensor, ...]:
    engine, problem, inputs = _problem(args[:6], Options(*args[8:]))
    m_a, ln_l_a = args[6:8]
    return engine.mixture_rows(problem, inputs, m_a, relative_to_first_head(ln_l_a, problem.group))


@_body("rows_backward")
def _(row_grad: Tensor, mean: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    engine, problem, inputs = _problem(args[4:10], Options(*args[10:18]))
    want_a, want_b = args[18:]
    gradients = engine.backward(problem, inputs, Normalisers(*args[:4]), mean, row_grad, want_a, want_b)
    return tuple(x.new_empty(0) if grad is None else grad for grad, x in zip(gradients, inputs, strict=True))


@_body("train")
def _(*args: Any) -> tuple[Tensor, ...]:
    engine, problem, inputs = _problem(args[:6], Options(*args[11:]))
    norm, weight = Normalisers(*args[6:10]), args[10]
    loss, d_b_q, d_b_k, mass = engine.train(problem, inputs, norm, weight)
    validation.check_teacher_mass(mass, norm.m_a)
    return loss, d_b_q, d_b_k


@_body("scale_gradient")
def _(gradient: Tensor, upstream: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty(gradient.shape, dtype=dtype, device=gradient.device)
    # By pieces: a product in float32 of the whole gradient would be a temporary as large as the gradient.
    for to, piece in zip(out.view(-1).split(1 << 18), gradient.view(-1).split(1 << 18), strict=True):
        to.copy_(piece * upstream)
    return out


@torch.library.register_fake("streamkl::logsumexp")
def _(q: Tensor, k: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    dtype = args[-2]
    return _empty_rows(q, dtype), _empty_rows(q, dtype)


@torch.library.register_fake("streamkl::checked_weight")
def _(row_weight: Tensor, dtype: torch.dtype) -> Tensor:
    return row_weight.new_empty(row_weight.shape, dtype=dtype)


@torch.library.register_fake("streamkl::paired_rows")
def _(a_q: Tensor, a_k: Tensor, b_q: Tensor, *args: object) -> tuple[Tensor, ...]:
    return tuple(_empty_rows(b_q, compute_dtype(a_q.dtype, b_q.dtype)) for _ in range(6))


@torch.library.register_fake("streamkl::mixture_rows")
def _(a_q: Tensor, a_k: Tensor, b_q: Tensor, *args: object) -> tuple[Tensor, ...]:
    return tuple(_empty_rows(b_q, compute_dtype(a_q.dtype, b_q.dtype)) for _ in range(3))


@torch.library.register_fake("streamkl::rows_backward")
def _(row_grad: Tensor, mean: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    tensors, (want_a, want_b) = args[4:8], args[-2:]
    wanted = (want_a, want_a, want_b, want_b)
    return tuple(x.new_empty(x.shape if want else 0) for x, want in zip(tensors, wanted, strict=True))


@torch.library.register_fake("streamkl::train")
def _(a_q: Tensor, a_k: Tensor, b_q: Tensor, b_k: Tensor, *args: object) -> tuple[Tensor, ...]:
    dtype = compute_dtype(a_q.dtype, b_q.dtype)
    return tuple(b_q.new_empty(shape, dtype=dtype) for shape in ((), b_q.shape, b_k.shape))


@torch.library.register_fake("streamkl::scale_gradient")
def _(gradient: Tensor, upstream: Tensor, dtype: torch.dtype) -> Tensor:
    return gradient.new_empty(gradient.shape, dtype=dtype)


def _save_paired(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _save_rows(ctx, inputs, *output[1:])


def _save_mixture(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _save_rows(ctx, inputs, None, *inputs[6:8], *output[1:])


def _save_rows(ctx: Any, inputs: tuple[Any, ...], mean: Tensor | None, *norm: Tensor) -> None:
    ctx.arguments, ctx.options = len(inputs), inputs[-8:]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:6], mean, *norm)


def _rows_backward(ctx: Any, row_grad: Tensor | None, *_: object) -> tuple[Tensor | None, ...]:
    if row_grad is None:
        return (None,) * ctx.arguments
    saved, needs = ctx.saved_tensors, ctx.needs_input_grad
    tensors, mean, norm = saved[:6], saved[6], saved[7:]
    want_a, want_b = needs[0] or needs[1], needs[2] or needs[3]
    gradients = torch.ops.streamkl.rows_backward(row_grad, mean, *norm, *tensors, *ctx.options, want_a, want_b)
    wanted = (grad if need else None for grad, need in zip(gradients, needs[:4], strict=True))
    return (*wanted, *(None,) * (ctx.arguments - 4))


for _name, _save in (("paired_rows", _save_paired), ("mixture_rows", _save_mixture)):
    torch.library.register_autograd(f"streamkl::{_name}", _rows_backward, setup_context=_save)


def _save_train(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.arguments = len(inputs)
    ctx.set_materialize_grads(False)  # the gradients are outputs too: no zeros as large as they
    ctx.dtype = inputs[2].dtype
    ctx.save_for_backward(*output[1:])


def _train_backward(ctx: Any, upstream: Tensor | None, *_: object) -> tuple[Tensor | None, ...]:
    if upstream is None:
        return (None,) * ctx.arguments
    gradients = (
        torch.ops.streamkl.scale_gradient(gradient, upstream, ctx.dtype) if need else None
        for gradient, need in zip(ctx.saved_tensors, ctx.needs_input_grad[2:4], strict=True)
    )
    return (None, None, *gradients, *(None,) * (ctx.arguments - 4))


torch.library.register_autograd("streamkl::train", _train_backward, setup_context=_save_train)


def _not_differentiable(what: str) -> Callable[..., None]:
    def raise_error(ctx: Any, *_: object) -> None:
        raise RuntimeError(what)

    return raise_error


for _name, _what in {
    "rows_backward": "streamkl: the gradient of attention_kl is not differentiated a second time",
    "scale_gradient": "streamkl: the gradient of attention_kl is not differentiated a second time",
    "logsumexp": "streamkl: attention_lse is not differentiated; detach q and k, or the result",
}.items():
    torch.library.register_autograd(f"streamkl::{_name}", _not_differentiable(_what))
