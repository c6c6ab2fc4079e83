"""Every engine's selections and sparse attention against their definitions, over seeded problems."""

import random

import pytest

from streamkl.engines.triton.configs import architecture
from streamkl.engines.triton.meta import Config
from streamkl.engines.triton.plans import selection
from streamkl.testing import (
    check_index_topk,
    check_normalised_topk,
    check_oracle_topk,
    check_paged_attention,
    check_sparse_attention,
    random_sparse_case,
)
from streamkl.testing.problems import DTYPES

pytestmark = pytest.mark.usefixtures("small_blocks", "nan_poison")


@pytest.fixture
def case(backend, fuzz_seed, monkeypatch):
    """A problem of the seed; only the plain engine has float64, and the interpreter takes its time for each program."""
    if backend == "triton":
        rng = random.Random(fuzz_seed)
        cut = {"hold": rng.choice((32, 1024)), "chunk": 32, "grad": rng.choice((32, 128))}
        config = Config(rows=rng.choice((16, 32)), keys=rng.choice((4, 8)), warps=1, stages=1, **cut)
        monkeypatch.setattr(architecture, "INTERPRETED", config)
        for name, sizes in {"SCORES": (1, 1000, 1 << 24), "RANKED": (4, 64), "PIECE": (4, 16)}.items():
            monkeypatch.setattr(selection, name, rng.choice(sizes))
    sizes = {"max_tokens": 12, "max_heads": 5} if backend == "triton" else {}
    return random_sparse_case(fuzz_seed, dtypes=DTYPES if backend == "tiled" else DTYPES[1:], **sizes)


@pytest.mark.attends
def test_sparse_attention_keeps_the_accuracy_rule(backend, case) -> None:
    errors = check_sparse_attention(case, backend)
    assert errors.worst <= 1, f"{errors}; {case}"


@pytest.mark.attends
def test_sparse_attention_without_gradients_keeps_the_accuracy_rule(backend, case) -> None:
    if backend == "triton":
        pytest.skip("its forward is the same with gradients")
    errors = check_sparse_attention(case, backend, gradients=False)
    assert errors.worst <= 1, f"{errors}; {case}"


@pytest.mark.attends
def test_sparse_attention_of_pages_keeps_the_accuracy_rule(backend, case) -> None:
    errors = check_paged_attention(case, backend)
    assert errors.worst <= 1, f"{errors}; {case}"


@pytest.mark.selects
def test_index_topk_is_the_definition_to_the_last_key(backend, case) -> None:
    check_index_topk(case, backend)


@pytest.mark.oracle
def test_oracle_topk_is_the_definition_up_to_rounding(backend, case) -> None:
    check_oracle_topk(case, backend)


@pytest.mark.selects
def test_normalised_index_topk_is_the_definition_up_to_rounding(backend, case) -> None:
    check_normalised_topk(case, backend)
