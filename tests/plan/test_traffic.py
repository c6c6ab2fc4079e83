"""What ranks receive, where tests do not count it: ``tests/distillation/test_mesh.py`` and ``tests/distributed`` do."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamkl.plan import Run, read
from streamkl.plan.memory import memory
from streamkl.plan.traffic import traffic

MODEL = read(Path(__file__).parents[2] / "benchmarks" / "configs" / "qwen3-30b-a3b.json")


@pytest.mark.parametrize("sharded", [False, True])
def test_groups_of_tensor_parallel_ranks_shard_the_teacher_asked_or_not_as_distill_does(sharded: bool) -> None:
    """Each of 4 ranks has a part of a weight, and the 2 of all 8 that have the same part shard it."""
    run = Run(4096, ranks=8, tensor=4, sharded=sharded)
    assert memory(MODEL, run).teacher == MODEL.weights * 2 // 4 // 2
    assert memory(MODEL, run).gathered > 0
    runs = MODEL.weights - MODEL.embedding  # all but the head
    assert traffic(MODEL, run).weights == pytest.approx(runs * 2 / 4 / 2)
    alone = Run(4096, ranks=4, tensor=4, sharded=sharded)
    assert (memory(MODEL, alone).gathered, traffic(MODEL, alone).weights) == (0, 0)


def test_a_rank_alone_receives_nothing_and_ranks_with_sequences_of_their_own_only_gradients() -> None:
    one, many = traffic(MODEL, Run(4096)), traffic(MODEL, Run(4096, ranks=4))
    assert (one.learning, one.weights, one.gradients, one.heads) == (0, 0, 0, 0)
    trained = MODEL.learning * MODEL.indexer_weights(1, 64)
    assert (many.learning, many.weights, many.gradients, many.heads) == (0, 0, 2 * 3 * trained, 0)


def test_tensor_parallel_ranks_hold_keys_of_all_heads_for_the_loss_which_they_exchange() -> None:
    by_tokens, by_heads = Run(4096, ranks=4, context=4), Run(4096, ranks=4, tensor=4)
    assert memory(MODEL, by_heads).moments["loss"] > memory(MODEL, by_tokens).moments["loss"]
    assert traffic(MODEL, by_heads).layer.keys == traffic(MODEL, by_tokens).layer.keys
    assert traffic(MODEL, by_heads).layer.values == 0
