"""What ``topk_indices`` promises, on every engine that takes them."""

import functools

import pytest
import torch

from streamkl import attention_kl, attention_lse, indexer_kl, reference
from streamkl.testing import (
    STUDENT,
    TEACHER,
    Heads,
    check_accuracy,
    evaluate,
    make_case,
    make_indexer_case,
    random_case,
)
from streamkl.testing.problems import DTYPES

pytestmark = pytest.mark.topk

HEADS = {"per_head": Heads(4, 2, 4, 2), "groups": Heads(6, 3, 2, 1), "head_mean": Heads(9, 3, 1, 1)}


def selected_keys(*shape: int, keys: int, seed: int = 0) -> torch.Tensor:
    """``[*shape]`` rows of different keys each, ``shape[-1]`` of them."""
    rng = torch.Generator().manual_seed(seed)
    return torch.rand(*shape[:-1], keys, generator=rng).argsort(-1)[..., : shape[-1]]


def run(case, backend: str, function=attention_kl, **options):
    options = {**case.options, "teacher_lse": case.teacher_lse, "backend": backend, **options}
    return evaluate(function, case.tensors, case, **options).named()


def queries(backend: str, count: int) -> int:
    """How many queries a problem has: each is a tile of two engines, and Python takes its time for one."""
    return count // {"triton": 5, "tiled": 3}.get(backend, 1)


def only_on_other_engines(backend: str, repeated: bool) -> None:
    """Skips on the Triton engine what runs kernels again that another case ran."""
    if backend == "triton" and repeated:
        pytest.skip("runs the kernels of another case")


def test_random_problem(fuzz_seed: int, backend: str, random_tiles) -> None:
    deterministic = random_tiles(fuzz_seed, backend, few_keys=True)
    sizes = {"max_tokens": 9, "max_heads": 3, "max_batch": 2} if backend == "triton" else {"max_tokens": 24}
    dtypes = tuple(d for d in DTYPES if backend == "tiled" or d != torch.float64)
    case = random_case(fuzz_seed, dtypes=dtypes, topk=True, **sizes)
    errors = check_accuracy(case, backend, functools.partial(attention_kl, deterministic=deterministic))
    assert errors.worst <= 1, f"{errors}; {case}"


@pytest.mark.slow
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS.keys())
@pytest.mark.parametrize("wanted", [STUDENT, STUDENT + TEACHER], ids=["student", "both"])
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("teacher_lse", [False, True], ids=["", "lse"])
def test_selecting_every_key_is_the_dense_loss(teacher_lse, causal, wanted, heads, backend) -> None:
    """Held to the accuracy rule of the dense problem, whose reference has no selection."""
    if "teacher_q" in wanted and heads != HEADS["per_head"]:
        pytest.skip("gradients to the teacher exist head by head")
    only_on_other_engines(backend, teacher_lse != causal)
    batch, tokens = (1 if backend == "triton" else 2), (queries(backend, 30), 40)
    case = make_case(0, heads=heads, batch=batch, tokens=tokens, causal=causal, teacher_lse=teacher_lse, wanted=wanted)
    every = selected_keys(batch, *tokens, keys=40)
    errors = check_accuracy(case, backend, functools.partial(attention_kl, topk_indices=every))
    assert errors.worst <= 1, str(errors)


