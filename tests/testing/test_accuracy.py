"""The rule sees engines whose errors are easy to miss."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import streamkl
from streamkl import loss
from streamkl.engines import tiled
from streamkl.problem import Support
from streamkl.testing import Case, Heads, IndexerHeads, check_accuracy, make_case, make_indexer_case, random_case

HALF = (torch.bfloat16, torch.bfloat16)


def broken_logits(factor: float) -> Callable:
    score = tiled._Operand.score
    return lambda *args: score(*args) * factor


def failures(cases: list[Case], output: str) -> int:
    errors = (check_accuracy(case, "tiled") for case in cases)
    return sum(e.error[output] > e.bound[output] for e in errors)


def test_a_loss_rounded_to_bfloat16_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = streamkl.attention_kl
    cases = [make_case(seed, dtypes=HALF, dims=(64, 64), tokens=(64, 64)) for seed in range(20)]
    assert failures(cases, "loss") == 0
    monkeypatch.setattr(streamkl, "attention_kl", lambda **call: exact(**call).bfloat16().float())
    assert failures(cases, "loss") >= 15


def test_logits_off_by_a_ten_thousandth_are_seen_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(0, causal=True)
    assert check_accuracy(case, "tiled").worst <= 1
    monkeypatch.setattr(tiled._Operand, "score", broken_logits(1.0001))
    assert check_accuracy(case, "tiled").worst > 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", [Heads(4, 2, 4, 2), Heads(4, 2, 1, 1)], ids=["per_head", "head_mean"])
def test_a_scale_off_by_two_percent_is_seen_in_every_dtype(dtype, heads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled._Operand, "score", broken_logits(1.02))
    case = make_case(0, heads=heads, dtypes=(dtype, dtype), causal=True)
    assert check_accuracy(case, "tiled").worst > 1


def test_a_key_block_that_is_left_out_is_seen(monkeypatch: pytest.MonkeyPatch, small_tiles: None) -> None:
    walk = tiled._walk
    monkeypatch.setattr(tiled, "_walk", lambda *args: ((head, tiles[:2]) for head, tiles in walk(*args)))
    assert check_accuracy(make_case(0, causal=True, tokens=(100, 100)), "tiled").worst > 1


@pytest.mark.nightly
def test_gradients_accumulated_in_the_inputs_dtype_are_seen(monkeypatch: pytest.MonkeyPatch, small_tiles: None) -> None:
    cases = [make_case(seed, dtypes=HALF, tokens=(400, 30), dims=(16, 16), reduction="sum") for seed in range(6)]
    assert failures(cases, "student_k") == 0
    make = tiled._SideGradient.__init__

    def make_in_the_inputs_dtype(self, x, rounded: bool) -> None:
        make(self, x, rounded)
        self.k = self.k.to(x.k.dtype)

    monkeypatch.setattr(tiled._SideGradient, "__init__", make_in_the_inputs_dtype)
    monkeypatch.setattr(tiled, "BLOCK_Q", 2)
    assert failures(cases, "student_k") >= 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("teacher_lse", [False, True], ids=["", "lse"])
def test_a_gradient_of_index_weights_off_by_two_percent_is_seen(teacher_lse, dtype, monkeypatch) -> None:
    case = make_indexer_case(0, dtypes=(dtype, dtype), weight_dtype=dtype, teacher_lse=teacher_lse, dims=(64, 64))
    assert check_accuracy(case, "tiled").worst <= 1
    train = tiled.train

    def broken(*args):
        loss, gradients, mass = train(*args)
        return loss, gradients._replace(b_w=gradients.b_w * 1.02), mass

    monkeypatch.setattr(tiled, "train", broken)
    errors = check_accuracy(case, "tiled")
    assert errors.error["index_w"] > errors.bound["index_w"]
    assert errors.error["index_q"] <= errors.bound["index_q"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_share_of_the_softmax_that_is_off_by_two_percent_is_seen(dtype, monkeypatch) -> None:
    case = make_indexer_case(0, dtypes=(dtype, dtype), teacher_rest=True)
    assert check_accuracy(case, "tiled").worst <= 1
    weigh = loss._weighed_by_share
    monkeypatch.setattr(loss, "_weighed_by_share", lambda m, ln_l, rest, groups: weigh(m, ln_l, 1.02 * rest, groups))
    assert check_accuracy(case, "tiled").worst > 1


def test_an_epsilon_in_the_logarithm_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_indexer_case(0, spread=(3.0, 1.0))  # without the LSE, whose rounding would allow for more than that
    assert check_accuracy(case, "tiled").worst <= 1
    sums = tiled.mixture_sums
    monkeypatch.setattr(tiled, "mixture_sums", lambda p, b: sums(p + 1e-8, b))
    assert check_accuracy(case, "tiled").worst > 1


@pytest.mark.parametrize(("roundings", "seen"), [(1, False), (4, True)])
def test_with_a_given_lse_a_probability_of_one_may_be_a_float32_next_to_it(roundings: int, seen: bool) -> None:
    """Eager divides a row of one key by itself and has no error at all there; ``e^(a - LSE)`` is rounded."""
    case = make_indexer_case(
        0, heads=IndexerHeads(1, 1, 1), window=(0, 0), teacher_lse=True, weight_dtype=None, reduction="none",
        activation=None, spread=(0.01, 1.0),
    )  # fmt: skip
    off = roundings * torch.finfo(torch.float32).eps

    def rounded(index_q: Tensor, index_k: Tensor, **_: Any) -> Tensor:
        b = (index_q * index_k[:, None]).sum(-1) * index_q.shape[-1] ** -0.5
        return off * (b - b.detach())  # a loss of 0, of which a logit's derivative is Q - p

    assert (check_accuracy(case, function=rounded).worst > 1) == seen


def test_a_selected_key_that_is_left_out_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    topk = torch.rand(2, 50, 50).argsort(-1)[..., :20]
    case = make_case(0, topk_indices=topk)
    assert check_accuracy(case, "tiled").worst <= 1
    keys = Support.selected_keys

    def without_the_seventh(support, tile):
        selected = keys(support, tile)
        return torch.where(selected == 7, -1, selected)

    monkeypatch.setattr(Support, "selected_keys", without_the_seventh)
    assert check_accuracy(case, "tiled").worst > 1


def test_a_nan_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled._Operand, "score", broken_logits(float("nan")))
    assert check_accuracy(make_case(0), "tiled").worst == float("inf")


def test_the_same_seed_gives_the_same_problem() -> None:
    for seed in range(5):
        first, second = random_case(seed), random_case(seed)
        assert str(first) == str(second)
        for name, x in first.tensors.items():
            assert torch.equal(x.isnan(), second.tensors[name].isnan())
            assert torch.equal(first.clean()[name], second.clean()[name])
            assert x.stride() == second.tensors[name].stride()
