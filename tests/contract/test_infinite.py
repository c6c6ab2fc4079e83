"""What infinite inputs give, the same on every engine: ``0 ln 0 = 0`` on the target's side, else a row of nan."""

import pytest
import torch

from streamkl import attention_kl, attention_lse, indexer_kl
from streamkl.testing import STUDENT, TEACHER, Heads, Infinite, check_accuracy, make_case, make_indexer_case

INF = float("inf")
HEADS = {"per_head": Heads(2, 1, 2, 2), "groups": Heads(4, 2, 2, 1), "head_mean": Heads(3, 3, 1, 1)}
CALLS = [("mean", False), ("mean", True), ("none", False), ("none", True)]
"""Reduction, and whether ``teacher_lse`` is given: each path through the operators."""


def nan_rows(kl: torch.Tensor) -> list[int]:
    """The rows that are nan, which must be so in every batch element and head, while the others are finite."""
    rows = kl.isnan().flatten(0, -2)
    assert (rows == rows[0]).all()
    assert not kl.isinf().any()
    return rows[0].nonzero().flatten().tolist()


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS.keys())
@pytest.mark.parametrize(("reduction", "teacher_lse"), CALLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_teacher_logit_of_minus_infinity_adds_nothing(dtype, reduction, teacher_lse, heads, backend) -> None:
    """Loss and student gradients are those of a probability of 0: in the first tile, in a later one, and masked."""
    if backend == "triton" and dtype != torch.float32:
        pytest.skip("runs the kernels of another case: the interpreter is slow")
    for token in (1, 18):
        case = make_case(
            0, heads=heads, tokens=(24, 30), batch=1, dtypes=(dtype, dtype), causal=True, reduction=reduction,
            teacher_lse=teacher_lse, infinite=Infinite("teacher_k", token, -INF),
        )  # fmt: skip
        errors = check_accuracy(case, backend)
        assert set(errors.error) == {"loss", *STUDENT}, "every row is finite"
        assert errors.worst <= 1, str(errors)


def test_so_does_a_student_logit_of_minus_infinity_in_the_reverse_divergence(backend) -> None:
    for wanted in (TEACHER, ()):
        case = make_case(
            1, heads=HEADS["per_head"], tokens=(24, 30), batch=1, causal=True, divergence="reverse", wanted=wanted,
            infinite=Infinite("student_k", 3, -INF),
        )  # fmt: skip
        errors = check_accuracy(case, backend)
        assert set(errors.error) == {"loss", *wanted}
        assert errors.worst <= 1, str(errors)


@pytest.mark.indexer
@pytest.mark.parametrize(("reduction", "teacher_lse"), CALLS)
def test_a_teacher_logit_of_minus_infinity_adds_nothing_to_the_loss_of_an_indexer(
    reduction, teacher_lse, backend
) -> None:
    case = make_indexer_case(
        2, tokens=(24, 30), batch=1, reduction=reduction, teacher_lse=teacher_lse,
        infinite=Infinite("teacher_k", 2, -INF),
    )  # fmt: skip
    errors = check_accuracy(case, backend)
    assert set(errors.error) == {"loss", "index_q", "index_k", "index_w"}
    assert errors.worst <= 1, str(errors)


@pytest.mark.topk
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS.keys())
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_teacher_logit_of_minus_infinity_adds_nothing_on_selected_keys(reduction, heads, backend) -> None:
    queries = 4 if backend == "triton" else 20
    topk = torch.rand(1, queries, 30, generator=torch.Generator().manual_seed(0)).argsort(-1)
    case = make_case(
        3, heads=heads, tokens=(queries, 30), batch=1, topk_indices=topk[..., :25], reduction=reduction,
        infinite=Infinite("teacher_k", 7, -INF),
    )  # fmt: skip
    errors = check_accuracy(case, backend)
    assert set(errors.error) == {"loss", *STUDENT}
    assert errors.worst <= 1, str(errors)


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS.keys())
@pytest.mark.parametrize("teacher_lse", [False, True], ids=["", "lse"])
@pytest.mark.parametrize(
    ("infinite", "rows"),
    [
        (Infinite("student_k", 9, -INF), range(9, 20)),
        (Infinite("student_k", 9, INF), range(9, 20)),
        (Infinite("teacher_k", 9, INF), range(9, 20)),
        (Infinite("teacher_k", 0, -INF), [0]),  # the only key of its row
        (Infinite("student_q", 9, INF), [9]),
        (Infinite("teacher_q", 9, INF), [9]),
    ],
    ids=str,
)
def test_any_other_infinite_logit_makes_nan_of_the_rows_that_see_it(
    infinite, rows, teacher_lse, heads, backend
) -> None:
    options = {
        "heads": heads, "tokens": (20, 20), "batch": 1, "causal": True, "teacher_lse": teacher_lse,
        "infinite": infinite,
    }  # fmt: skip
    case = make_case(4, guard=False, reduction="none", **options)
    for engine in (backend, "reference"):
        kl = attention_kl(**case.tensors, **case.options, teacher_lse=case.teacher_lse, backend=engine)
        assert nan_rows(kl) == list(rows)
    if infinite.name == "student_k" and backend == "triton":
        return  # what follows runs other kernels than a mean, once
    errors = check_accuracy(make_case(4, **options), backend)
    assert errors.worst == 0, "the mean is nan"


