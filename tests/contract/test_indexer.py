"""What ``indexer_kl`` promises, on every engine that sums index heads."""

import functools

import pytest
import torch

from streamkl import attention_kl, attention_lse, indexer_kl
from streamkl.testing import (
    TEACHER,
    Case,
    IndexerHeads,
    check_accuracy,
    evaluate,
    make_indexer_case,
    random_indexer_case,
)
from streamkl.testing.problems import DTYPES

pytestmark = pytest.mark.indexer

MASKS = {
    "none": {"causal": False},
    "causal": {},
    "window": {"causal": False, "window": (9, 4)},
    "causal_window": {"window": (12, 5)},
    "packed": {"batch": 1, "tokens": (63, 72), "cu_seqlens": ([0, 20, 20, 37, 60], [0, 31, 40, 44, 70])},
}


def only_on_other_engines(backend: str, repeated: bool) -> None:
    """Skips on the Triton engine what runs kernels again that another case ran: the interpreter is slow."""
    if backend == "triton" and repeated:
        pytest.skip("runs the kernels of another case")


def batch(backend: str) -> int:
    """How many batch elements a problem has: the interpreter takes as long for each, and the fuzz has several."""
    return 1 if backend == "triton" else 2


def assert_accurate(case: Case, backend: str, deterministic: bool = False) -> None:
    if backend != "tiled" and any(x.dtype == torch.float64 for x in case.tensors.values()):
        pytest.skip(f"the {backend} engine computes in float32")
    errors = check_accuracy(case, backend, functools.partial(indexer_kl, deterministic=deterministic))
    assert errors.worst <= 1, f"{errors}; {case}"


def test_random_indexer(fuzz_seed: int, backend: str, random_tiles) -> None:
    assert_random_problem_is_accurate(fuzz_seed, backend, random_tiles, topk=False)


@pytest.mark.topk
def test_random_indexer_on_selected_keys(fuzz_seed: int, backend: str, random_tiles) -> None:
    assert_random_problem_is_accurate(fuzz_seed, backend, random_tiles, topk=True)


def assert_random_problem_is_accurate(seed: int, backend: str, random_tiles, topk: bool) -> None:
    deterministic = bool(random_tiles(seed, backend, few_keys=topk))
    dtypes = tuple(d for d in DTYPES if backend == "tiled" or d != torch.float64)
    sizes = {"max_tokens": 24 if topk else 40}
    if backend == "triton":  # the interpreter takes its time for each program, and head
        sizes = {"max_tokens": 9 if topk else 20, "max_heads": 8, "max_batch": 1}
    assert_accurate(random_indexer_case(seed, dtypes=dtypes, topk=topk, **sizes), backend, deterministic)


def test_at_least_half_of_the_random_problems_give_the_teachers_lse() -> None:
    cases = [random_indexer_case(seed, dtypes=(torch.float32,), max_tokens=8) for seed in range(100)]
    assert sum(case.teacher_lse is not None for case in cases) >= 50


@pytest.mark.slow
@pytest.mark.parametrize("heads", [1, 2, 5, 8, 64])
@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("teacher_lse", [False, True], ids=["", "lse"])
def test_index_heads_with_and_without_relu_and_weights(teacher_lse, weighted, activation, heads, backend) -> None:
    only_on_other_engines(backend, not teacher_lse)
    case = make_indexer_case(
        1, heads=IndexerHeads(4, 2, heads), activation=activation, teacher_lse=teacher_lse, batch=batch(backend),
        weight_dtype=torch.float32 if weighted else None,
    )  # fmt: skip
    assert_accurate(case, backend)


@pytest.mark.slow
@pytest.mark.parametrize("dims", [(64, 64), (192, 128), (576, 128), (59, 33)], ids=str)
@pytest.mark.parametrize("heads", [(1, 1), (9, 3), (24, 24), (32, 8), (128, 1)], ids=str)
def test_teachers_of_any_heads_and_widths(heads, dims, backend) -> None:
    case = make_indexer_case(2, heads=IndexerHeads(*heads, 2), dims=dims, tokens=(20, 23), batch=batch(backend))
    assert_accurate(case, backend)


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("teacher_lse", [False, True], ids=["", "lse"])
def test_masks_and_reductions(teacher_lse, reduction, mask, backend) -> None:
    only_on_other_engines(backend, reduction == "sum")
    options = {
        "tokens": (41, 50), "batch": batch(backend), "reduction": reduction, "teacher_lse": teacher_lse, **mask
    }  # fmt: skip
    rows = options["tokens"][0]
    shape = (rows,) if "cu_seqlens" in options else (options["batch"], rows)
    weight = torch.rand(shape, generator=torch.Generator().manual_seed(3))
    weight[..., weight.flatten()[:rows] < 0.3] = 0.0
    assert_accurate(make_indexer_case(3, **options), backend)
    assert_accurate(make_indexer_case(3, row_weight=weight, **options), backend)


