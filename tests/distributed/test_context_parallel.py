"""One sequence over 2 and 4 real ranks: losses, gradients, the teacher's attention, work and traffic.

``tests/workers/context_parallel.py`` runs on the ranks; the tests read what it found.
"""

from typing import Any

import pytest

from streamkl.plan import Run, exchange, memory
from streamkl.plan.model import Heads, of_config

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
    """That of `streamkl.plan.exchange`, which ``docs/scale.md`` states: 2 key heads of 16, index keys of 8."""
    for measured in found["traffic"]:
        run = Run(
            measured["tokens"], measured["batch"], found["ranks"], found["ranks"], index_heads=3, index_dim=8,
            dtype=measured["dtype"],
        )  # fmt: skip
        predicted = exchange(run, Heads(4, 2, 16, 16))
        assert measured["bytes"] == {
            "_allgather_base_": [predicted.keys, predicted.values, predicted.index_keys],
            "alltoall_base_": [predicted.gradients],
            "allreduce_": [predicted.sums // 2, predicted.sums // 2],  # the sum of weights, the loss
        }


def test_the_memory_that_a_layer_adds_on_a_rank_is_predicted_within_15_percent(found: dict[str, Any]) -> None:
    for measured in found["memory"]:
        config = {
            "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16,
            "num_attention_heads": measured["heads"], "num_key_value_heads": 1, "head_dim": measured["dim"],
            "vocab_size": 16,
        }  # fmt: skip
        run = Run(measured["tokens"], 1, found["ranks"], found["ranks"], dtype="float32")
        predicted = max(memory.attention(of_config(config), run), memory.loss(of_config(config), run))
        assert 0.85 < measured["bytes"] / predicted < 1.15, (measured, predicted)


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
        "no window": "at least 1: got 0",
        "a part of the tokens": "x must have all 16 tokens: got",
        "the reference": "backend='reference' is not sharded",
        "a teacher that learns": "got q that requires a gradient",
        "packed attention": "q must be of shape [batch, heads, tokens, dim]",
        "two dimensions": "such as mesh['cp']: got 2 of them",
    }.items():
        assert words in found["refusals"][what]
