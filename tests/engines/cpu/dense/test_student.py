"""Indexers of many heads: they lie side by side, and their products are kept for the gradients or made again."""

import pytest
import torch

from streamkl import indexer_kl
from streamkl.testing import IndexerHeads, check_accuracy, evaluate, make_indexer_case

MASKS = {
    "causal": {},
    "window": {"window": (50, 0)},
    "packed": {"cu_seqlens": ([0, 80, 90, 176], [0, 96, 96, 200])},
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("teacher_lse", [False, True], ids=["two_passes", "one_pass"])
@pytest.mark.parametrize("heads", [16, 24, 64, 128])
def test_many_heads_keep_the_accuracy_rule(heads: int, teacher_lse: bool, mask: dict) -> None:
    """16 rows of 64 heads of 128 fill eight strips, with which the products of a tile are kept; 128 heads fill more."""
    for dtype, activation in ((torch.float32, "relu"), (torch.bfloat16, None)):
        case = make_indexer_case(
            0, heads=IndexerHeads(4, 2, heads), dims=(32, 128), tokens=(176, 200), batch=1, dtypes=(dtype, dtype),
            activation=activation, teacher_lse=teacher_lse, weight_dtype=torch.float32, **mask,
        )  # fmt: skip
        errors = check_accuracy(case, "cpu", indexer_kl)
        assert errors.worst <= 1, f"{errors}; {case}"


def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    """Each thread adds up the dK of a tile by itself, and the tiles are added in turn."""
    case = make_indexer_case(
        0, heads=IndexerHeads(4, 2, 64), dims=(32, 128), tokens=(600, 620), batch=1, teacher_lse=True
    )  # fmt: skip
    before = torch.get_num_threads()

    def gradients(threads: int) -> dict[str, torch.Tensor]:
        torch.set_num_threads(threads)
        options = {**case.options, "teacher_lse": case.teacher_lse, "backend": "cpu"}
        return evaluate(indexer_kl, case.tensors, case, **options).gradients

    try:
        alone = gradients(1)
        for threads in (2, 3, 16):
            for name, value in gradients(threads).items():
                assert torch.equal(value, alone[name]), f"{name} with {threads} threads"
    finally:
        torch.set_num_threads(before)