@pytest.mark.slow
@pytest.mark.parametrize("teacher", DTYPES, ids=str)
@pytest.mark.parametrize("index", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_dtypes_with_weights_of_float32_or_the_queries(reduction, index, teacher, backend) -> None:
    only_on_other_engines(backend, reduction == "none" and teacher != index)
    for weight in {torch.float32, index}:
        case = make_indexer_case(
            4, dtypes=(teacher, index), weight_dtype=weight, reduction=reduction, tokens=(20, 30), batch=batch(backend)
        )
        assert_accurate(case, backend)
        results = evaluate(indexer_kl, case.tensors, case, backend=backend, **case.options)
        assert results.gradients["index_w"].dtype == weight
        assert results.gradients["index_q"].dtype == index


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("teacher_lse", [False, True], ids=["", "lse"])
def test_an_indexer_equal_to_its_teacher_has_no_divergence(teacher_lse, dtype, backend) -> None:
    q, k = (torch.randn(2, 1, n, 64, generator=torch.Generator().manual_seed(n)).to(dtype) for n in (70, 80))
    lse = attention_lse(q, k, causal=True) if teacher_lse else None
    index_q, index_k = q.clone().requires_grad_(), k[:, 0].clone().requires_grad_()
    rows = indexer_kl(q, k, index_q, index_k, activation=None, teacher_lse=lse, reduction="none", backend=backend)
    largest = (q.float() @ k.float().mT / 8).abs().max().item()
    assert rows.abs().max() <= 1e-6 * (1 + largest), rows.abs().max()
    loss = indexer_kl(q, k, index_q, index_k, activation=None, teacher_lse=lse, reduction="sum", backend=backend)
    gradient = torch.autograd.grad(loss, index_q)[0].float()
    assert gradient.abs().max() <= 1e-5 * k.float().abs().max(), gradient.abs().max()


@pytest.mark.parametrize("seed", range(20))
def test_a_divergence_is_never_below_zero_but_for_rounding(seed: int, backend: str) -> None:
    """With our own log-sum-exp; in every other problem the indexer is its teacher."""
    case = random_indexer_case(seed, dtypes=(torch.float32, torch.bfloat16), max_tokens=30, topk=False)
    x, options = case.clean(), {**case.options, "reduction": "none", "row_weight": None, "teacher_rest": None}
    if seed % 2:
        q, k = x["teacher_q"][:, :1], x["teacher_k"][:, :1]
        x = {"teacher_q": q, "teacher_k": k, "index_q": q, "index_k": k.squeeze(1)}
        options |= {"activation": None, "index_scale": options["teacher_scale"]}
    mask = {name: options.get(name) for name in ("causal", "window", "cu_seqlens_q", "cu_seqlens_k")}
    lse = attention_lse(x["teacher_q"], x["teacher_k"], scale=options["teacher_scale"], **mask)
    rows = indexer_kl(**x, **options, teacher_lse=lse, backend=backend)
    largest = torch.where(lse.isfinite(), lse.abs(), 0.0).max() if lse.numel() else 0.0
    assert rows.numel() == 0 or rows.min() >= -1e-6 * (1 + largest), rows.min()


@pytest.mark.parametrize("seed", range(4))
def test_the_rounded_lse_of_attention_itself_costs_a_ten_thousandth_at_most(seed: int, backend: str) -> None:
    """PyTorch's attention on CPUs gives a bfloat16 LSE that is off by up to 6e-5; the indexer is its teacher."""
    rng = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 1, 96, 64, generator=rng).bfloat16() for _ in range(3))
    lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, is_causal=True)[1]
    rows = indexer_kl(q, k, q, k[:, 0], activation=None, teacher_lse=lse, reduction="none", backend=backend)
    assert -1e-4 <= rows.min() <= rows.max() <= 1e-4


