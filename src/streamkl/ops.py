"""The registered operators: schemas, bodies, fakes and gradients. ``loss.py`` composes a loss of them.

An operator sees q and k as ``[B, H, N, D]`` and row vectors as ``[B, heads, Nq]``; a packed (varlen) batch has
``B = 1`` and ``cu_seqlens``. Its body builds the `Problem` and hands it to the engine; nothing is computed here but
reductions. Side ``a`` is the target, side ``b`` is compared with it (`Problem`); an indexer is a head-summed side
``b``.
"""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from streamkl import engines, padding, value_checks
from streamkl.problem import Inputs, Problem, Side, Support, compute_dtype
from streamkl.state import RowStats, relative_to_first_head

_KEYS = "Tensor? topk, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k"
_TENSORS = f"Tensor a_q, Tensor a_k, Tensor b_q, Tensor b_k, Tensor? b_w, {_KEYS}"
_STATS = "Tensor m_a, Tensor ln_l_a, Tensor m_b, Tensor ln_l_b"
_OPTIONS = (
    "float? a_scale, float? b_scale, bool a_relu, bool b_relu, bool b_head_summed, SymInt? left, SymInt? right, "
    "SymInt key_span, SymInt runs, bool deterministic, str backend"
)
SCHEMAS = {
    "logsumexp": f"(Tensor q, Tensor k, Tensor? w, {_KEYS}, float? scale, bool relu, bool head_summed, "
    "SymInt? left, SymInt? right, SymInt key_span, bool checked, ScalarType dtype, str backend) "
    "-> (Tensor m, Tensor ln_l)",
    "padded_sequences": "(Tensor mask) -> (Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor first)",
    "checked_weight": "(Tensor row_weight, ScalarType dtype) -> Tensor",
    "checked_mass": "(Tensor weight, Tensor mass, Tensor lse) -> Tensor",
    "paired_rows": f"({_TENSORS}, {_OPTIONS}) -> (Tensor kl, Tensor mean, {_STATS})",
    "mixture_rows": f"({_TENSORS}, Tensor m_a, Tensor ln_l_a, bool checked, {_OPTIONS}) "
    "-> (Tensor kl, Tensor m_b, Tensor ln_l_b, Tensor mass)",
    "rows_backward": f"(Tensor row_grad, Tensor? mean, {_STATS}, {_TENSORS}, {_OPTIONS}, bool want_a, bool want_b, "
    "bool round_keys) -> (Tensor d_a_q, Tensor d_a_k, Tensor d_b_q, Tensor d_b_k, Tensor d_b_w)",
    "train": f"({_TENSORS}, {_STATS}, Tensor weight, {_OPTIONS}) "
    "-> (Tensor loss, Tensor d_b_q, Tensor d_b_k, Tensor d_b_w)",
    "scale_gradient": "(Tensor gradient, Tensor upstream, ScalarType dtype) -> Tensor",
}
"""The operators of the namespace ``streamkl``, by name.

``checked`` says that an earlier operator has checked ``topk``: the first one of a loss does, and no other.
``round_keys`` casts dK to the dtype of the keys; ranks that add theirs do so before it is rounded.
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

    def detached(self) -> Tensors:
        """Those of a pass without gradients."""
        return Tensors._make(None if x is None else x.detach() for x in self)


class Options(NamedTuple):
    """The numbers of a divergence, in the order of its schema."""

    a_scale: float | None
    b_scale: float | None
    a_relu: bool
    b_relu: bool
    b_head_summed: bool
    left: int | None
    right: int | None
    key_span: int
    runs: int
    deterministic: bool
    backend: str


def bound(operator: str, args: Sequence[Any]) -> Any:
    """An operator's arguments, as a tuple with the names of its schema."""
    return _arguments(operator)._make(args)


@functools.cache
def _arguments(operator: str) -> Any:
    schema = getattr(torch.ops.streamkl, operator).default._schema
    return namedtuple(operator, [argument.name for argument in schema.arguments])


def fields_of(group: Any, given: Any) -> Any:
    """A group of an operator's arguments, by the names of its fields."""
    return group._make(getattr(given, name) for name in group._fields)


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


def _problem(given: Any) -> tuple[engines.Engine, Problem, Inputs]:
    inputs: Inputs = fields_of(Inputs, given)
    a = Side.of(inputs.a_q, inputs.a_k, given.a_scale, given.a_relu)
    b = Side.of(inputs.b_q, inputs.b_k, given.b_scale, given.b_relu, given.b_head_summed)
    problem = Problem(a, b, _support(inputs.b_q, inputs.b_k, given), given.deterministic, given.runs)
    return engines.choose(given.backend, inputs.b_q.device, problem).engine, problem, inputs


