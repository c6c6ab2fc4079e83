"""Streaming top-k against its definition, which ranks one key after another."""

import subprocess
import sys

import pytest
import torch

from streamkl.sparse import index_scores, index_topk, oracle_topk

pytestmark = pytest.mark.usefixtures("small_blocks", "nan_poison")
SEEDS = range(60)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("activation", ["relu", None])
def test_index_topk_ranks_by_score_then_by_lower_key(seed, activation, sparse_case, materialised_topk) -> None:
    case = sparse_case(seed)
    found = index_topk(case.index_q, case.index_k, case.index_w, topk=case.topk, activation=activation, **case.mask)
    expected = materialised_topk(case.scores(relu=activation == "relu"), case.topk)
    expected = torch.where(expected < 0, -1, expected - case.first_keys())
    assert found.dtype == torch.int32
    torch.testing.assert_close(case.rows(found).long(), expected, rtol=0, atol=0, msg=str(case))


@pytest.mark.parametrize("seed", SEEDS)
def test_oracle_topk_ranks_by_mean_attention(seed, sparse_case) -> None:
    """Equal to rounding: two heads that swap their weights tie in exact arithmetic, and in no other."""
    case = sparse_case(seed)
    found = case.rows(oracle_topk(case.q, case.k, topk=case.topk, **case.mask)).long()
    mass, visible = case.attention(), case.allowed.sum(-1)
    best = mass.sort(-1, descending=True).values
    best = torch.nn.functional.pad(best, (0, max(0, case.topk - best.shape[-1])))[..., : case.topk]
    is_key = found >= 0
    found = torch.where(is_key, found + case.first_keys(), -1)
    assert (is_key.sum(-1) == visible.clamp(max=case.topk)).all(), str(case)
    assert case.allowed.expand_as(mass).gather(-1, found.clamp(min=0))[is_key].all(), str(case)
    got = mass.gather(-1, found.clamp(min=0)).masked_fill(~is_key, 0.0)
    torch.testing.assert_close(got, best.masked_fill(~is_key, 0.0), rtol=1e-12, atol=1e-14, msg=str(case))
    for row in found.flatten(0, 1).tolist():
        keys = [key for key in row if key >= 0]
        assert len(set(keys)) == len(keys), str(case)


def test_equal_keys_go_by_lower_index_across_blocks() -> None:
    q, k = torch.randn(1, 4, 40, 16), torch.randn(1, 2, 1, 16).expand(1, 2, 40, 16)
    assert (oracle_topk(q, k, topk=5, causal=False) == torch.arange(5)).all()
    assert (index_topk(q, k[:, 0], topk=30, causal=False)[0, :, :30].sort(-1).values == torch.arange(30)).all()


def test_the_first_columns_are_a_smaller_topk(sparse_case) -> None:
    case = sparse_case(1, causal=True)
    wide = index_topk(case.index_q, case.index_k, case.index_w, topk=20, **case.mask)
    narrow = index_topk(case.index_q, case.index_k, case.index_w, topk=7, **case.mask)
    assert torch.equal(wide[..., :7], narrow)


@pytest.mark.parametrize("seed", range(12))
def test_blocks_do_not_change_the_answer(seed, sparse_case, monkeypatch: pytest.MonkeyPatch) -> None:
    """In whole numbers, whose products are exact in whatever order they are added."""
    case = sparse_case(3 * seed, dtype=torch.float32)
    small = index_topk(case.index_q, case.index_k, case.index_w, topk=case.topk, **case.mask)
    monkeypatch.setattr("streamkl.engines.tiled_topk.BLOCK_Q", 256)
    monkeypatch.setattr("streamkl.engines.tiled_topk.BLOCK_K", 2048)
    assert torch.equal(small, index_topk(case.index_q, case.index_k, case.index_w, topk=case.topk, **case.mask))


@pytest.mark.parametrize("seed", range(0, 24))
def test_dense_scores_equal_their_definition(seed, sparse_case) -> None:
    case = sparse_case(seed)
    scores = index_scores(case.index_q, case.index_k, case.index_w, **case.mask)
    torch.testing.assert_close(case.rows(scores), case.scores(), msg=str(case))


