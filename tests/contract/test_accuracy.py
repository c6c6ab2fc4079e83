"""Each promise of the contract by name, held to the accuracy rule; `test_fuzz` mixes them."""

import functools
import sys

import pytest
import torch

from streamkl import attention_kl
from streamkl.testing import STUDENT, TEACHER, Case, Heads, check_accuracy, make_case
from streamkl.testing.problems import DIMS

HEADS = {
    "per_head": Heads(4, 4, 4, 4),
    "groups": Heads(6, 6, 2, 2),
    "head_mean": Heads(4, 4, 1, 1),
    "gqa_teacher": Heads(8, 2, 8, 8),
    "gqa_student": Heads(4, 4, 4, 2),
    "gqa_both": Heads(9, 3, 9, 3),
    "odd_counts": Heads(9, 3, 3, 1),
    "head_mean_gqa": Heads(9, 3, 1, 1),
    "multi_query": Heads(8, 1, 4, 1),
}
MASKS = {
    "window_beyond": {"window": (sys.maxsize, 0)},
    "none": {},
    "causal": {"causal": True},
    "window": {"window": (9, 4)},
    "window_left": {"window": (7, -1)},
    "window_right": {"window": (-1, 3)},
    "causal_window": {"causal": True, "window": (12, 5)},
}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def assert_accurate(case: Case, backend: str) -> None:
    if backend != "tiled" and any(x.dtype == torch.float64 for x in case.tensors.values()):
        pytest.skip(f"the {backend} engine computes in float32")
    # Poisoned memory comes with deterministic algorithms on; here the pass that accumulates dQ is under test as well.
    errors = check_accuracy(case, backend, functools.partial(attention_kl, deterministic=False))
    assert errors.worst <= 1, f"{errors}; {case}"


@pytest.mark.slow
@pytest.mark.parametrize("teacher_lse", [False, True], ids=["", "lse"])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS.keys())
def test_head_layouts(heads: Heads, teacher_lse: bool, backend: str) -> None:
    assert_accurate(make_case(1, heads=heads, causal=True, teacher_lse=teacher_lse), backend)


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("tokens", [(50, 50), (20, 67), (67, 20), (1, 40), (40, 1)], ids=str)
def test_masks_with_any_number_of_queries_and_keys(tokens: tuple[int, int], mask: dict, backend: str) -> None:
    assert_accurate(make_case(2, tokens=tokens, **mask), backend)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("heads", [HEADS["per_head"], HEADS["odd_counts"]], ids=["per_head", "groups"])
def test_packed_sequences_of_unequal_lengths(heads: Heads, mask: dict, backend: str) -> None:
    starts = ([0, 20, 20, 37, 60], [0, 31, 40, 44, 70])
    assert_accurate(make_case(3, heads=heads, batch=1, tokens=(63, 72), cu_seqlens=starts, **mask), backend)


@pytest.mark.slow
@pytest.mark.parametrize("dim", DIMS)
def test_head_dims(dim: int, backend: str) -> None:
    other = 64 if dim != 64 else 40
    assert_accurate(make_case(4, dims=(dim, dim), causal=True), backend)
    assert_accurate(make_case(4, dims=(dim, other), causal=True), backend)
    assert_accurate(make_case(4, dims=(other, dim), causal=True), backend)


@pytest.mark.slow
@pytest.mark.parametrize("teacher", DTYPES, ids=str)
@pytest.mark.parametrize("student", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [HEADS["gqa_both"], HEADS["odd_counts"]], ids=["per_head", "groups"])
def test_dtypes_of_teacher_and_student(heads: Heads, student: torch.dtype, teacher: torch.dtype, backend: str) -> None:
    alternate = (DTYPES.index(teacher) + DTYPES.index(student)) % 2 == 1
    for teacher_lse in (False, True) if backend == "cpu" else (alternate,):
        case = make_case(5, heads=heads, dtypes=(teacher, student), causal=True, teacher_lse=teacher_lse)
        assert_accurate(case, backend)


@pytest.mark.slow
@pytest.mark.parametrize("divergence", ["forward", "reverse"])
@pytest.mark.parametrize("wanted", [STUDENT, TEACHER, STUDENT + TEACHER], ids=["student", "teacher", "both"])
@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("teacher_lse", [False, True], ids=["", "lse"])
def test_gradients_to_either_side_of_either_divergence(
    teacher_lse: bool, activation: str | None, wanted: tuple, divergence: str, backend: str
) -> None:
    case = make_case(
        6, heads=Heads(9, 3, 9, 3), causal=True, wanted=wanted, divergence=divergence,
        student_activation=activation, teacher_lse=teacher_lse, tokens=(33, 41),
    )  # fmt: skip
    assert_accurate(case, backend)


@pytest.mark.parametrize("heads", [HEADS["groups"], HEADS["head_mean"]], ids=["groups", "head_mean"])
@pytest.mark.parametrize("teacher_lse", [False, True], ids=["", "lse"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_relu_student_of_a_head_mean(reduction: str, teacher_lse: bool, heads: Heads, backend: str) -> None:
    case = make_case(
        7, heads=heads, causal=True, student_activation="relu", teacher_lse=teacher_lse, reduction=reduction
    )
    assert_accurate(case, backend)


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("per_head", [False, True], ids=["rows", "rows_and_heads"])
@pytest.mark.parametrize("heads", [HEADS["gqa_both"], HEADS["odd_counts"]], ids=["per_head", "groups"])
@pytest.mark.parametrize("teacher_lse", [False, True], ids=["", "lse"])
def test_row_weights_and_reductions(
    teacher_lse: bool, heads: Heads, per_head: bool, reduction: str, backend: str
) -> None:
    shape = (2, heads.student, 50) if per_head else (2, 50)
    weight = torch.rand(shape, generator=torch.Generator().manual_seed(8))
    weight[weight < 0.3] = 0.0
    weight[..., 11] = 0.0
    case = make_case(8, heads=heads, causal=True, row_weight=weight, reduction=reduction, teacher_lse=teacher_lse)
    assert_accurate(case, backend)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_strides_and_alignments(seed: int, backend: str) -> None:
    """Each seed lays out the same kind of problem differently, surrounded by nan."""
    for heads in (HEADS["gqa_both"], HEADS["odd_counts"]):
        assert_accurate(make_case(seed, heads=heads, causal=True, teacher_lse=seed % 2 == 0), backend)


@pytest.mark.parametrize("divergence", ["forward", "reverse"])
@pytest.mark.parametrize(("teacher_scale", "student_scale"), [(0.3, 0.05), (1.0, 0.0), (0.0, 1.0), (-0.2, 0.1)])
def test_scales(teacher_scale: float, student_scale: float, divergence: str, backend: str) -> None:
    scales = {"teacher_scale": teacher_scale, "student_scale": student_scale}
    assert_accurate(make_case(9, **scales, wanted=STUDENT + TEACHER, divergence=divergence), backend)