def _support(q: Tensor, k: Tensor, given: Any) -> Support:
    support = Support.of(
        q, k, given.left, given.right, given.cu_seqlens_q, given.cu_seqlens_k, given.topk, given.key_span
    )  # fmt: skip
    value_checks.check_cu_seqlens(support.cu_seqlens_q, support.cu_seqlens_k, support.nq, support.nk)
    return support


def _check_topk(engine: engines.Engine, support: Support, checked: bool = False) -> None:
    if not checked:
        value_checks.check_topk(support.topk, support.nk, first_wrong_row=getattr(engine, "first_wrong_row", None))


@body("logsumexp")
def _(*args: Any) -> tuple[Tensor, Tensor]:
    given = bound("logsumexp", args)
    support = _support(given.q, given.k, given)
    side = Side.of(given.q, given.k, given.scale, given.relu, given.head_summed)
    engine = engines.choose(given.backend, given.q.device, Problem(side, side, support)).engine
    _check_topk(engine, support, given.checked)
    return engine.logsumexp(support, side, given.q, given.k, given.w, given.dtype)


@body("padded_sequences")
def _(mask: Tensor) -> tuple[Tensor, ...]:
    value_checks.check_padding_holes(mask)
    return padding.sequences(mask)


@body("checked_weight")
def _(row_weight: Tensor, dtype: torch.dtype) -> Tensor:
    value_checks.check_row_weight(row_weight)
    return row_weight.to(dtype, copy=True, memory_format=torch.contiguous_format)


@body("checked_mass")
def _(weight: Tensor, mass: Tensor, lse: Tensor) -> Tensor:
    none = (lse == -torch.inf).unflatten(1, (weight.shape[1], -1)).any(2)  # the LSE of a dead row
    mass = torch.where(none, torch.inf, mass)
    value_checks.check_teacher_mass(torch.where(weight == 0, 1.0, mass), lse)
    return weight.clone()


@body("paired_rows")
def _(*args: Any) -> tuple[Tensor, ...]:
    engine, problem, inputs = _problem(bound("paired_rows", args))
    _check_topk(engine, problem.support)
    kl, mean, (m_a, ln_l_a, m_b, ln_l_b) = engine.paired_rows(problem, inputs)
    nan = _nan_unless_finite(kl)
    return kl + nan, mean, m_a + nan, ln_l_a, m_b + nan, ln_l_b


@body("mixture_rows")
def _(*args: Any) -> tuple[Tensor, ...]:
    given = bound("mixture_rows", args)
    engine, problem, inputs = _problem(given)
    _check_topk(engine, problem.support, given.checked)
    relative = relative_to_first_head(given.ln_l_a, problem.head_group)
    kl, m_b, ln_l_b, s = engine.mixture_rows(problem, inputs, given.m_a, relative)
    nan = _nan_unless_finite(kl)
    return kl + nan, m_b + nan, ln_l_b, s * torch.exp(-given.ln_l_a[:, :: problem.head_group])


@body("rows_backward")
def _(*args: Any) -> tuple[Tensor, ...]:
    given = bound("rows_backward", args)
    engine, problem, inputs = _problem(given)
    stats = fields_of(RowStats, given)
    gradients = engine.backward(
        problem, inputs, stats, given.mean, given.row_grad, given.want_a, given.want_b, given.round_keys
    )  # fmt: skip
    return tuple(_or_empty(grad, given.row_grad) for grad in gradients)


@body("train")
def _(*args: Any) -> tuple[Tensor, ...]:
    given = bound("train", args)
    engine, problem, inputs = _problem(given)
    # `topk` was checked by the logsumexp of a side, which comes before.
    loss, gradients, mass = engine.train(problem, inputs, fields_of(RowStats, given), given.weight)
    value_checks.check_teacher_mass(torch.where(given.m_b == -torch.inf, 1.0, mass), given.m_a)
    of_b = (gradients.b_q, gradients.b_k, gradients.b_w)
    return loss + _nan_unless_finite(loss), *(_or_empty(grad, loss) for grad in of_b)


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
def _(*args: Any) -> tuple[Tensor, ...]:
    given = bound("logsumexp", args)
    return tuple(_empty_rows(given.q, given.dtype, given.head_summed) for _ in range(2))


@torch.library.register_fake("streamkl::padded_sequences")
def _(mask: Tensor) -> tuple[Tensor, ...]:
    return tuple(mask.new_empty(size, dtype=torch.int64) for size in (5 * len(mask) + 1, 5 * len(mask) + 1, len(mask)))


@torch.library.register_fake("streamkl::checked_weight")
def _(row_weight: Tensor, dtype: torch.dtype) -> Tensor:
    return row_weight.new_empty(row_weight.shape, dtype=dtype)


@torch.library.register_fake("streamkl::checked_mass")
def _(weight: Tensor, mass: Tensor, lse: Tensor) -> Tensor:
    return torch.empty_like(weight)