@pytest.mark.selects
def test_a_score_that_is_not_a_number_is_never_selected(backend) -> None:
    index_q, index_k = torch.ones(1, 1, 3, 2), torch.ones(1, 3, 2)
    index_k[0, 1] = torch.nan
    found = index_topk(index_q, index_k, topk=3, backend=backend)
    assert found[0].tolist() == [[0, -1, -1], [0, -1, -1], [0, 2, -1]]


@pytest.mark.selects
def test_an_infinite_score_does_not_come_before_the_keys_on_the_diagonal(backend) -> None:
    index_q, index_k = torch.ones(1, 1, 6, 1), torch.ones(1, 6, 1)
    index_k[0, 0] = torch.inf
    found = index_topk(index_q, index_k, topk=3, query_block=2, backend=backend)
    assert found[0].tolist() == [[0, 1, -1], [2, 3, 0], [4, 5, 0]]


def test_a_query_of_high_scores_does_not_crowd_out_another_where_they_are_normalised() -> None:
    index_k = torch.eye(5)[None]
    index_q = torch.tensor([[3.0, 0.0, 0.0, 0.0, 0.0], [9.0, 9.5, 9.0, 9.0, 9.0]])[None, None]
    options = {"topk": 3, "query_block": 2, "index_scale": 1.0}
    assert index_topk(index_q, index_k, **options, causal=False)[0].tolist() == [[3, 4, 1]]
    assert index_topk(index_q, index_k, **options, causal=False, normalise=True)[0].tolist() == [[3, 4, 0]]


def test_bfloat16_ranks_float32_products() -> None:
    index_q, index_k = torch.randn(1, 4, 50, 32).bfloat16(), torch.randn(1, 50, 32).bfloat16()
    found = index_topk(index_q, index_k, topk=9)
    assert torch.equal(found, index_topk(index_q.float(), index_k.float(), topk=9))


def test_a_given_lse_is_used(sparse_case) -> None:
    case = sparse_case(4)
    with pytest.raises(ValueError, match=r"lse must be of shape .* got \[1\]"):
        oracle_topk(case.q, case.k, topk=2, lse=torch.zeros(1), **case.mask)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"topk": 0}, "topk must be a positive integer: got 0"),
        ({"index_q": torch.zeros(2, 3)}, r"index_q must be a tensor of shape \[batch, heads, tokens, dim\]"),
        ({"index_k": torch.zeros(1, 5, 7)}, "same head dim: got 8 and 7"),
        ({"index_k": torch.zeros(2, 5, 8)}, "same batch: got 1 and 2"),
        ({"index_k": torch.zeros(1, 5, 8).half()}, "same dtype"),
        ({"index_w": torch.zeros(1, 3, 5)}, r"index_w must be a floating-point tensor of shape \[1, 5, 3\]"),
        ({"activation": "gelu"}, "activation must be 'relu' or None"),
    ],
)
def test_wrong_arguments_are_refused(change, message) -> None:
    arguments = {"index_q": torch.zeros(1, 3, 5, 8), "index_k": torch.zeros(1, 5, 8), "topk": 2, **change}
    with pytest.raises(ValueError, match=message):
        index_topk(**arguments)


PEAK = """
import resource, sys, torch
from streamkl.sparse import index_topk
torch.set_num_threads(1)
tokens = int(sys.argv[1])
index_q, index_k = torch.randn(1, 1, tokens, 16), torch.randn(1, tokens, 16)
index_topk(index_q[:, :, :64], index_k[:, :64], topk=64)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
index_topk(index_q, index_k, topk=64)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of resident memory")
def test_memory_grows_with_the_answer_and_not_with_its_square() -> None:
    small, large = (
        int(subprocess.run([sys.executable, "-c", PEAK, n], capture_output=True, text=True, check=True).stdout)
        for n in ("4096", "16384")
    )
    answer = 16384 * 64 * 4 / 1024
    assert large <= small + 2 * answer, f"{small} KB at 4,096 tokens, {large} KB at 16,384"
