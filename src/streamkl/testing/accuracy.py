"""The accuracy rule, and how a case is run for it.

An output may err against the float64 reference at most twice as much as the eager implementation does, plus one
rounding of the output. Eager is ``reference.py`` in the inputs' own dtypes: products in them, everything after in
float32. If ``teacher_lse`` is given, the effect of its rounding on the outputs is added. No tolerance is set by hand.
Where an infinite input makes rows nan, the same rows must be nan, and nothing else is compared.

In float32 and float64 the engine rounds as eager does, and eager may be exact by luck. Where a side has such a dtype,
eager's error is the largest over several orders of head dimensions and index heads, which change no exact value. Where
both sides have, the error of a reduced loss is the sum of its rows' errors, so that none cancels another. Orders are
run until the rule holds: each can only allow more, so the remaining ones cannot change the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

import streamkl
from streamkl import reference
from streamkl.testing.problems import FAR_BELOW, Case, mask_of

EAGER_ROWS = 512
"""The number of rows, of all runs together, whose largest eager error counts: a case of few rows is run more often."""

EAGER_PAIRS = 1 << 22
"""How many logits per head all eager runs together may compute."""

LOGIT_ORDERS = 4
"""The number of head dim orders in which float32 logits are computed: a single one may be exact by luck."""


class Results(NamedTuple):
    """What a call returns.

    Attributes:
        loss: The loss.
        gradients: The gradients that were asked for, by the name of their input.
    """

    loss: Tensor
    gradients: dict[str, Tensor]

    def named(self) -> dict[str, Tensor]:
        """All outputs by name."""
        return {"loss": self.loss, **self.gradients}


class Errors(NamedTuple):
    """The errors of a call, and what the accuracy rule allows.

    Attributes:
        error: The largest error of each output against float64, by its name.
        bound: The largest that the rule allows. Where all outputs keep the rule, it comes from the eager runs until
            then; further runs might allow more.
    """

    error: dict[str, float]
    bound: dict[str, float]

    @property
    def worst(self) -> float:
        """The largest ratio of error to bound: the rule holds where it is at most 1."""
        ratios = (_ratio(error, self.bound[name]) for name, error in self.error.items())
        return max(ratios, default=0.0)

    def __str__(self) -> str:
        return ", ".join(f"{name} {error:.3g} (allowed {self.bound[name]:.3g})" for name, error in self.error.items())


def evaluate(function: Callable[..., Tensor], tensors: dict[str, Tensor], case: Case, **options: Any) -> Results:
    """Runs a function with the signature of the case's forward, and backward if the case wants gradients.

    Args:
        function: What to run.
        tensors: The inputs by name: ``case.tensors`` or ``case.clean(...)``.
        case: Names the gradients that are wanted and their upstream.
        options: Keyword arguments of the call.
    """
    leaves = {name: x.detach().requires_grad_(name in case.wanted) for name, x in tensors.items()}
    loss = function(**leaves, **options)
    if not case.wanted:
        return Results(loss, {})
    gradients = torch.autograd.grad(loss, [leaves[name] for name in case.wanted], case.upstream.to(loss.dtype))
    return Results(loss.detach(), dict(zip(case.wanted, gradients, strict=True)))


def check_accuracy(case: Case, backend: str = "auto", function: Callable[..., Tensor] | None = None) -> Errors:
    """Runs a case on an engine and holds it to the rule.

    Args:
        case: From `random_case` or `random_indexer_case`.
        backend: The engine.
        function: What to hold to the rule instead of the public function: called with the same arguments.

    Returns:
        Errors and bounds; the engine passes if ``worst <= 1``.

    Examples:
        >>> from streamkl.testing import check_accuracy, random_case
        >>> check_accuracy(random_case(7)).worst <= 1
        True
    """
    call: Callable[..., Tensor] = getattr(streamkl, case.function) if function is None else function
    ours = evaluate(call, case.tensors, case, **case.options, teacher_lse=case.teacher_lse, backend=backend).named()
    case = case.to("cpu")  # not every device has float64
    ours = {name: x.cpu() for name, x in ours.items()}
    nan_rows = _nan_rows(case)
    if nan_rows is not None and nan_rows.any():
        expected = nan_rows if case.options.get("reduction") == "none" else torch.tensor(True)
        right = torch.equal(ours["loss"].isnan(), expected) and not ours["loss"].isinf().any()
        return Errors({"loss": 0.0 if right else torch.inf}, {"loss": 0.0})
    exact = evaluate(_definition(case), case.clean(torch.float64), case, **case.options).named()
    error, least, lse_error = {}, {}, _lse_error(case)
    for name, value in ours.items():
        if value.shape != exact[name].shape:
            raise AssertionError(f"{name} has shape {list(value.shape)}, not {list(exact[name].shape)}: {case}")
        info = torch.finfo(value.dtype)
        error[name] = _largest(value.double() - exact[name])
        least[name] = info.eps * max(_largest(exact[name]), info.smallest_normal) + lse_error.get(name, 0.0)
    errors = Errors(error, least)
    for eager_error in _eager_errors(case, exact):
        errors = Errors(error, {name: 2 * eager_error[name] + least[name] for name in error})
        if errors.worst <= 1:
            break
    return errors


def _nan_rows(case: Case) -> Tensor | None:
    """Which rows of an infinite problem have a loss of nan, in the shape of the rows; ``None`` if all is finite."""
    if case.infinite is None:
        return None
    tensors, options = case.clean(torch.float64, finite=False), {**case.options, "reduction": "none"}
    return _definition(case)(**tensors, **options).isnan()


def _definition(case: Case) -> Callable[..., Tensor]:
    """The reference, which is given 0 for what must not matter in ``teacher_rest``."""
    function, rest = getattr(reference, case.function), case.options.get("teacher_rest")
    if rest is None:
        return function
    cleaned = torch.where(rest.isnan(), 0.0, rest)
    return lambda **arguments: function(**{**arguments, "teacher_rest": cleaned})


def _student(case: Case) -> str:
    """The prefix of the student's tensors."""
    return "index" if case.function == "indexer_kl" else "student"


