"""One sequence over 2 and 4 real ranks: losses, gradients, the teacher's attention, work and traffic.

``tests/workers/context_parallel.py`` runs on the ranks; the tests read what it found.
"""

from typing import Any

import pytest

pytestmark = pytest.mark.slow


def test_losses_and_gradients_in_float64_are_those_of_one_process(found: dict[str, Any]) -> None:
    assert len(found["float64"]) == found["seeds"]
    for result in found["float64"]:
        assert isinstance(result["error"], float), result
        assert result["error"] <= 1e-12, result


def test_losses_and_gradients_in_float32_and_bfloat16_keep_the_accuracy_rule(found: dict[str, Any]) -> None:
    assert len(found["rule"]) == found["seeds"]
    for result in found["rule"]:
        assert result["error"] <= 1, result


def test_the_problems_cover_masks_packing_weights_topk_head_groups_and_every_reduction(found: dict[str, Any]) -> None:
    cases = " ".join(result["case"] for result in found["float64"])
    for drawn in ("'causal': True", "'causal': False", "'window': (", "cu_seqlens_q", "row_weight", "topk_indices",
                  "'reduction': 'mean'", "'reduction': 'sum'", "'reduction': 'none'", "'divergence': 'reverse'",
                  "with teacher_lse", "without teacher_lse", "gradients to teacher_q", "index_w"):  # fmt: skip
        assert drawn in cases, drawn


def test_the_teachers_attention_and_its_lse_are_those_of_sdpa(found: dict[str, Any]) -> None:
    for kind, errors in found["attention"].items():
        assert max(errors) <= 1e-13, kind


def test_all_ranks_have_the_same_work_under_a_causal_mask_within_2_percent(found: dict[str, Any]) -> None:
    assert len(found["products"]) == found["ranks"]
    assert min(found["products"]) > 0
    assert max(found["products"]) <= 1.02 * min(found["products"])


def test_the_bytes_on_the_wire_are_those_of_the_formula(found: dict[str, Any]) -> None:
    """The formula of ``docs/scale.md``: teacher of 2 key heads of 16, an index key of 8, float32 dK."""
    for measured in found["traffic"]:
        tokens, batch, itemsize = (measured[name] for name in ("tokens", "batch", "itemsize"))
        ranks, chunk = found["ranks"], -(-tokens // (2 * found["ranks"]))
        own = tokens // (2 * ranks) + tokens - (2 * ranks - 1) * tokens // (2 * ranks)  # of rank 0
        gathered = [(ranks - 1) * 2 * chunk * batch * width * itemsize for width in (2 * 16, 2 * 16, 8)]
        assert measured["bytes"] == {
            "_allgather_base_": gathered,  # keys, values, index keys
            "alltoall_base_": [(ranks - 1) * own * batch * 8 * 4],
            "allreduce_": [4, 4],  # the sum of weights, the loss
        }


def test_keys_that_were_gathered_before_are_not_gathered_again_and_give_the_same_bits(found: dict[str, Any]) -> None:
    assert found["shared_keys"]


def test_dtensors_sharded_by_tokens_under_a_mask_are_refused_and_pointed_to_context_parallel(
    found: dict[str, Any],
) -> None:
    for what in ("queries", "keys", "lse", "index keys"):
        assert "streamkl.distributed.ContextParallel" in found["refusals"][f"{what} by tokens"]
    assert found["refusals"]["unmasked"] == "True"


def test_what_cannot_be_sharded_is_refused_in_a_sentence(found: dict[str, Any]) -> None:
    for what, words in {
        "DTensors": "got a DTensor",
        "all tokens": f"of 16 tokens that rank 0 of {found['ranks']} holds",
        "the reference": "backend='reference' is not sharded",
        "a teacher that learns": "got q that requires a gradient",
        "packed attention": "q must be of shape [batch, heads, tokens, dim]",
        "two dimensions": "such as mesh['cp']: got 2 of them",
    }.items():
        assert words in found["refusals"][what]
