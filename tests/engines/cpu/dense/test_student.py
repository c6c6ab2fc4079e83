"""Indexers of many heads: their rows lie side by side, and their products are kept for the gradients or made again."""

import pytest
import torch

from streamkl import indexer_kl
from streamkl.testing import IndexerHeads, check_accuracy, make_indexer_case

MASKS = {
    "causal": {},
    "window": {"window": (50, 0)},
    "packed": {"cu_seqlens": ([0, 80, 90, 176], [0, 96, 96, 200])},
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("teacher_lse", [False, True], ids=["two_passes", "one_pass"])
@pytest.mark.parametrize("heads", [64, 128], ids=["kept", "made_again"])
def test_many_heads_keep_the_accuracy_rule(heads: int, teacher_lse: bool, mask: dict) -> None:
    """16 rows of 64 heads of 128 fill eight slots of eight heads, with which the products of a tile are kept."""
    for dtype, activation in ((torch.float32, "relu"), (torch.bfloat16, None)):
        case = make_indexer_case(
            0, heads=IndexerHeads(4, 2, heads), dims=(32, 128), tokens=(176, 200), batch=1, dtypes=(dtype, dtype),
            activation=activation, teacher_lse=teacher_lse, weight_dtype=torch.float32, **mask,
        )  # fmt: skip
        errors = check_accuracy(case, "cpu", indexer_kl)
        assert errors.worst <= 1, f"{errors}; {case}"