def _operands(case: Case, tensors: dict[str, Tensor]) -> list[Tensor]:
    """The q and k of teacher and student, ``[B, heads, N, D]``."""
    packed = case.options.get("cu_seqlens_q") is not None
    operands = []
    for name in ("teacher_q", "teacher_k", f"{_student(case)}_q", f"{_student(case)}_k"):
        x = tensors[name]
        x = x.unsqueeze(1) if name == "index_k" else x
        operands.append(x.transpose(0, 1)[None] if packed else x)
    return operands


def _eager_errors(case: Case, exact: dict[str, Tensor]) -> Iterator[dict[str, float]]:
    """The largest error of the eager implementation so far, after each order of the head dimensions.

    In float64 eager is the reference itself, so its error cannot be measured. There it is measured in float32, scaled
    by the ratio of the roundings, and doubled, because the reference may err as much as the engine.
    """
    tensors, scale = case.clean(), 1.0
    itemsizes = [x.dtype.itemsize for name, x in tensors.items() if name != "index_w"]
    if min(itemsizes) == 8:
        tensors = case.clean(torch.float32)
        scale = 2 * torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
        doubles = {name: x.double() for name, x in tensors.items()}
        exact = evaluate(_definition(case), doubles, case, **case.options).named()
    largest = dict.fromkeys(exact, 0.0)
    rng = torch.Generator().manual_seed(case.seed)
    may_be_exact = max(itemsizes) >= 4
    for run in range(_eager_runs(case) if may_be_exact else 1):
        orders = {}
        for side in ("teacher", _student(case)):
            dim = tensors[f"{side}_q"].shape[-1]
            order = torch.randperm(dim, generator=rng) if run else torch.arange(dim)
            orders[f"{side}_q"] = orders[f"{side}_k"] = order.to(case.upstream.device)
        heads = None
        if case.function == "indexer_kl" and run:  # its heads are summed, too
            heads = torch.randperm(tensors["index_q"].shape[1], generator=rng).to(case.upstream.device)

        shuffled = {name: _shuffled(name, x, orders, heads) for name, x in tensors.items()}
        eager = evaluate(_definition(case), shuffled, case, **case.options).named()
        for name, value in eager.items():
            wanted = _shuffled(name, exact[name], orders, heads)
            largest[name] = max(largest[name], scale * _largest(value.double() - wanted))
        yield largest
        if not run and min(itemsizes) >= 4 and case.options.get("reduction", "mean") != "none":
            largest["loss"] = max(largest["loss"], scale * _summed_row_error(case, tensors))
            yield largest


