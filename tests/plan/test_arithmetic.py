"""Products that a plan predicts, against those that are counted in a call."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import streamkl.flops  # registers the formulas
from streamkl.plan import Assumptions, Run, plan, read
from streamkl.plan.arithmetic import arithmetic
from streamkl.plan.model import of_config

QWEN = Path(__file__).parents[2] / "benchmarks" / "configs" / "qwen3-30b-a3b.json"


def test_products_of_the_loss_and_of_the_lse_are_those_that_are_counted() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model = of_config({
        "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 64, "vocab_size": 64,
    })  # fmt: skip
    run = Run(100, 2, index_heads=3, index_dim=8)
    query, key = torch.randn(2, 4, 100, 16), torch.randn(2, 2, 100, 16)
    index_q, index_k = torch.randn(2, 3, 100, 8, requires_grad=True), torch.randn(2, 100, 8, requires_grad=True)
    with FlopCounterMode(display=False) as of_lse:
        lse = streamkl.attention_lse(query, key, causal=True)
    with FlopCounterMode(display=False) as of_loss:
        streamkl.indexer_kl(query, key, index_q, index_k, teacher_lse=lse).backward()
    found = arithmetic(model, run)
    assert found.lse == of_lse.get_total_flops()
    assert found.loss == of_loss.get_total_flops()


def test_ranks_that_share_sequences_share_the_work_and_assumed_speeds_divide_it() -> None:
    model = read(QWEN)
    one, eight = (plan(model, Run(4096, ranks=n, context=n)) for n in (1, 8))
    for name in ("projections", "attention", "lse", "loss"):
        assert getattr(eight.arithmetic, name) == getattr(one.arithmetic, name) // 8
    fast = plan(model, Run(4096), Assumptions(flops=2 * 989))
    assert fast.seconds.step == pytest.approx(one.seconds.step / 2)
    assert fast.tokens_per_second == pytest.approx(2 * one.tokens_per_second)


def test_traffic_between_nodes_takes_the_bandwidth_between_nodes() -> None:
    given = Assumptions(bandwidth=100, node_bandwidth=10, node=4)
    assert given.seconds(1e9, 4) == pytest.approx(0.01)
    assert given.seconds(1e9, 5) == pytest.approx(0.1)
