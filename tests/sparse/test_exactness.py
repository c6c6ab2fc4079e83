"""Every engine's selections and sparse attention against their definitions, over seeded problems."""

import pytest

from streamkl.testing import check_index_topk, check_oracle_topk, check_sparse_attention, random_sparse_case
from streamkl.testing.problems import DTYPES

pytestmark = [pytest.mark.usefixtures("small_blocks", "nan_poison"), pytest.mark.sparse]


@pytest.fixture
def case(backend, fuzz_seed):
    """A problem of the seed; the CPU engine has no float64."""
    return random_sparse_case(fuzz_seed, dtypes=DTYPES if backend == "tiled" else DTYPES[1:])


def test_sparse_attention_keeps_the_accuracy_rule(backend, case) -> None:
    errors = check_sparse_attention(case, backend)
    assert errors.worst <= 1, f"{errors}; {case}"


def test_index_topk_is_the_definition_to_the_last_key(backend, case) -> None:
    check_index_topk(case, backend)


def test_oracle_topk_is_the_definition_up_to_rounding(backend, case) -> None:
    check_oracle_topk(case, backend)