@pytest.mark.parametrize("teacher_lse", [False, True], ids=["", "lse"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dead", ["causal", "weight"])
def test_dead_rows_are_zero_whatever_they_hold(dead, reduction, teacher_lse, backend) -> None:
    only_on_other_engines(backend, teacher_lse and reduction == "none")
    weight = None
    if dead == "weight":
        weight = torch.ones(batch(backend), 40)
        weight[:, [0, 3, 17, 39]] = 0.0
    results = {}
    for content in (0.0, torch.nan, torch.inf):
        case = make_indexer_case(
            5, tokens=(40, 25 if dead == "causal" else 40), row_weight=weight, reduction=reduction,
            teacher_lse=teacher_lse, batch=batch(backend), guard=False,
        )  # fmt: skip
        rows = case.dead_rows
        assert rows.any()
        for name in ("teacher_q", "index_q"):
            case.tensors[name][:, :, rows] = content
        case.tensors["index_w"][:, rows] = content
        results[content] = evaluate(
            indexer_kl, case.tensors, case, teacher_lse=case.teacher_lse, backend=backend, **case.options
        ).named()
    first = results.pop(0.0)
    for content, other in results.items():
        for name, value in first.items():
            assert torch.equal(value, other[name]), f"{name} changed when dead rows held {content}"
    assert not first["index_q"][:, :, rows].any()
    assert not first["index_w"][:, rows].any()
    assert first["index_w"][:, ~rows].any()


@pytest.mark.parametrize(("batch", "tokens"), [(0, (5, 5)), (2, (0, 7)), (2, (7, 0))], ids=str)
@pytest.mark.parametrize("teacher_lse", [False, True], ids=["", "lse"])
def test_nothing_gives_zero(teacher_lse, batch, tokens, backend) -> None:
    case = make_indexer_case(6, batch=batch, tokens=tokens, teacher_lse=teacher_lse)
    results = evaluate(indexer_kl, case.tensors, case, teacher_lse=case.teacher_lse, backend=backend, **case.options)
    for name, value in results.named().items():
        assert torch.equal(value, torch.zeros_like(value)), name


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_teacher_is_a_constant(reduction, backend) -> None:
    case = make_indexer_case(7, guard=False, tokens=(9, 9), reduction=reduction)
    plain = evaluate(indexer_kl, case.tensors, case, backend=backend, **case.options).named()
    leaves = {name: x.requires_grad_() for name, x in case.tensors.items()}
    loss = indexer_kl(**leaves, **case.options, backend=backend)
    loss.backward(case.upstream)
    assert torch.equal(loss, plain["loss"])
    assert torch.equal(leaves["index_k"].grad, plain["index_k"])
    assert all(leaves[name].grad is None for name in TEACHER)


def test_a_nan_in_a_live_row_is_not_swallowed_and_stays_in_its_row(backend) -> None:
    for name, at in (("index_q", (0, 1, 7)), ("index_w", (0, 7, 2))):
        case = make_indexer_case(8, tokens=(20, 20), reduction="none", batch=batch(backend), guard=False)
        case.tensors[name][at] = torch.nan
        results = evaluate(indexer_kl, case.tensors, case, backend=backend, **case.options)
        assert results.loss.isnan().nonzero().tolist() == [[0, 0, 7]]
        nan_keys = results.gradients["index_k"].isnan().any(-1).nonzero().tolist()
        assert nan_keys == [[0, key] for key in range(8)]


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_a_product_of_exactly_zero_has_no_derivative(reduction, backend) -> None:
    """As torch's relu has none at 0: here of an indexer's heads, and of a student's."""
    q, k = (torch.randn(1, 2, 7, 16, generator=torch.Generator().manual_seed(n)) for n in (0, 1))
    index_q, index_k = torch.zeros(1, 2, 7, 16), torch.zeros(1, 1, 7, 16)
    index_q[..., 0] = 1.0
    index_k[:, :, ::2, 0], index_k[:, :, 1::2, 1] = 1.0, 1.0  # every other key is orthogonal to all queries
    for function in (indexer_kl, attention_kl):
        leaf = index_q.clone().requires_grad_()
        options = {"student_activation": "relu"} if function is attention_kl else {}
        student_k = index_k if function is attention_kl else index_k[:, 0]
        function(q, k, leaf, student_k, **options, reduction=reduction, backend=backend).sum().backward()
        assert leaf.grad[..., 0].any()
        assert not leaf.grad[..., 1].any()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_repeated_calls_are_bit_equal(reduction, backend) -> None:
    case = make_indexer_case(9, reduction=reduction, dtypes=(torch.bfloat16, torch.bfloat16), batch=batch(backend))
    runs = [
        evaluate(indexer_kl, case.tensors, case, deterministic=True, backend=backend, **case.options).named()
        for _ in range(3)
    ]
    for run in runs[1:]:
        for name, value in runs[0].items():
            assert torch.equal(value, run[name]), name