def _shuffled(name: str, x: Tensor, orders: dict[str, Tensor], heads: Tensor | None) -> Tensor:
    """A tensor, or its gradient, with head dimensions and, if ``heads`` is given, index heads in another order."""
    x = x[..., orders[name]] if name in orders else x
    if heads is None or name not in ("index_q", "index_w"):
        return x
    return x.index_select(1 if name == "index_q" else -1, heads)


def _eager_runs(case: Case) -> int:
    """How often eager is run: more often for few rows, less for a large problem."""
    rows = max(1, int((_weights(case) > 0).sum()))
    teacher_q, _, student_q, _ = _operands(case, case.tensors)
    pairs = max(1, _allowed(case).numel() * max(teacher_q.shape[1], student_q.shape[1]))
    least = 16 if case.function == "indexer_kl" else 4  # the sums over its heads can be exact by luck, too
    return max(1, min(64, max(least, EAGER_ROWS // rows), EAGER_PAIRS // pairs))


def _summed_row_error(case: Case, tensors: dict[str, Tensor]) -> float:
    """The eager error of a reduced loss if no row's error cancelled another's."""
    options = {**case.options, "reduction": "none"}
    eager = _definition(case)(**tensors, **options)
    exact = _definition(case)(**{name: x.double() for name, x in tensors.items()}, **options)
    error = (eager.double() - exact).abs().sum()
    if case.options.get("reduction", "mean") == "mean":
        error = error / _weights(case).sum().clamp_min(torch.finfo(torch.float64).tiny)
    return error.item()


def _weights(case: Case) -> Tensor:
    """The weight of each row, ``[B, R, Nq]``: 0 where it sees no key."""
    packed = case.options.get("cu_seqlens_q") is not None
    batch, heads, rows, _ = _operands(case, case.tensors)[2].shape
    shape = (batch, 1 if case.function == "indexer_kl" else heads, rows)
    ones = torch.ones(shape, dtype=torch.float64, device=case.upstream.device)
    weight = case.options.get("row_weight")
    if weight is not None:
        weight = (weight[None] if packed else weight).double()
        ones = ones * (weight if weight.dim() == 3 else weight[:, None])
    return torch.where(_allowed(case).any(-1), ones, 0.0)


def _allowed(case: Case) -> Tensor:
    """Which pairs are allowed, ``[Nq, Nk]``, or ``[B, topk_heads, Nq, Nk]`` where keys are selected."""
    teacher_q, teacher_k, _, _ = _operands(case, case.tensors)
    mask = mask_of(case.options)
    return reference.allowed_pairs(teacher_q.shape[2], teacher_k.shape[2], **mask).to(case.upstream.device)


def _lse_error(case: Case) -> dict[str, float]:
    """The effect of a given ``teacher_lse`` or ``teacher_rest`` on the outputs, to first order.

    Probabilities are then ``e^(a - LSE)``, normalised by an LSE of other logits. Those of each head are off by a factor
    of at most ``1 + delta``, where ``delta`` is the rounding of the LSE, plus the error of float32 (float64) logits,
    plus the rounding of the probability itself, which a softmax of its own weights would divide away. The loss of a
    row changes by at most ``delta (1 + 2 sum p |ln p - ln q|)``, the derivative of a student logit by ``delta p``.
    With ``teacher_rest`` an LSE, given or not, is in the share by which a head is weighed, and in the mean of shares.
    """
    rest = case.options.get("teacher_rest") if _is_mixture(case) else None
    lse = case.teacher_lse if _reads_lse(case) else None
    if lse is None and rest is None:
        return {}
    finite = torch.cat([x[x.isfinite()] for x in (lse, rest) if x is not None])
    x, o, student = case.clean(torch.float64), case.options, _student(case)
    packed = o.get("cu_seqlens_q") is not None
    teacher_q, teacher_k, q, k = _operands(case, x)
    scale = o.get("teacher_scale")
    a = reference.logits(teacher_q, teacher_k, scale)
    q_float, k_float = teacher_q.float(), teacher_k.float()
    a_of_float = reference.logits(q_float.double(), k_float.double(), scale)
    possible = ~(teacher_k == FAR_BELOW).any(-1).any(1)  # [B, Nk]: the rounding of other logits does not matter
    logit_error, rng = 0.0, torch.Generator().manual_seed(case.seed)
    for run in range(LOGIT_ORDERS):
        order = torch.randperm(q_float.shape[-1], generator=rng) if run else torch.arange(q_float.shape[-1])
        order = order.to(q_float.device)
        a_float = reference.logits(q_float[..., order], k_float[..., order], scale)
        logit_error = max(logit_error, _largest((a_float - a_of_float) * possible[:, None, None]))
    eps, eps_float = torch.finfo(finite.dtype).eps, torch.finfo(torch.float32).eps
    delta = eps * _largest(finite) + eps / eps_float * logit_error + eps
    delta *= 1 if rest is None else 3

    scores = reference.logits(q, k, o.get(f"{student}_scale"))  # [B, heads, Nq, Nk]
    indexer = case.function == "indexer_kl"
    scores = scores.relu() if (o.get("activation", "relu") if indexer else o.get("student_activation")) else scores
    w = scores.new_ones(scores.shape[:3])
    if "index_w" in x:
        w = (x["index_w"][None] if packed else x["index_w"]).transpose(1, 2)
    b = (scores * w[..., None]).sum(1, keepdim=True) if indexer else scores
    allowed_a, allowed = (reference.for_heads(_allowed(case), n) for n in (a.shape[1], b.shape[1]))
    log_q = reference.log_softmax(b, allowed)
    p = reference.log_softmax(a, allowed_a).exp() * allowed_a
    if rest is not None:
        inside = torch.where(allowed_a, a, -torch.inf).logsumexp(-1)
        p = p * torch.sigmoid(inside - rest.double().view(a.shape[:3])).nan_to_num_(0.0)[..., None]
    p = p.unflatten(1, (b.shape[1], -1)).mean(2)
    if rest is not None:
        p = p / p.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    distance = torch.where(p > 0, p * (p.log() - log_q).abs(), 0.0).sum(-1)

    weight = _weights(case)
    if o.get("reduction", "mean") == "mean":
        weight = weight / weight.sum().clamp_min(torch.finfo(torch.float64).tiny)
    rows = delta * weight * (1 + 2 * distance)
    weight = weight * case.upstream.abs()
    scale = q.shape[-1] ** -0.5 if (given := o.get(f"{student}_scale")) is None else given
    moved = delta * weight[..., None] * p
    moved_scores = abs(scale) * moved * w.abs()[..., None]
    repeats = q.shape[1] // k.shape[1]
    dq = moved_scores @ k.abs().repeat_interleave(repeats, 1)
    dk = (moved_scores.transpose(-1, -2) @ q.abs()).unflatten(1, (-1, repeats)).sum(2)
    return {
        "loss": _largest(rows) if o.get("reduction") == "none" else rows.sum().item(),
        f"{student}_q": _largest(dq),
        f"{student}_k": _largest(dk),
        f"{student}_w": _largest((moved * scores.abs()).sum(-1)),
    }


def _reads_lse(case: Case) -> bool:
    """Whether the call uses the LSE: for a head mean, or for loss and student gradients in one pass."""
    o = case.options
    if _is_mixture(case):
        return True
    one_pass = o.get("reduction") != "none" and not any(name.startswith("teacher") for name in case.wanted)
    return o.get("divergence", "forward") == "forward" and one_pass


def _is_mixture(case: Case) -> bool:
    """Whether heads of the teacher are averaged."""
    if case.function == "indexer_kl":
        return True
    return case.tensors["teacher_q"].shape[1] != case.tensors["student_q"].shape[1]  # heads, packed or not


def _largest(x: Tensor) -> float:
    """The largest magnitude, nan if there is one, 0 for an empty tensor."""
    return x.abs().max().item() if x.numel() else 0.0


def _ratio(error: float, bound: float) -> float:
    """``error / bound``; infinite for a nan and for any error where none is allowed."""
    if error == 0:
        return 0.0
    return error / bound if bound > 0 and error == error else float("inf")