@pytest.mark.indexer
@pytest.mark.parametrize("teacher_lse", [False, True], ids=["", "lse"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_selecting_every_key_is_the_dense_loss_of_an_indexer(reduction, teacher_lse, backend) -> None:
    tokens = queries(backend, 30), 40
    case = make_indexer_case(1, tokens=tokens, teacher_lse=teacher_lse, reduction=reduction)
    every = selected_keys(2, *tokens, keys=40)
    errors = check_accuracy(case, backend, functools.partial(indexer_kl, topk_indices=every))
    assert errors.worst <= 1, str(errors)


@pytest.mark.slow
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS.keys())
@pytest.mark.parametrize("teacher_lse", [False, True], ids=["", "lse"])
@pytest.mark.parametrize("pads", ["-1", "masked"])
def test_a_row_that_sees_none_of_its_selected_keys_is_zero_and_does_not_count(
    pads, teacher_lse, heads, backend
) -> None:
    only_on_other_engines(backend, heads == HEADS["groups"] or teacher_lse != (pads == "-1"))
    n, first = (7, 3) if backend == "triton" else (20, 8)
    half = (n - first) // 2
    topk = selected_keys(2, n, half, keys=n - first, seed=2) + first
    topk[:, n - half :, 0] = 1  # the others are all past the diagonal, from row 0 to the one before `first`
    if pads == "-1":
        topk[:, :first] = -1
    dead = torch.arange(n) < first
    options = {"heads": heads, "tokens": (n, n), "causal": True, "teacher_lse": teacher_lse, "topk_indices": topk}
    rows = run(make_case(2, reduction="none", **options), backend)
    assert not rows["loss"][:, :, dead].any()
    mean = run(make_case(2, **options), backend)
    counted = reference.allowed_pairs(n, n, True, None, None, None, topk).any(-1).sum() * heads.student
    torch.testing.assert_close(mean["loss"], rows["loss"].sum() / counted)
    for results in (rows, mean):
        assert not results["student_q"][:, :, dead].any()
        assert results["student_q"].isfinite().all()
        assert results["student_k"].isfinite().all()


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_a_row_with_one_selected_key_has_no_divergence(reduction, dtype, heads, backend) -> None:
    n = queries(backend, 20)
    options = {"heads": heads, "tokens": (n, 40), "dtypes": (dtype, dtype), "offset": (8, 8), "reduction": reduction}
    for value in run(make_case(9, topk_indices=selected_keys(2, n, 1, keys=40, seed=9), **options), backend).values():
        assert not value.any()


def test_keys_that_no_row_selected_have_no_gradient(backend) -> None:
    n = queries(backend, 30)
    topk = selected_keys(2, n, 5, keys=12, seed=3)
    for teacher_lse in (False, True):
        case = make_case(3, tokens=(n, 40), topk_indices=topk, teacher_lse=teacher_lse, guard=False)
        dk = run(case, backend)["student_k"]
        assert not dk[:, :, 12:].any()
        assert dk[:, :, :12].any()


def test_indices_may_be_in_any_order_and_of_either_dtype(backend) -> None:
    n = queries(backend, 30)
    topk = selected_keys(2, n, 7, keys=30, seed=4)
    case = make_case(4, tokens=(n, 30), causal=True, topk_indices=topk)
    first = run(case, backend)
    for other in (topk.flip(-1).int(),) if backend == "triton" else (topk.flip(-1), topk.sort(-1).values, topk.int()):
        for name, value in run(case, backend, topk_indices=other).items():
            torch.testing.assert_close(value, first[name], rtol=1e-5, atol=1e-6, msg=name)


def test_one_topk_head_serves_every_head_group(backend) -> None:
    n = queries(backend, 30)
    topk = selected_keys(2, n, 7, keys=30, seed=5)
    case = make_case(5, heads=HEADS["groups"], tokens=(n, 30), causal=True, topk_indices=topk)
    first = run(case, backend)
    for name, value in run(case, backend, topk_indices=topk[:, None].expand(2, 2, n, 7)).items():
        assert torch.equal(value, first[name]), name


def test_in_a_packed_batch_indices_count_within_their_sequence(backend) -> None:
    """Two sequences packed give the losses of the two alone, with the same selected keys."""
    middle, end = (6, 10) if backend == "triton" else (24, 40)
    topk = selected_keys(end, 6, keys=end - middle, seed=6)
    cu = torch.tensor([0, middle, end])
    q, k = (torch.randn(end, n, 16, generator=torch.Generator().manual_seed(n)) for n in (4, 2))
    packed = attention_kl(
        q, k, q + 1, k * 2, cu_seqlens_q=cu, cu_seqlens_k=cu, topk_indices=topk, causal=True, reduction="none",
        backend=backend,
    )  # fmt: skip
    for first, last in ((0, middle), (middle, end)):
        one_q, one_k = (x[first:last].transpose(0, 1)[None] for x in (q, k))
        alone = attention_kl(
            one_q, one_k, one_q + 1, one_k * 2, topk_indices=topk[None, first:last], causal=True, reduction="none",
            backend=backend,
        )  # fmt: skip
        torch.testing.assert_close(packed[:, first:last], alone[0])


def test_a_key_past_the_end_of_its_sequence_is_not_seen(backend) -> None:
    """Though the batch has it: it is the next sequence's."""
    past = torch.tensor([[3, 4, 7], [0, 5, 6], [1, 2, 4], [4, 0, 1], [2, 3, 5], [6, 1, 3], [0, 2, 5]])
    lengths = torch.tensor([4, 4, 4, 4, 3, 3, 3])[:, None]
    cu = torch.tensor([0, 4, 7])
    q, k = (torch.randn(8, 2, 16, generator=torch.Generator().manual_seed(n)) for n in (0, 1))
    rows = [
        attention_kl(
            q[:7], k, q[:7] + 1, k * 2, cu_seqlens_q=cu, cu_seqlens_k=cu, topk_indices=topk, reduction="none",
            backend=backend,
        )
        for topk in (past, torch.where(past < lengths, past, -1))
    ]  # fmt: skip
    assert rows[0].any()
    assert torch.equal(*rows)


@pytest.mark.parametrize("groups", [None, 1, 2, 6])
def test_lse_over_the_selected_keys_equals_the_reference(groups, backend) -> None:
    n = 8 if backend == "triton" else 30
    q, k = (torch.randn(2, heads, n, 16, generator=torch.Generator().manual_seed(heads)) for heads in (6, 3))
    shape = (2, n, n // 4) if groups is None else (2, groups, n, n // 4)
    topk = selected_keys(*shape, keys=n, seed=7)
    lse = attention_lse(q, k, causal=True, topk_indices=topk, backend=backend)
    exact = reference.attention_lse(q.double(), k.double(), causal=True, topk_indices=topk)
    assert torch.equal(lse == -torch.inf, exact == -torch.inf)
    assert (lse == -torch.inf).any()
    torch.testing.assert_close(lse.double(), exact, rtol=1e-6, atol=1e-6)


def test_repeated_calls_are_bit_equal(backend) -> None:
    n = queries(backend, 50)
    topk = selected_keys(2, n, 20, keys=50, seed=8)
    case = make_case(8, tokens=(n, 50), topk_indices=topk, dtypes=(torch.bfloat16, torch.bfloat16))
    runs = [run(case, backend, deterministic=True) for _ in range(2 if backend == "triton" else 5)]
    for other in runs[1:]:
        for name, value in runs[0].items():
            assert torch.equal(value, other[name]), name
