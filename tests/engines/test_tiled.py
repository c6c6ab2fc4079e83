"""The plain PyTorch engine: how many products it computes, and how much memory it takes."""

import math

import pytest
import torch

import streamkl
from streamkl import attention_kl
from streamkl.engines import tiled
from streamkl.problem import Problem, Side, Support
from streamkl.testing import STUDENT, TEACHER, Heads, IndexerHeads, evaluate, make_case, make_indexer_case

BLOCK_Q, BLOCK_K = 16, 24
TEACHER_DIM, STUDENT_DIM = 40, 56
"""Widths that are neither the block sizes nor each other: a product's shape says what it multiplies."""


class Products:
    """The matrix products that the dispatcher saw inside of a ``with``, by their shapes."""

    def __enter__(self) -> "Products":
        self.profiler = torch.profiler.profile(record_shapes=True).__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.profiler.__exit__(*error)
        products = (event.input_shapes for event in self.profiler.events() if event.name == "aten::mm")
        self.shapes = [(a[0], a[1], b[1]) for a, b in products]

    def logits(self, dim: int) -> int:
        """Products of queries and keys of a width: ``[rows, dim] x [dim, keys]``."""
        return sum(inner == dim for _, inner, _ in self.shapes)

    def gradients(self, dim: int) -> int:
        """Products that give a gradient of a width: ``[..., rows or keys] x [rows or keys, dim]``."""
        return sum(outer == dim for _, _, outer in self.shapes)


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled, "BLOCK_Q", BLOCK_Q)
    monkeypatch.setattr(tiled, "BLOCK_K", BLOCK_K)


def causal_tiles(nq: int, nk: int) -> int:
    """How many tiles of a head hold a pair that a causal mask allows, counted from the mask."""
    rows, keys = torch.arange(nq)[:, None], torch.arange(nk)
    allowed = keys <= rows + nk - nq
    blocks = torch.zeros(math.ceil(nq / BLOCK_Q), math.ceil(nk / BLOCK_K), dtype=torch.bool)
    for i in range(blocks.shape[0]):
        for j in range(blocks.shape[1]):
            blocks[i, j] = allowed[i * BLOCK_Q : (i + 1) * BLOCK_Q, j * BLOCK_K : (j + 1) * BLOCK_K].any()
    return int(blocks.sum())


def count(case) -> Products:
    function = getattr(streamkl, case.function)
    with Products() as products:
        evaluate(function, case.tensors, case, teacher_lse=case.teacher_lse, backend="tiled", **case.options)
    return products


