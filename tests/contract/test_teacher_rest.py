"""``teacher_rest``: sinks, local windows and tails of the teacher's softmax are in the denominator of its target."""

from typing import Any

import pytest
import torch
from torch import Tensor

from streamkl import attention_kl, attention_lse, indexer_kl
from streamkl.testing import Heads, IndexerHeads, make_case, make_indexer_case

KEYS, WINDOW, TOKENS = 24, 5, 20


def joint(q: Tensor, k: Tensor, sink: Tensor, inside: slice, groups: int) -> Tensor:
    """``[B, groups, Nq, keys]``: the mean attention of each head group on some keys, renormalised to them.

    The softmax runs over all keys and a sink logit per head, written out.
    """
    logits = q.double() @ k.double().repeat_interleave(q.shape[1] // k.shape[1], 1).mT * q.shape[-1] ** -0.5
    column = sink.double()[None, :, None, None].expand(*logits.shape[:3], 1)
    p = torch.cat((logits, column), -1).softmax(-1)[..., inside].unflatten(1, (groups, -1)).mean(2)
    return p / p.sum(-1, keepdim=True)


def rest_of(q: Tensor, k: Tensor, sink: Tensor) -> Tensor:
    """``[B, H, Nq]``: the log-sum-exp of the keys outside and of the sink."""
    return torch.logaddexp(attention_lse(q, k), sink[None, :, None])


def drawn(heads: int, kv_heads: int, student: int) -> tuple[Tensor, ...]:
    rng = torch.Generator().manual_seed(0)
    shapes = ((2, heads, TOKENS, 16), (2, kv_heads, KEYS, 16), (2, student, TOKENS, 8), (2, 1, KEYS, 8), (heads,))
    return tuple(torch.randn(shape, generator=rng) for shape in shapes)


def reduced(kl: Tensor, reduction: str) -> Tensor:
    return kl if reduction == "none" else getattr(kl, reduction)()


@pytest.mark.parametrize("teacher_lse", [False, True], ids=["", "lse"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("groups", [1, 2])
def test_it_is_the_joint_softmax_with_sink_and_window(groups, reduction, teacher_lse, backend) -> None:
    q, k, student_q, student_k, sink = drawn(4, 2, groups)
    inside = slice(0, KEYS - WINDOW)  # the last keys are the window, which the student does not see
    lse = attention_lse(q, k[:, :, inside]) if teacher_lse else None
    leaves = [x.requires_grad_() for x in (student_q, student_k[:, :, inside].contiguous())]
    options = {"teacher_lse": lse, "reduction": reduction, "backend": backend}
    rest = rest_of(q, k[:, :, KEYS - WINDOW :], sink)
    ours = attention_kl(q, k[:, :, inside], *leaves, teacher_rest=rest, **options)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    p = joint(q, k, sink, inside, groups)
    log_q = (wide[0] @ wide[1].mT * 8**-0.5).log_softmax(-1)
    expected = reduced((p * (p.log() - log_q)).sum(-1), reduction)
    assert_close_with_gradients(ours, expected, leaves, wide)


@pytest.mark.indexer
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_so_is_that_of_an_indexer(reduction, backend) -> None:
    q, k, index_q, index_k, sink = drawn(6, 3, 2)
    inside = slice(WINDOW, KEYS)
    leaves = [x.requires_grad_() for x in (index_q, index_k[:, 0, inside].contiguous())]
    rest = rest_of(q, k[:, :, :WINDOW], sink)
    options = {"causal": False, "reduction": reduction, "backend": backend}
    ours = indexer_kl(q, k[:, :, inside], *leaves, teacher_rest=rest, **options)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    p = joint(q, k, sink, inside, 1)
    log_q = (wide[0] @ wide[1][:, None].mT * 8**-0.5).relu().sum(1, keepdim=True).log_softmax(-1)
    expected = reduced((p * (p.log() - log_q)).sum(-1), reduction)
    assert_close_with_gradients(ours, expected, leaves, wide)


def assert_close_with_gradients(ours: Tensor, expected: Tensor, leaves: list[Tensor], wide: list[Tensor]) -> None:
    upstream = torch.linspace(0.5, 1.5, ours.numel()).view(ours.shape)
    torch.testing.assert_close(ours.double(), expected, rtol=2e-5, atol=2e-6)
    got = torch.autograd.grad(ours, leaves, upstream)
    for x, y in zip(got, torch.autograd.grad(expected, wide, upstream.double()), strict=True):
        torch.testing.assert_close(x.double(), y, rtol=0, atol=2e-6 * float(y.abs().max()) + 1e-7)


def test_heads_that_are_compared_one_by_one_do_not_feel_it(backend) -> None:
    case = make_case(1, heads=Heads(3, 3, 3, 1), batch=1, causal=True, teacher_rest=True, guard=False)
    rest = case.options.pop("teacher_rest")
    without, with_it = (
        attention_kl(**case.tensors, **case.options, teacher_rest=x, backend=backend) for x in (None, rest)
    )
    assert torch.equal(without, with_it)


def test_nothing_else_is_minus_infinity(backend) -> None:
    case = make_case(2, heads=Heads(4, 2, 2, 1), batch=1, causal=True, guard=False)
    nothing = torch.full((1, 4, case.tensors["teacher_q"].shape[2]), -torch.inf)
    without, with_it = (
        attention_kl(**case.tensors, **case.options, teacher_rest=x, backend=backend) for x in (None, nothing)
    )
    torch.testing.assert_close(with_it, without, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("function", ["attention_kl", pytest.param("indexer_kl", marks=pytest.mark.indexer)])
def test_one_that_is_not_finite_makes_nan_of_its_row_alone(function, value, backend) -> None:
    options: dict[str, Any] = {"batch": 1, "causal": True, "reduction": "none", "teacher_rest": True, "guard": False}
    if function == "attention_kl":
        case, call = make_case(3, heads=Heads(4, 2, 1, 1), **options), attention_kl
    else:
        case, call = make_indexer_case(3, heads=IndexerHeads(4, 2, 2), **options), indexer_kl
    case.options["teacher_rest"][0, 1, 7] = value
    rows = call(**case.tensors, **case.options, backend=backend)
    assert torch.equal(rows[0, 0].isnan(), torch.arange(rows.shape[-1]) == 7)


def test_all_attention_outside_leaves_shares_that_still_compare_heads() -> None:
    """A thousand nats outside: shares of e^-1000 have no float32, and their ratios do."""
    q, k, student_q, student_k, sink = drawn(4, 2, 1)
    leaves = (student_q, student_k)
    near, far = (attention_kl(q, k, *leaves, teacher_rest=rest_of(q, k, sink) + more) for more in (30.0, 1000.0))
    torch.testing.assert_close(near, far, rtol=1e-4, atol=1e-6)
