"""A ``teacher_lse`` that does not normalise the teacher is refused on every path, with gradients and without."""

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from streamkl import attention_kl, attention_lse, indexer_kl, value_checks
from streamkl.testing import Heads, IndexerHeads, make_case, make_indexer_case

MESSAGE = "so that its probabilities sum to 1: got rows that sum to"
WRONG: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "of other keys": lambda lse: lse.roll(1, -1) + 0.5,
    "of another base": lambda lse: lse / math.log(2) + 0.1,
    "of a row that sees nothing": lambda lse: torch.where(torch.arange(lse.shape[-1]) == 3, -torch.inf, lse),
    "far above": lambda lse: lse + 1e4,  # no probability is left
}
HEADS = {"per_head": Heads(2, 1, 2, 2), "groups": Heads(4, 2, 2, 1), "head_mean": Heads(3, 3, 1, 1)}


def call(case: Any, backend: str, lse: torch.Tensor, gradients: bool, **options: Any) -> torch.Tensor:
    function = attention_kl if case.function == "attention_kl" else indexer_kl
    leaves = {name: x.detach().requires_grad_(gradients and name in case.wanted) for name, x in case.tensors.items()}
    with contextlib.nullcontext() if gradients else torch.no_grad():
        return function(**leaves, **{**case.options, **options}, teacher_lse=lse, backend=backend)


def assert_only_a_right_lse_is_taken(case: Any, backend: str, gradients: bool, wrong: str) -> None:
    assert case.teacher_lse is not None
    for engine in (backend, "reference"):
        call(case, engine, case.teacher_lse, gradients)
        with pytest.raises(ValueError, match=MESSAGE):
            call(case, engine, WRONG[wrong](case.teacher_lse), gradients)


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS.keys())
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("gradients", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_teacher_lse_is_refused(wrong, gradients, reduction, heads, backend) -> None:
    if backend == "triton" and (reduction == "sum" or wrong != "of other keys"):
        pytest.skip("runs the kernels of another case: the interpreter is slow")
    case = make_case(
        0, heads=heads, tokens=(12, 14), batch=1, causal=True, reduction=reduction, teacher_lse=True, guard=False
    )
    assert_only_a_right_lse_is_taken(case, backend, gradients, wrong)


def test_a_wrong_teacher_lse_is_refused_in_the_reverse_divergence_and_where_the_teacher_learns(backend) -> None:
    for options in ({"divergence": "reverse"}, {"wanted": ("teacher_q", "student_q")}):
        case = make_case(1, heads=HEADS["per_head"], tokens=(12, 14), batch=1, teacher_lse=True, guard=False, **options)
        assert_only_a_right_lse_is_taken(case, backend, True, "of other keys")


@pytest.mark.indexer
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("gradients", [False, True], ids=["no_grad", "grad"])
def test_a_wrong_teacher_lse_of_an_indexer_is_refused(gradients, reduction, heads, backend) -> None:
    case = make_indexer_case(
        2, heads=IndexerHeads(heads, 1, 2), tokens=(12, 14), batch=1, reduction=reduction, teacher_lse=True, guard=False
    )
    assert_only_a_right_lse_is_taken(case, backend, gradients, "of other keys")


@pytest.mark.topk
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS.keys())
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("gradients", [False, True], ids=["no_grad", "grad"])
def test_the_lse_of_all_keys_is_refused_where_keys_are_selected(gradients, reduction, heads, backend) -> None:
    case = make_case(
        3, heads=heads, tokens=(4, 14), batch=1, reduction=reduction, teacher_lse=True, guard=False,
        topk_indices=torch.rand(1, 4, 14, generator=torch.Generator().manual_seed(0)).argsort(-1)[..., :5],
    )  # fmt: skip
    of_all = attention_lse(case.clean()["teacher_q"], case.clean()["teacher_k"], backend="tiled")
    for engine in (backend, "reference"):
        call(case, engine, case.teacher_lse, gradients)
        with pytest.raises(ValueError, match=MESSAGE):
            call(case, engine, of_all, gradients)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS.keys())
def test_in_rows_that_do_not_count_it_is_not_looked_at(heads, reduction, backend) -> None:
    weight = torch.ones(1, 12)
    weight[:, 5] = 0.0
    case = make_case(
        4, heads=heads, tokens=(12, 9), batch=1, causal=True, reduction=reduction, teacher_lse=True, row_weight=weight,
        guard=False,
    )  # fmt: skip
    assert case.teacher_lse is not None
    case.teacher_lse[:, :, [0, 1, 2, 5]] = 7.0
    for engine in (backend, "reference"):
        assert call(case, engine, case.teacher_lse, False).isfinite().all()


def test_on_other_devices_it_is_read_only_when_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    mass, lse = torch.empty(1, 2, 5, device="meta"), torch.empty(1, 4, 5, device="meta")
    value_checks.check_teacher_mass(mass, lse)
    monkeypatch.setenv("STREAMKL_CHECK", "1")
    with pytest.raises((NotImplementedError, RuntimeError)):  # it tries to read what a meta tensor does not have
        value_checks.check_teacher_mass(mass, lse)
