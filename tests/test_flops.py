"""The FLOP counter sees the operators, and counts the products that the engine computes."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from streamkl import attention_kl, attention_lse, flops, indexer_kl, reference
from streamkl.problem import Support
from streamkl.testing import STUDENT, TEACHER, Heads, IndexerHeads, evaluate, make_case, make_indexer_case

CASES = {
    "paired": ({"heads": Heads(4, 2, 4, 2), "wanted": STUDENT + TEACHER}, 2 + 2, 2 + 2),
    "student": ({"heads": Heads(4, 2, 4, 2)}, 2, 2 + 2),
    "one_pass": ({"heads": Heads(4, 2, 2, 1), "teacher_lse": True}, 1, 4),
    "rows": ({"heads": Heads(4, 2, 2, 1), "reduction": "none"}, 3, 2 + 2),
}
"""Problem, and products per tile of teacher and student for loss and gradients."""


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("causal", [False, True])
def test_loss_and_gradients_count_the_products_over_allowed_pairs(name: str, causal: bool) -> None:
    problem, teacher, student = CASES[name]
    case = make_case(0, dims=(24, 16), tokens=(30, 40), causal=causal, **problem)
    with FlopCounterMode(display=False) as counter:
        evaluate(attention_kl, case.tensors, case, **case.options, teacher_lse=case.teacher_lse)
    pairs = 2 * int(reference.allowed_pairs(30, 40, causal, None, None, None).sum())
    heads = problem["heads"]
    expected = 2 * pairs * (teacher * heads.teacher * 24 + student * heads.student * 16)
    assert counter.get_total_flops() == expected


@pytest.mark.parametrize("selected", [None, 7])
def test_an_indexer_counts_its_heads_and_the_selected_keys(selected: int | None) -> None:
    topk = None if selected is None else torch.rand(2, 30, 40).argsort(-1)[..., :selected]
    case = make_indexer_case(0, heads=IndexerHeads(4, 2, 3), dims=(24, 16), tokens=(30, 40), topk_indices=topk)
    with FlopCounterMode(display=False) as counter:
        evaluate(indexer_kl, case.tensors, case, **case.options)
    pairs = 2 * (
        int(reference.allowed_pairs(30, 40, True, None, None, None).sum()) if selected is None else 30 * selected
    )
    assert counter.get_total_flops() == 2 * pairs * (2 * 4 * 24 + 4 * 3 * 16)


def test_lse_of_packed_sequences() -> None:
    q, k, cu = torch.randn(9, 4, 8), torch.randn(9, 2, 8), torch.tensor([0, 4, 9])
    with FlopCounterMode(display=False) as counter:
        attention_lse(q, k, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True)
    assert counter.get_total_flops() == 2 * 4 * 8 * (4 * 5 // 2 + 5 * 6 // 2)


@pytest.mark.parametrize("window", [(None, None), (None, 0), (5, 0), (3, 9)])
def test_pairs_are_those_of_the_mask(window: tuple) -> None:
    mask = tuple(-1 if side is None else side for side in window)
    expected = int(reference.allowed_pairs(20, 31, False, mask, None, None).sum())
    assert flops.allowed_pairs(Support(3, 20, 31, *window)) == 3 * expected


@pytest.mark.parametrize("tokens", [(31, 7), (31, 10), (40, 3)], ids=str)
def test_pairs_of_keys_that_stand_for_several_tokens(tokens: tuple[int, int]) -> None:
    expected = int(reference.allowed_pairs(*tokens, True, None, None, None, key_span=4).sum())
    assert flops.allowed_pairs(Support(3, *tokens, None, 0, key_span=4)) == 3 * expected
