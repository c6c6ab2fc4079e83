"""The row states: exact under offsets where the published form is not, and mergeable in any order."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamkl import attention_kl, reference
from streamkl.state import LogSumExp, MixtureState, PairedState

OFFSET = 5000.0


def halves(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Multiples of 1/2 up to 3/2: their products and sums round nowhere in float32."""
    return torch.randint(-3, 4, shape, generator=generator).float() / 2


def exact_inputs(heads: int, distributions: int, offset: float = OFFSET) -> dict[str, torch.Tensor]:
    """Inputs whose logits are exact in float32, the student's shifted by an offset (at scales of 1)."""
    rng = torch.Generator().manual_seed(0)
    inputs = {
        "teacher_q": halves(rng, 1, heads, 64, 8),
        "teacher_k": halves(rng, 1, heads, 96, 8),
        "student_q": halves(rng, 1, distributions, 64, 8),
        "student_k": halves(rng, 1, distributions, 96, 8),
    }
    inputs["student_q"][..., 0], inputs["student_k"][..., 0] = 50.0, offset / 50.0
    return inputs


def published_kl(a: torch.Tensor, b: torch.Tensor, block: int = 32) -> torch.Tensor:
    """The published accumulator, ``sum e^(a - m_a) (a - b)``, and two log-sum-exps subtracted at the end."""
    m_a = m_b = torch.full(a.shape[:-1], -torch.inf)
    l_a = l_b = acc = torch.zeros(a.shape[:-1])
    for a_tile, b_tile in zip(a.split(block, -1), b.split(block, -1), strict=True):
        new_a, new_b = torch.maximum(m_a, a_tile.amax(-1)), torch.maximum(m_b, b_tile.amax(-1))
        weight = torch.exp(a_tile - new_a[..., None])
        acc = acc * torch.exp(m_a - new_a) + (weight * (a_tile - b_tile)).sum(-1)
        l_a = l_a * torch.exp(m_a - new_a) + weight.sum(-1)
        l_b = l_b * torch.exp(m_b - new_b) + torch.exp(b_tile - new_b[..., None]).sum(-1)
        m_a, m_b = new_a, new_b
    return acc / l_a - (m_a + torch.log(l_a)) + (m_b + torch.log(l_b))


SCALES = {"teacher_scale": 1.0, "student_scale": 1.0}


def test_published_form_loses_the_digits_that_an_offset_shifts_out(small_tiles: None) -> None:
    inputs = exact_inputs(2, 2)
    exact = reference.attention_kl(**{n: x.double() for n, x in inputs.items()}, reduction="none", **SCALES)
    a = reference.logits(inputs["teacher_q"], inputs["teacher_k"], 1.0)
    b = reference.logits(inputs["student_q"], inputs["student_k"], 1.0)
    assert torch.equal(a.double(), reference.logits(inputs["teacher_q"].double(), inputs["teacher_k"].double(), 1.0))
    assert torch.equal(b.double(), reference.logits(inputs["student_q"].double(), inputs["student_k"].double(), 1.0))
    assert b.mean() > OFFSET - 10
    assert (published_kl(a, b).double() - exact).abs().max() > 2e-4
    ours = attention_kl(**inputs, reduction="none", backend="tiled", **SCALES)
    assert (ours.double() - exact).abs().max() < 2e-6


@pytest.mark.parametrize("distributions", [2, 1])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_head_mean_keeps_them_too(distributions: int, reduction: str, small_tiles: None) -> None:
    inputs = exact_inputs(4, distributions)
    exact = reference.attention_kl(**{n: x.double() for n, x in inputs.items()}, reduction=reduction, **SCALES)
    inputs["student_q"].requires_grad_()
    ours = attention_kl(**inputs, reduction=reduction, backend="tiled", **SCALES)
    assert (ours.detach().double() - exact).abs().max() < 2e-6


def test_head_mean_by_the_published_subtraction_loses_them() -> None:
    """``A' - m_b + LSE_b`` for the mixture: what the state's relative form is there to avoid."""
    inputs = exact_inputs(4, 1)
    a = reference.logits(inputs["teacher_q"], inputs["teacher_k"], 1.0)
    b = reference.logits(inputs["student_q"], inputs["student_k"], 1.0)
    p = a.softmax(-1).mean(1, keepdim=True)
    published = (p * (p.log() - b)).sum(-1) + b.logsumexp(-1)
    exact = reference.attention_kl(**{n: x.double() for n, x in inputs.items()}, reduction="none", **SCALES)
    assert (published.double() - exact).abs().max() > 2e-4


def states_of_pieces(kind: str, a: torch.Tensor, b: torch.Tensor, cuts: list[int]) -> list:
    ends = [0, *sorted(cuts), a.shape[-1]]
    pieces = [slice(i, j) for i, j in itertools.pairwise(ends) if j > i]
    if kind == "paired":
        return [PairedState.of_tile(a[..., s], b[..., s]) for s in pieces]
    p = a.softmax(-1)
    return [MixtureState.of_tile(p[..., s], b[..., s]) for s in pieces]


@given(st.data())
@settings(max_examples=60, deadline=None, derandomize=True)
@pytest.mark.parametrize("kind", ["paired", "mixture"])
def test_merging_in_any_order_and_with_the_identity_agrees_to_rounding(kind: str, data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 1000))
    keys = data.draw(st.integers(1, 40))
    offset = data.draw(st.sampled_from([0.0, -30.0, OFFSET]))
    rng = torch.Generator().manual_seed(seed)
    a = torch.randn(5, keys, generator=rng, dtype=torch.float64) * 3
    b = torch.randn(5, keys, generator=rng, dtype=torch.float64) * 3 + offset
    whole = states_of_pieces(kind, a, b, [])[0]
    states = states_of_pieces(kind, a, b, data.draw(st.lists(st.integers(1, keys), max_size=6)))
    identity = type(whole).identity(whole.acc)
    states.insert(data.draw(st.integers(0, len(states))), identity)
    merged = list(data.draw(st.permutations(states)))
    while len(merged) > 1:  # any tree
        right = merged.pop(data.draw(st.integers(0, len(merged) - 1)))
        left = merged.pop(data.draw(st.integers(0, len(merged) - 1)))
        merged.append(left.merge(right))
    torch.testing.assert_close(merged[0].kl(), whole.kl(), rtol=1e-10, atol=1e-10 + offset * 1e-14)
    exact = torch.nn.functional.kl_div(b.log_softmax(-1), a.log_softmax(-1), log_target=True, reduction="none").sum(-1)
    torch.testing.assert_close(merged[0].kl(), exact, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("state", [LogSumExp, PairedState, MixtureState])
def test_identity_merged_with_itself_stays_the_identity(state: type) -> None:
    identity = state.identity(torch.zeros(3))
    for part, expected in zip(identity.merge(identity), identity, strict=True):
        assert torch.equal(part, expected)
    if hasattr(identity, "kl"):
        assert torch.equal(identity.kl(), torch.zeros(3))


def test_log_sum_exp_of_pieces() -> None:
    x = torch.randn(4, 30, dtype=torch.float64) * 50
    state = LogSumExp.identity(x[:, 0])
    for tile in x.split(7, -1):
        state = state.merge(LogSumExp.of_tile(tile))
    m, ln_l = state.pair()
    torch.testing.assert_close(m + ln_l, x.logsumexp(-1))
    assert LogSumExp.identity(torch.zeros(1)).pair() == (torch.tensor([-math.inf]), torch.tensor([0.0]))
