"""The CPU engine's passes: the same bits every time, the same values on any number of threads, scratch that is flat."""

from collections.abc import Callable, Iterator

import pytest
import torch

from streamkl import attention_kl, attention_lse
from streamkl.testing import STUDENT, TEACHER, Heads, check_accuracy, evaluate, make_case

REPEATS = 250


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("teacher_lse", [False, True], ids=["two_passes", "one_pass"])
def test_repeated_calls_are_bit_equal(teacher_lse: bool, dtype: torch.dtype, threads) -> None:
    """With more threads than heads, so that the rows of one head are divided, and more blocks than threads."""
    threads(3)
    wanted = STUDENT if teacher_lse else STUDENT + TEACHER
    case = make_case(
        0, heads=Heads(2, 1, 2, 1), tokens=(1100, 1100), batch=1, dtypes=(dtype, dtype), causal=True,
        teacher_lse=teacher_lse, wanted=wanted,
    )  # fmt: skip
    first = None
    for _ in range(REPEATS):
        run = evaluate(
            attention_kl, case.tensors, case, **case.options, teacher_lse=case.teacher_lse, backend="cpu"
        ).named()  # fmt: skip
        first = first or run
        for name, value in first.items():
            assert torch.equal(value, run[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("heads", [Heads(2, 1, 2, 1), Heads(4, 2, 1, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_any_number_of_threads_is_accurate(dtype: torch.dtype, heads: Heads, count: int, threads) -> None:
    threads(count)
    case = make_case(1, heads=heads, tokens=(530, 530), dtypes=(dtype, dtype), batch=1, causal=True, teacher_lse=True)
    errors = check_accuracy(case, "cpu")
    assert errors.worst <= 1, f"{errors}; {case}"


@pytest.mark.slow
@pytest.mark.parametrize("large", [30.0, 3000.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [Heads(), Heads(4, 2, 1, 1)], ids=["per_head", "mean"])
def test_logits_that_rise_from_tile_to_tile(heads: Heads, dtype: torch.dtype, large: float) -> None:
    """A row's reference is set by its first tile; far larger logits in later ones must move it, in these rows alone."""
    wanted = STUDENT + TEACHER if heads.teacher == heads.student else STUDENT
    case = make_case(2, heads=heads, tokens=(200, 1200), dtypes=(dtype, dtype), wanted=wanted, reduction="none")
    rising = torch.linspace(0.0, large, 1200).unsqueeze(-1)
    for name in ("teacher_k", "student_k"):
        case.tensors[name] = (case.tensors[name] * (1 + rising)).to(dtype)
    errors = check_accuracy(case, "cpu")
    assert errors.worst <= 1, f"{errors}; {case}"


@pytest.mark.parametrize("apart", [1 << 22, 1 << 27], ids=["", "beyond_2^32"])  # in bytes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_keys_that_share_memory_or_lie_far_apart(dtype: torch.dtype, apart: int) -> None:
    """They cannot be multiplied where they lie."""
    case = make_case(3, heads=Heads(1, 1, 1, 1), dims=(64, 64), tokens=(64, 64), dtypes=(dtype, dtype), batch=1)
    step = apart // dtype.itemsize
    far = torch.empty(63 * step + 64, dtype=dtype).as_strided((64, 64), (step, 1))  # what is not read takes no memory
    case.tensors["teacher_k"] = far.copy_(case.tensors["teacher_k"][0, 0])[None, None]
    case.tensors["student_k"] = case.tensors["student_k"][:, :, :1].expand(-1, -1, 64, -1)
    errors = check_accuracy(case, "cpu")
    assert errors.worst <= 1, f"{errors}; {case}"


@pytest.mark.parametrize("teacher_lse", [False, True], ids=["two_passes", "one_pass"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [*range(2, 17), 24, 41, 49, 64])
def test_a_row_that_sees_one_key_has_a_loss_of_exactly_zero(heads: int, dtype: torch.dtype, teacher_lse: bool) -> None:
    """The mean of any number of ones is 1, and its logarithm 0."""
    rng = torch.Generator().manual_seed(heads)
    q, k = torch.randn(1, heads, 1, 64, generator=rng).to(dtype), torch.randn(1, 1, 1, 64, generator=rng).to(dtype)
    student = torch.randn(1, 1, 1, 32, generator=rng).to(dtype).requires_grad_(teacher_lse)
    lse = attention_lse(q, k, backend="cpu") if teacher_lse else None
    assert attention_kl(q, k, student, student.detach(), teacher_lse=lse, backend="cpu").item() == 0.0


def test_a_tile_of_logits_that_are_minus_infinity_is_passed_over() -> None:
    q, k = torch.ones(1, 1, 4, 16), torch.ones(1, 1, 600, 16)
    k[:, :, :300] = -float("inf")
    torch.testing.assert_close(attention_lse(q, k, backend="cpu"), attention_lse(q, k[:, :, 300:], backend="cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("path", ["two_passes", "one_pass"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_scratch_of_a_thread_is_small_and_does_not_grow_with_the_sequence(dtype: str, path: str, allocations) -> None:
    # One thread, for what two hold at once depends on how their tasks fall together.
    short, long = (allocations(tokens, dtype, path, "cpu", threads=1) for tokens in (2049, 4097))
    both = allocations(4097, dtype, path, "cpu", threads=2)
    print(f"{dtype}, {path}: {short} at 2,049 tokens, {long} at 4,097; {both}")
    assert short["scratch"] > 1 << 19, "the hook saw nothing"
    assert abs(long["scratch"] - short["scratch"]) <= 0.1 * short["scratch"]
    assert both["scratch"] <= both["threads"] * min(16 << 20, 1.1 * long["scratch"])
    for peaks in (long, both):
        assert peaks["gradients"] <= 4
        assert peaks["rows"] <= 14


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_scratch_of_a_group_of_many_wide_heads(dtype: str, allocations) -> None:
    peaks = allocations(257, dtype, "one_pass", "cpu", heads=128, dim=576)
    assert peaks["scratch"] <= peaks["threads"] * (16 << 20)
