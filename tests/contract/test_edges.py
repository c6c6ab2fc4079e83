"""The edges of the contract: what is empty, dead, huge or oddly laid out."""

import subprocess
import sys
import textwrap

import pytest
import torch

from streamkl import attention_kl, attention_lse, reference
from streamkl.engines.triton.configs import architecture
from streamkl.engines.triton.meta import Config
from streamkl.testing import STUDENT, TEACHER, Heads, check_accuracy, evaluate, make_case


def run(case, backend: str):
    return evaluate(attention_kl, case.tensors, case, teacher_lse=case.teacher_lse, backend=backend, **case.options)


@pytest.mark.parametrize("heads", [Heads(4, 2, 4, 2), Heads(4, 2, 1, 1)], ids=["per_head", "head_mean"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(("batch", "tokens"), [(0, (5, 5)), (2, (0, 7)), (2, (7, 0)), (0, (0, 0))], ids=str)
@pytest.mark.parametrize("teacher_lse", [False, True], ids=["", "lse"])
def test_nothing_gives_zero(teacher_lse, batch, tokens, reduction, heads, backend) -> None:
    case = make_case(0, batch=batch, tokens=tokens, heads=heads, reduction=reduction, teacher_lse=teacher_lse)
    results = run(case, backend)
    expected = (batch, heads.student, tokens[0]) if reduction == "none" else ()
    assert results.loss.shape == expected
    for name, value in results.named().items():
        assert torch.equal(value, torch.zeros_like(value)), name


@pytest.mark.parametrize("starts", [([0], [0]), ([0, 0], [0, 0]), ([0, 0, 5, 5], [0, 0, 5, 5]), ([0, 3, 3], [0, 0, 4])])
@pytest.mark.parametrize("heads", [Heads(4, 2, 4, 2), Heads(4, 2, 1, 1)], ids=["per_head", "head_mean"])
@pytest.mark.parametrize("teacher_lse", [False, True], ids=["", "lse"])
def test_sequences_of_length_zero(teacher_lse, heads, starts, backend) -> None:
    tokens = (starts[0][-1] + 2, starts[1][-1] + 3)  # and tokens past the last sequence
    case = make_case(1, heads=heads, batch=1, tokens=tokens, cu_seqlens=starts, causal=True, teacher_lse=teacher_lse)
    errors = check_accuracy(case, backend)
    assert errors.worst <= 1, str(errors)


@pytest.mark.parametrize("tokens", [(0, 7), (7, 0)], ids=str)
def test_nothing_in_float16_gives_zero(tokens, backend) -> None:
    wanted = STUDENT + TEACHER
    for value in run(make_case(0, tokens=tokens, dtypes=(torch.float16,) * 2, wanted=wanted), backend).named().values():
        assert torch.equal(value, torch.zeros_like(value))


def test_tokens_past_the_last_sequence_do_not_matter(backend) -> None:
    case = make_case(2, batch=1, tokens=(20, 23), cu_seqlens=([0, 7, 15], [0, 9, 17]), reduction="none", guard=False)
    results = run(case, backend)
    assert torch.equal(results.loss[:, 15:], torch.zeros(4, 5))
    assert torch.equal(results.gradients["student_q"][15:], torch.zeros(5, 4, 32))
    assert torch.equal(results.gradients["student_k"][17:], torch.zeros(6, 4, 32))


@pytest.mark.slow
@pytest.mark.parametrize("heads", [Heads(2, 2, 2, 2), Heads(4, 1, 2, 2)], ids=["per_head", "groups"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("teacher_lse", [False, True], ids=["", "lse"])
@pytest.mark.parametrize("dead", ["causal", "window", "weight"])
def test_dead_rows_are_zero_and_leave_their_neighbours_bit_unchanged(
    dead, teacher_lse, reduction, heads, backend
) -> None:
    if backend == "triton" and (reduction == "sum" or (dead == "window" and teacher_lse)):
        pytest.skip("runs the kernels of another case: the interpreter is slow")
    weight = None
    options: dict = {"tokens": (40, 25), "causal": True}
    if dead == "window":
        options = {"tokens": (40, 9), "window": (2, 2)}
    if dead == "weight":
        options = {"tokens": (40, 40), "causal": True}
        weight = torch.ones(2, 40)
        weight[:, [0, 3, 17, 39]] = 0.0
    wanted = STUDENT if heads.teacher != heads.student or teacher_lse else STUDENT + TEACHER
    case = make_case(
        3, heads=heads, reduction=reduction, row_weight=weight, wanted=wanted, teacher_lse=teacher_lse, guard=False,
        **options,
    )  # fmt: skip
    rows = case.dead_rows
    assert rows.any()
    assert not rows.all()
    results = {}
    for content in (float("nan"), 0.0, -1e30, float("inf")):
        for name in ("teacher_q", "student_q"):
            case.tensors[name][:, :, rows] = content
        if case.teacher_lse is not None:
            case.teacher_lse[:, :, rows] = content
        results[content] = run(case, backend).named()
    first = results.pop(0.0)
    for content, other in results.items():
        for name, value in first.items():
            assert torch.equal(value, other[name]), f"{name} changed when dead rows held {content}"
    if reduction == "none":
        assert not first["loss"][:, :, rows].any()
    for name in wanted:
        assert not first[name].isnan().any()
        if name.endswith("_q"):
            assert not first[name][:, :, rows].any()


@pytest.mark.parametrize("heads", [Heads(2, 2, 2, 2), Heads(4, 2, 2, 1)], ids=["per_head", "groups"])
@pytest.mark.parametrize("teacher_lse", [False, True], ids=["", "lse"])
@pytest.mark.parametrize("size", [1e5, -1e5])
def test_logits_of_a_hundred_thousand(size, teacher_lse, heads, backend) -> None:
    offset = abs(size) ** 0.5
    case = make_case(
        4, heads=heads, offset=(offset, offset), causal=True, teacher_lse=teacher_lse,
        teacher_scale=float(torch.tensor(size).sign()), student_scale=float(torch.tensor(size).sign()),
    )  # fmt: skip
    logits = reference.logits(case.clean()["teacher_q"], case.clean()["teacher_k"], 1.0)
    assert logits[:, :, -1].abs().min() > 9e4
    errors = check_accuracy(case, backend)
    assert errors.worst <= 1, str(errors)


@pytest.mark.parametrize("heads", [Heads(2, 2, 2, 2), Heads(4, 2, 2, 1)], ids=["per_head", "groups"])
@pytest.mark.parametrize("offset", [(0.0, 70.0), (70.0, 0.0)], ids=["student", "teacher"])
def test_constant_offsets_of_thousands(offset, heads, backend) -> None:
    """An offset of one side's logits changes nothing but the rounding of the products."""
    case = make_case(5, heads=heads, offset=offset, teacher_scale=1.0, student_scale=1.0, spread=(0.3, 0.3))
    errors = check_accuracy(case, backend)
    assert errors.worst <= 1, str(errors)


@pytest.mark.slow
@pytest.mark.parametrize("teacher_lse", [False, True], ids=["", "lse"])
def test_a_million_keys(teacher_lse, backend, monkeypatch, request) -> None:
    if backend == "tiled" and not (teacher_lse or request.config.getoption("--nightly")):
        pytest.skip("half a minute: --nightly runs it")
    if backend == "triton" and (teacher_lse or not request.config.getoption("--nightly")):
        pytest.skip("a minute in the interpreter: --nightly runs it, without the log-sum-exp")
    monkeypatch.undo()  # real tiles: these keys would take the small ones minutes
    if backend == "triton":
        monkeypatch.setattr(architecture, "INTERPRETED", Config(rows=16, keys=4096, warps=1, stages=1))
    case = make_case(
        6, heads=Heads(2, 1, 1, 1), batch=1, tokens=(3, 1 << 20), dims=(16, 16), causal=True, guard=False,
        teacher_lse=teacher_lse,
    )  # fmt: skip
    errors = check_accuracy(case, backend)
    assert errors.worst <= 1, str(errors)


def test_a_hundred_and_twenty_eight_heads_of_576(backend) -> None:
    errors = check_accuracy(make_case(7, heads=Heads(128, 1, 1, 1), dims=(576, 128), tokens=(12, 15)), backend)
    assert errors.worst <= 1, str(errors)


@pytest.mark.slow
def test_more_heads_and_batches_than_a_grid_axis_holds(backend) -> None:
    if backend != "cpu":
        pytest.skip("no grid, or an hour in the interpreter: tests/engines/triton/test_launch.py looks at the grid")
    case = make_case(8, heads=Heads(*(33_000,) * 4), dims=(4, 4), tokens=(1, 2), guard=False, reduction="none")
    kl = attention_kl(**case.tensors, reduction="none", backend=backend)
    exact = reference.attention_kl(**case.clean(torch.float64), reduction="none")
    eager = reference.attention_kl(**case.clean(), reduction="none")
    assert (kl - exact).abs().max() <= 2 * (eager - exact).abs().max()


def test_a_coefficient_of_zero_leaves_zero_gradients(backend) -> None:
    for teacher_lse, heads in ((False, Heads(4, 2, 4, 2)), (True, Heads(4, 2, 4, 2)), (False, Heads(4, 2, 1, 1))):
        case = make_case(9, heads=heads, teacher_lse=teacher_lse, guard=False)
        leaves = {name: x.requires_grad_(name in case.wanted) for name, x in case.tensors.items()}
        (0.0 * attention_kl(**leaves, teacher_lse=case.teacher_lse, backend=backend)).backward()
        for name in case.wanted:
            assert torch.equal(leaves[name].grad, torch.zeros_like(leaves[name])), name


def test_student_equal_to_teacher_has_no_divergence(backend) -> None:
    case = make_case(10, heads=Heads(4, 2, 4, 2), guard=False, causal=True, reduction="none")
    q, k = (case.tensors[name] for name in TEACHER)
    kl = attention_kl(q, k, q, k, causal=True, reduction="none", backend=backend)
    assert kl.abs().max() <= 1e-6


def test_a_uniform_group_and_a_uniform_student_have_a_divergence_of_exactly_zero(backend) -> None:
    """Heads are normalised relative to the first of their group: uniform ones have probabilities of 1 then."""
    q, k = torch.zeros(1, 4, 65, 16), torch.randn(1, 2, 65, 16)
    kl = attention_kl(q, k, q[:, :2], k, causal=True, reduction="none", backend=backend)
    assert torch.equal(kl, torch.zeros(1, 2, 65)), kl


def test_a_window_of_no_other_key_leaves_each_query_its_own(backend) -> None:
    case = make_case(12, tokens=(20, 25), window=(0, 0), guard=False, reduction="none")
    results = run(case, backend)
    for name, value in results.named().items():
        assert torch.equal(value, torch.zeros_like(value)), name
    q, k = case.tensors["teacher_q"], case.tensors["teacher_k"]
    own = reference.logits(q, k, None).diagonal(5, -2, -1)
    torch.testing.assert_close(attention_lse(q, k, window=(0, 0), backend=backend), own, rtol=1e-5, atol=1e-6)


def test_lse_equals_the_reference_and_is_minus_infinity_for_dead_rows(backend) -> None:
    for seed, options in enumerate(({}, {"causal": True}, {"window": (3, 2)})):
        case = make_case(seed, tokens=(40, 30), dtypes=(torch.bfloat16,) * 2, **options)
        clean = case.clean(torch.float64)
        exact = reference.attention_lse(clean["teacher_q"], clean["teacher_k"], **options)
        lse = attention_lse(case.tensors["teacher_q"], case.tensors["teacher_k"], backend=backend, **options)
        dead = case.dead_rows
        assert (lse[:, :, dead] == -torch.inf).all()
        live = exact[:, :, ~dead]
        assert (lse.double()[:, :, ~dead] - live).abs().max() <= 4 * torch.finfo(torch.float32).eps * live.abs().max()


HUGE = """
    import torch
    from streamkl import attention_kl, reference

    # Rows 2^28 elements apart: the last one starts beyond element 2^31 (and, in bytes, beyond 2^32).
    rows, dim, apart = 12, 16, 1 << 28
    storage = torch.empty((rows - 1) * apart + dim, dtype=torch.bfloat16)
    far = storage.as_strided((1, 1, rows, dim), (0, 0, apart, 1))
    assert far.stride(2) * (rows - 1) > 2**31
    near = torch.randn(1, 1, rows, dim, generator=torch.Generator().manual_seed(0)).bfloat16()
    far.copy_(near)
    q = torch.randn(1, 1, rows, dim).bfloat16()

    def grads(k, backend):
        leaf = q.clone().requires_grad_()
        loss = attention_kl(q, k, leaf, k, student_scale=0.1, causal=True, backend=backend)
        return loss.detach(), *torch.autograd.grad(loss, leaf)

    for far_value, near_value in zip(grads(far, {backend!r}), grads(near, {backend!r})):
        assert torch.equal(far_value, near_value), (far_value, near_value)
    print("equal")
"""


@pytest.mark.slow
def test_strides_beyond_two_to_the_thirty_one(backend) -> None:
    script = textwrap.dedent(HUGE).replace("{backend!r}", repr(backend))
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert result.stdout.strip() == "equal", result.stderr


@pytest.mark.parametrize("heads", [Heads(2, 2, 2, 2), Heads(4, 2, 2, 1)], ids=["per_head", "groups"])
@pytest.mark.parametrize("teacher_lse", [False, True], ids=["", "lse"])
@pytest.mark.parametrize("name", ["teacher_q", "student_q"])
def test_a_nan_in_a_live_row_is_not_swallowed(name, teacher_lse, heads, backend) -> None:
    case = make_case(11, heads=heads, causal=True, teacher_lse=teacher_lse, guard=False)
    case.tensors[name][0, 0, 7, 3] = torch.nan
    kl = attention_kl(
        **case.tensors, causal=True, teacher_lse=case.teacher_lse, reduction="none", backend=backend
    )  # fmt: skip
    assert kl[0, 0].isnan().nonzero().flatten().tolist() == [7]
    assert not kl[1].isnan().any()
    results = run(case, backend)
    assert results.loss.isnan()
    assert results.gradients["student_q"][0, 0, 7].isnan().any()
    assert not results.gradients["student_q"][0, 0, :7].isnan().any()