@pytest.mark.slow
@pytest.mark.parametrize("heads", [Heads(4, 2, 4, 2), Heads(6, 3, 2, 1), Heads(4, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("tokens", [(100, 100), (50, 130)], ids=str)
def test_one_teacher_pass_for_loss_and_gradients_when_the_lse_is_given(tokens, heads, blocks) -> None:
    case = make_case(
        0, heads=heads, dims=(TEACHER_DIM, STUDENT_DIM), tokens=tokens, batch=1, causal=True, teacher_lse=True
    )
    products, tiles = count(case), causal_tiles(*tokens)
    assert products.logits(TEACHER_DIM) == heads.teacher * tiles
    assert products.logits(STUDENT_DIM) == 2 * heads.student * tiles  # its LSE first, then the pass
    assert products.gradients(STUDENT_DIM) == 2 * heads.student * tiles  # dQ and dK
    assert products.gradients(TEACHER_DIM) == 0


@pytest.mark.slow
@pytest.mark.parametrize("teacher_lse", [False, True], ids=["", "lse"])
@pytest.mark.parametrize("heads", [IndexerHeads(8, 2, 1), IndexerHeads(9, 3, 4), IndexerHeads(1, 1, 8)], ids=str)
@pytest.mark.parametrize("tokens", [(100, 100), (50, 130)], ids=str)
def test_an_indexer_takes_one_teacher_pass_for_loss_and_all_gradients(tokens, heads, teacher_lse, blocks) -> None:
    """And one more where the log-sum-exp is not given; its own heads are multiplied together."""
    case = make_indexer_case(
        0, heads=heads, dims=(TEACHER_DIM, STUDENT_DIM), tokens=tokens, batch=1, teacher_lse=teacher_lse
    )
    products, tiles = count(case), causal_tiles(*tokens)
    assert products.logits(TEACHER_DIM) == (1 if teacher_lse else 2) * heads.teacher * tiles
    assert products.logits(STUDENT_DIM) == 2 * tiles  # its LSE first, then the pass
    assert products.gradients(STUDENT_DIM) == 2 * tiles  # dQ and dK
    assert products.gradients(TEACHER_DIM) == 0


@pytest.mark.slow
def test_sixty_four_index_heads_take_no_more_rows_at_a_time_than_fit(blocks) -> None:
    """The teacher's tiles stay whole: their products must be those of the pass that computed their LSE."""
    case = make_indexer_case(0, heads=IndexerHeads(2, 1, 64), dims=(TEACHER_DIM, STUDENT_DIM), tokens=(64, 64), batch=1)
    shapes = count(case).shapes
    rows = {first for first, inner, _ in shapes if inner == STUDENT_DIM}
    assert max(rows) == tiled.TILES_HELD * BLOCK_Q
    assert {first for first, inner, _ in shapes if inner == TEACHER_DIM} == {BLOCK_Q}


def test_deterministic_gradients_of_selected_keys_are_refused_on_a_gpu() -> None:
    side = Side(4, 4, 64, torch.float32, 1.0)
    support = Support(1, 8, 8, topk=torch.empty(1, 1, 8, 3, device="meta"))
    for deterministic, device, refused in ((True, "cuda", True), (True, "cpu", False), (False, "cuda", False)):
        refusal = tiled.unsupported(torch.device(device), Problem(side, side, support, deterministic))
        assert (refusal is not None and "not deterministic with topk_indices" in refusal) == refused


def test_a_head_mean_without_lse_costs_one_pass_more(blocks) -> None:
    case = make_case(0, heads=Heads(6, 3, 2, 1), dims=(TEACHER_DIM, STUDENT_DIM), batch=1, causal=True)
    assert count(case).logits(TEACHER_DIM) == 2 * 6 * causal_tiles(50, 50)


@pytest.mark.slow
@pytest.mark.parametrize("wanted", [STUDENT, STUDENT + TEACHER], ids=["student", "both"])
def test_per_head_forward_and_one_pass_backward(wanted, blocks) -> None:
    case = make_case(0, heads=Heads(4, 4, 4, 4), dims=(TEACHER_DIM, STUDENT_DIM), batch=1, causal=True, wanted=wanted)
    products, tiles = count(case), 4 * causal_tiles(50, 50)
    assert products.logits(TEACHER_DIM) == 2 * tiles
    assert products.logits(STUDENT_DIM) == 2 * tiles
    assert products.gradients(STUDENT_DIM) == 2 * tiles
    assert products.gradients(TEACHER_DIM) == (2 * tiles if wanted != STUDENT else 0)


def test_a_window_visits_only_its_tiles(blocks) -> None:
    case = make_case(0, heads=Heads(1, 1, 1, 1), dims=(TEACHER_DIM, STUDENT_DIM), batch=1, tokens=(400, 400),
                     causal=True, window=(8, 0))  # fmt: skip
    with Products() as products, torch.no_grad():
        attention_kl(**case.tensors, **case.options, backend="tiled")
    assert products.logits(TEACHER_DIM) == 400 / BLOCK_Q  # a block of 16 rows sees at most 24 keys


@pytest.mark.parametrize("tokens", [(130, 32), (64, 40)], ids=str)
def test_keys_that_stand_for_four_tokens_are_multiplied_once_a_query_sees_them(tokens, blocks) -> None:
    case = make_indexer_case(0, heads=IndexerHeads(6, 2, 3), dims=(TEACHER_DIM, STUDENT_DIM), tokens=tokens, batch=1,
                             key_span=4, teacher_lse=True)  # fmt: skip
    (nq, nk), tiles = tokens, 0
    allowed = torch.arange(nk) < (torch.arange(nq)[:, None] + 1) // 4 + nk - nq // 4
    live = allowed[allowed.any(-1)]  # blocks start at the first row that sees a key
    for rows in live.split(BLOCK_Q):
        tiles += sum(bool(block.any()) for block in rows.split(BLOCK_K, 1))
    products = count(case)
    assert products.logits(TEACHER_DIM) == 6 * tiles
    assert products.logits(STUDENT_DIM) == products.gradients(STUDENT_DIM) == 2 * tiles
    assert tiles < math.ceil(nq / BLOCK_Q) * math.ceil(nk / BLOCK_K) or tokens != (130, 32), "no tile was hidden"


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "path", "tokens"), [("float32", "two_passes", 4097), ("bfloat16", "one_pass", 4097)])
def test_scratch_does_not_grow_with_the_sequence(dtype: str, path: str, tokens: int, allocations) -> None:
    short, long = (allocations(n, dtype, path, "tiled") for n in (2049, tokens))
    print(f"{dtype}, {path}: {short} at 2,049 tokens, {long} at {tokens:,}")
    assert long["allocations"] > 2_000, "the hook saw nothing"
    assert long["gradients"] <= 4, "two gradients, and their float32 accumulators"
    assert long["rows"] <= 14
    assert long["scratch"] <= 64 << 20
    assert abs(long["scratch"] - short["scratch"]) <= 0.1 * short["scratch"]


@pytest.mark.slow
@pytest.mark.parametrize("path", ["topk", "indexer"])
def test_scratch_of_an_indexer_and_of_selected_keys_does_not_grow_with_the_sequence(path: str, allocations) -> None:
    short, long = (allocations(n, "bfloat16", path, "tiled") for n in (2049, 4097))
    print(f"{path}: {short} at 2,049 tokens, {long} at 4,097")
    assert long["allocations"] > 2_000, "the hook saw nothing"
    assert long["gradients"] <= 6, "three gradients, and their float32 accumulators"
    assert long["scratch"] <= 64 << 20
    assert abs(long["scratch"] - short["scratch"]) <= 0.1 * short["scratch"]
