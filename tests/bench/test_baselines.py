"""A wrong baseline makes a wrong claim: each is held to the definition."""

from typing import Any

import pytest
import torch
from torch import Tensor

from streamkl import reference
from streamkl.bench import baselines
from streamkl.bench.implementations import LOSS_BASELINES
from streamkl.testing import STUDENT, TEACHER, Heads, IndexerHeads, check_accuracy, make_case, make_indexer_case

PAIRED, GROUPED, MEAN = Heads(4, 4, 4, 4), Heads(6, 2, 6, 3), Heads(6, 2, 1, 1)


@pytest.fixture(autouse=True)
def _several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "CHUNK", 48)


def as_attention_kl(name: str) -> Any:
    def function(
        teacher_q: Tensor, teacher_k: Tensor, student_q: Tensor, student_k: Tensor, *, causal: bool, **_: Any
    ) -> Tensor:
        rows = LOSS_BASELINES[name](teacher_q, teacher_k, student_q, student_k, causal)
        return torch.cat(list(rows), dim=2).mean()

    return function


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [PAIRED, GROUPED, MEAN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["eager", "chunked"])
def test_eager_and_chunked_keep_the_accuracy_rule(name: str, dtype: torch.dtype, heads: Heads, causal: bool) -> None:
    wanted = STUDENT if heads == MEAN else STUDENT + TEACHER
    case = make_case(
        heads=heads, dims=(32, 24), dtypes=(dtype, dtype), tokens=(101, 101), wanted=wanted, causal=causal, guard=False
    )  # fmt: skip
    errors = check_accuracy(case, function=as_attention_kl(name))
    assert errors.worst <= 1, errors


@pytest.mark.nightly  # inductor compiles for most of a minute
def test_compiled_keeps_the_accuracy_rule() -> None:
    case = make_case(dtypes=(torch.bfloat16, torch.bfloat16), tokens=(101, 101), causal=True, guard=False)
    errors = check_accuracy(case, function=as_attention_kl("compiled"))
    assert errors.worst <= 1, errors


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [PAIRED, GROUPED])
def test_composed_is_exact_in_float64(heads: Heads, causal: bool) -> None:
    """In float64, where its roundings do not show: in bfloat16 it breaks the rule, which its reported error says."""
    case = make_case(heads=heads, dtypes=(torch.float64, torch.float64), tokens=(101, 101), guard=False)
    (rows,) = baselines.composed(**case.tensors, causal=causal)
    exact = reference.attention_kl(**case.tensors, causal=causal, reduction="none")
    torch.testing.assert_close(rows, exact, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [IndexerHeads(6, 2, 1), IndexerHeads(6, 2, 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_indexer_loss_of_frameworks_keeps_the_accuracy_rule(
    dtype: torch.dtype, heads: IndexerHeads, causal
) -> None:
    def function(teacher_q, teacher_k, index_q, index_k, index_w=None, **_: Any) -> Tensor:
        (rows,) = baselines.eager_indexer(teacher_q, teacher_k, index_q, index_k[:, None], index_w, causal)
        return rows.mean()

    case = make_indexer_case(
        heads=heads, dims=(32, 24), dtypes=(dtype, dtype), tokens=(101, 101), causal=causal, guard=False,
        weight_dtype=torch.float32 if heads.indexer > 1 else None,
    )  # fmt: skip
    errors = check_accuracy(case, function=function)
    assert errors.worst <= 1, errors