@pytest.mark.indexer
@pytest.mark.parametrize("value", [INF, -INF])
@pytest.mark.parametrize("activation", ["relu", None])
def test_index_scores_that_are_not_finite_make_nan_of_their_rows_and_a_relu_of_minus_infinity_is_0(
    activation, value, backend
) -> None:
    case = make_indexer_case(
        5, tokens=(20, 20), batch=1, activation=activation, reduction="none", weight_dtype=None, guard=False,
        infinite=Infinite("index_k", 9, value),
    )  # fmt: skip
    for engine in (backend, "reference"):
        kl = indexer_kl(**case.tensors, **case.options, backend=engine)
        assert nan_rows(kl) == ([] if activation and value < 0 else list(range(9, 20)))


@pytest.mark.topk
def test_a_row_is_not_nan_for_an_infinite_key_that_it_did_not_select(backend) -> None:
    topk = torch.stack([torch.arange(6) + i for i in range(5)])[None]
    for infinite in (Infinite("student_k", 7, -INF), Infinite("teacher_k", 7, INF)):
        case = make_case(
            6, tokens=(5, 12), batch=1, topk_indices=topk, reduction="none", infinite=infinite, guard=False
        )
        for engine in (backend, "reference"):
            assert nan_rows(attention_kl(**case.tensors, **case.options, backend=engine)) == [2, 3, 4]


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS.keys())
@pytest.mark.parametrize("size", [1e30, -1e30])
def test_finite_logits_of_1e30_have_a_finite_loss(size, heads, backend) -> None:
    """All of one size, so that the loss is 0; and one key at 0, which has all of the probability or none."""
    q = {name: torch.ones(1, n, 20, 4) for name, n in (("teacher_q", heads.teacher), ("student_q", heads.student))}
    k = {
        n: torch.full((1, h, 20, 4), size / 4)
        for n, h in (("teacher_k", heads.teacher_kv), ("student_k", heads.student_kv))
    }
    options = {"causal": True, "reduction": "none", "teacher_scale": 1.0, "student_scale": 1.0}
    for engine in (backend, "reference"):
        kl = attention_kl(**q, **k, **options, backend=engine)
        assert kl.abs().max() <= 1e-6
        lse = attention_lse(q["teacher_q"], k["teacher_k"], causal=True, scale=1.0, backend=engine)
        assert (lse == torch.tensor(size)).all()
    for x in k.values():
        x[:, :, 0] = 0.0
    for engine in (backend, "reference"):
        kl = attention_kl(**q, **k, **options, backend=engine)
        assert kl.abs().max() <= 1e-6


def test_the_lse_of_a_row_whose_logits_are_all_minus_infinity_is_nan_not_that_of_a_dead_row(backend) -> None:
    q, k = torch.ones(1, 2, 5, 4), torch.zeros(1, 2, 3, 4)
    k[:, :, 0, 0] = -INF
    for engine in (backend, "reference"):
        lse = attention_lse(q, k, causal=True, backend=engine)
        assert (lse[:, :, :2] == -INF).all()
        assert lse[:, :, 2].isnan().all()
        assert lse[:, :, 3:].isfinite().all()