@torch.library.register_fake("streamkl::paired_rows")
def _(*args: Any) -> tuple[Tensor, ...]:
    given = bound("paired_rows", args)
    return tuple(_empty_rows(given.b_q, compute_dtype(given.a_q.dtype, given.b_q.dtype)) for _ in range(6))


@torch.library.register_fake("streamkl::mixture_rows")
def _(*args: Any) -> tuple[Tensor, ...]:
    given = bound("mixture_rows", args)
    dtype = compute_dtype(given.a_q.dtype, given.b_q.dtype)
    return tuple(_empty_rows(given.b_q, dtype, given.b_head_summed) for _ in range(4))


@torch.library.register_fake("streamkl::rows_backward")
def _(*args: Any) -> tuple[Tensor, ...]:
    given = bound("rows_backward", args)
    wanted = Inputs(given.want_a, given.want_a, given.want_b, given.want_b, given.want_b)
    keys = None if given.round_keys else compute_dtype(given.a_q.dtype, given.b_q.dtype)
    return tuple(
        x.new_empty(x.shape, dtype=keys if name.endswith("_k") else None)
        if want and x is not None
        else given.row_grad.new_empty(0)
        for name, x, want in zip(Inputs._fields, fields_of(Inputs, given), wanted, strict=True)
    )


@torch.library.register_fake("streamkl::train")
def _(*args: Any) -> tuple[Tensor, ...]:
    given = bound("train", args)
    shapes = ((), given.b_q.shape, given.b_k.shape, (0,) if given.b_w is None else given.b_w.shape)
    dtype = compute_dtype(given.a_q.dtype, given.b_q.dtype)
    return tuple(given.b_q.new_empty(shape, dtype=dtype) for shape in shapes)


@torch.library.register_fake("streamkl::scale_gradient")
def _(gradient: Tensor, upstream: Tensor, dtype: torch.dtype) -> Tensor:
    return gradient.new_empty(gradient.shape, dtype=dtype)


def _save_paired(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, mean, *stats = output
    _save_rows(ctx, bound("paired_rows", inputs), mean, RowStats(*stats))


def _save_mixture(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    given = bound("mixture_rows", inputs)
    _, m_b, ln_l_b, _ = output
    _save_rows(ctx, given, None, RowStats(given.m_a, given.ln_l_a, m_b, ln_l_b))


def _save_rows(ctx: Any, given: Any, mean: Tensor | None, stats: RowStats) -> None:
    ctx.names, ctx.options = given._fields, fields_of(Options, given)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(mean, *stats, *fields_of(Tensors, given))


def _rows_backward(ctx: Any, row_grad: Tensor | None, *_: object) -> tuple[Tensor | None, ...]:
    if row_grad is None:
        return (None,) * len(ctx.names)
    needs = dict(zip(ctx.names, ctx.needs_input_grad, strict=True))
    want_a, want_b = (any(needs[name] for name in names) for names in (("a_q", "a_k"), ("b_q", "b_k", "b_w")))
    gradients = torch.ops.streamkl.rows_backward(row_grad, *ctx.saved_tensors, *ctx.options, want_a, want_b, True)
    return _in_place_of(needs, dict(zip(Inputs._fields, gradients, strict=True)))


def _in_place_of(needs: dict[str, bool], gradients: dict[str, Tensor]) -> tuple[Tensor | None, ...]:
    """The gradients of the inputs that need one, in the order of an operator's arguments."""
    return tuple(gradients[name] if need and name in gradients else None for name, need in needs.items())


for _name, _save in (("paired_rows", _save_paired), ("mixture_rows", _save_mixture)):
    torch.library.register_autograd(f"streamkl::{_name}", _rows_backward, setup_context=_save)


def _save_train(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    given = bound("train", inputs)
    _, *gradients = output
    ctx.names = given._fields
    ctx.set_materialize_grads(False)  # the gradients are outputs too: allocate no zeros of their size
    ctx.dtypes = {"b_q": given.b_q.dtype, "b_k": given.b_k.dtype, "b_w": None if given.b_w is None else given.b_w.dtype}
    ctx.save_for_backward(*gradients)


def _train_backward(ctx: Any, upstream: Tensor | None, *_: object) -> tuple[Tensor | None, ...]:
    if upstream is None:
        return (None,) * len(ctx.names)
    needs = dict(zip(ctx.names, ctx.needs_input_grad, strict=True))
    gradients = {
        name: torch.ops.streamkl.scale_gradient(gradient, upstream, dtype)
        for (name, dtype), gradient in zip(ctx.dtypes.items(), ctx.saved_tensors, strict=True)
        if needs[name]
    }
    return _in_place_of(needs, gradients)


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
