"""Which tiles the kernels visit, which of them by the masked path, and how many products that takes.

Products are counted from outside: every ``tl.dot`` that the interpreter runs, by the shapes it multiplies.
"""

from collections import Counter

import pytest
import torch

from streamkl import attention_kl, attention_lse, indexer_kl, reference
from streamkl.engines.triton.configs import architecture
from streamkl.engines.triton.meta import Config
from streamkl.testing import STUDENT, TEACHER, Heads, IndexerHeads, evaluate, make_case, make_indexer_case

pytest.importorskip("triton")

ROWS, KEYS = 16, 32
TEACHER_DIM, STUDENT_DIM = 64, 128
"""Distinct widths: the shape of a product says what it multiplies."""

MASKS = {
    "none": {},
    "causal": {"causal": True},
    "window": {"window": (60, 40)},
    "causal_window": {"causal": True, "window": (70, 0)},
    "key_span": {"causal": True, "key_span": 3},
}


@pytest.fixture(autouse=True)
def _tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(rows=ROWS, keys=KEYS, warps=1, stages=1, hold=1024)
    monkeypatch.setattr(architecture, "INTERPRETED", config)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Counter:
    """How many products ran, by ``(rows, inner, columns)``."""
    from triton.runtime.interpreter import interpreter_builder

    seen: Counter = Counter()
    create_dot = type(interpreter_builder).create_dot

    def counted(self, a, b, *args):
        seen[(*a.data.shape, b.data.shape[-1])] += 1
        return create_dot(self, a, b, *args)

    monkeypatch.setattr(type(interpreter_builder), "create_dot", counted)
    return seen


@pytest.fixture
def masked(monkeypatch: pytest.MonkeyPatch) -> list:
    """The masks of pairs that the kernels made, one per tile of the masked path, over both sides together."""
    from streamkl.engines.triton.kernels.dense import forward, lse

    seen: list = []
    original = forward.allowed_pairs

    class Recorder:
        def __call__(self, *args, **kwargs):
            pairs = original(*args, **kwargs)
            seen.append(pairs.handle.data.copy())
            return pairs

    for module in (forward, lse):
        monkeypatch.setattr(module, "allowed_pairs", Recorder())
    return seen


def tiles(nq: int, nk: int, mask: dict) -> tuple[int, int]:
    """How many tiles hold an allowed pair, and how many of them a pair that is not."""
    allowed = torch.zeros(-(-nq // ROWS) * ROWS, -(-nk // KEYS) * KEYS, dtype=torch.bool)
    options = {"causal": False, "window": None, "cu_seqlens_q": None, "cu_seqlens_k": None, **mask}
    allowed[:nq, :nk] = reference.allowed_pairs(nq, nk, **options)
    missing = ~allowed
    missing[nq:] = False  # rows past the end are not stored, and need no mask where the others see the whole tile
    touched, boundary = (x.unfold(0, ROWS, ROWS).unfold(1, KEYS, KEYS).flatten(2).any(-1) for x in (allowed, missing))
    return int(touched.sum()), int((touched & boundary).sum())


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("tokens", [(96, 96), (40, 150), (100, 64)], ids=str)
def test_a_forward_visits_the_tiles_that_intersect_the_mask_and_masks_only_the_boundary(
    tokens, mask, products, masked
) -> None:
    case = make_case(0, heads=Heads(1, 1, 1, 1), dims=(TEACHER_DIM, STUDENT_DIM), batch=1, tokens=tokens, **mask)
    with torch.no_grad():
        attention_kl(**case.tensors, **case.options, backend="triton")
    visited, boundary = tiles(*tokens, mask)
    assert products == {(ROWS, TEACHER_DIM, KEYS): visited, (ROWS, STUDENT_DIM, KEYS): visited}
    assert len(masked) == boundary
    assert boundary < visited or tokens != (96, 96), "no tile was full"


def test_log_sum_exp_visits_them_once(products) -> None:
    case = make_case(0, heads=Heads(1, 1, 1, 1), dims=(TEACHER_DIM, STUDENT_DIM), batch=1, tokens=(96, 96))
    attention_lse(case.tensors["teacher_q"], case.tensors["teacher_k"], causal=True, backend="triton")
    assert products == {(ROWS, TEACHER_DIM, KEYS): tiles(96, 96, {"causal": True})[0]}


def gradient_products(products: Counter, dim: int) -> tuple[int, int]:
    """Products that give dK, and dQ, in units of a whole tile of ``dim`` columns."""
    dk = products[(KEYS, ROWS, dim)]
    dq = sum(
        count * columns / dim for (rows, inner, columns), count in products.items() if (rows, inner) == (ROWS, KEYS)
    )
    return dk, dq


@pytest.mark.parametrize("heads", [Heads(2, 2, 2, 2), Heads(4, 2, 2, 1), Heads(4, 1, 1, 1)], ids=str)
def test_training_with_a_teacher_lse_takes_one_teacher_and_four_student_products_per_tile(heads, products) -> None:
    case = make_case(
        0, heads=heads, dims=(TEACHER_DIM, STUDENT_DIM), batch=1, tokens=(64, 64), teacher_lse=True, guard=False
    )  # without a mask and with one distribution per row, tiles are alike for rows and keys
    evaluate(attention_kl, case.tensors, case, teacher_lse=case.teacher_lse, backend="triton", **case.options)
    pack = heads.student // heads.student_kv if heads.teacher == heads.student else 1
    visited = heads.student * (64 // ROWS) * (64 // KEYS)
    assert pack == 1
    assert products[(ROWS, TEACHER_DIM, KEYS)] == visited * heads.teacher // heads.student
    assert products[(ROWS, STUDENT_DIM, KEYS)] == 2 * visited  # its LSE first, then the pass
    assert gradient_products(products, STUDENT_DIM) == (visited, visited)


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("heads", [IndexerHeads(1, 1, 3), IndexerHeads(4, 2, 1), IndexerHeads(6, 3, 5)], ids=str)
def test_an_indexer_takes_one_teacher_product_per_head_and_tile(heads, causal, products) -> None:
    """With the teacher's log-sum-exp, for the loss and all gradients together."""
    case = make_indexer_case(
        0, heads=heads, dims=(TEACHER_DIM, STUDENT_DIM), batch=1, tokens=(64, 64), teacher_lse=True, causal=causal,
        guard=False,
    )  # fmt: skip
    evaluate(indexer_kl, case.tensors, case, teacher_lse=case.teacher_lse, backend="triton", **case.options)
    visited, _ = tiles(64, 64, {"causal": causal})
    assert products[(ROWS, TEACHER_DIM, KEYS)] == heads.teacher * visited
    assert products[(ROWS, STUDENT_DIM, KEYS)] == 3 * heads.indexer * visited  # its LSE, the sum, and each head again
    assert gradient_products(products, STUDENT_DIM) == (heads.indexer * visited, heads.indexer * visited)


@pytest.mark.parametrize("heads", [IndexerHeads(4, 2, 1), IndexerHeads(32, 2, 5)], ids=str)
def test_selected_keys_are_multiplied_once_per_key_head_with_all_heads_that_read_them(heads, products) -> None:
    """With the teacher's log-sum-exp, and only up to the last selected key that a query sees."""
    topk = torch.full((1, 3, 4 * KEYS), -1)
    topk[:, :, : 2 * KEYS] = torch.arange(2 * KEYS)
    topk[:, 0, KEYS:] = -1
    topk[:, 1] = -1
    case = make_indexer_case(
        0, heads=heads, dims=(TEACHER_DIM, STUDENT_DIM), batch=1, tokens=(3, 64), teacher_lse=True, causal=False,
        guard=False, topk_indices=topk,
    )  # fmt: skip
    evaluate(indexer_kl, case.tensors, case, teacher_lse=case.teacher_lse, backend="triton", **case.options)
    visited, padded = 1 + 0 + 2, 16  # rows of heads, of which a product wants 16
    assert products[(padded, TEACHER_DIM, KEYS)] == heads.teacher_kv * visited
    assert products[(padded, STUDENT_DIM, KEYS)] == 2 * visited  # its LSE, and the pass
    assert products[(KEYS, padded, STUDENT_DIM)] == products[(padded, KEYS, STUDENT_DIM)] == visited


@pytest.mark.parametrize("heads", [1, 4])
def test_a_deterministic_indexer_computes_the_teacher_again_for_each_index_head(heads, products) -> None:
    case = make_indexer_case(
        0, heads=IndexerHeads(2, 1, heads), dims=(TEACHER_DIM, STUDENT_DIM), batch=1, tokens=(64, 64),
        teacher_lse=True, causal=False, guard=False,
    )  # fmt: skip
    evaluate(
        indexer_kl, case.tensors, case, teacher_lse=case.teacher_lse, backend="triton", deterministic=True,
        **case.options,
    )  # fmt: skip
    visited, _ = tiles(64, 64, {})
    assert products[(ROWS, TEACHER_DIM, KEYS)] == 2 * visited * (heads + 1)  # dQ's programs, and dK's
    assert gradient_products(products, STUDENT_DIM) == (heads * visited, heads * visited)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_backward_takes_four_products_per_tile_in_one_pass_and_six_in_two(deterministic, products) -> None:
    case = make_case(
        0, heads=Heads(2, 2, 2, 2), dims=(TEACHER_DIM, STUDENT_DIM), batch=1, tokens=(64, 64), reduction="none",
        guard=False,
    )  # fmt: skip
    evaluate(attention_kl, case.tensors, case, backend="triton", deterministic=deterministic, **case.options)
    visited, passes = 2 * (64 // ROWS) * (64 // KEYS), 2 if deterministic else 1
    assert products[(ROWS, TEACHER_DIM, KEYS)] == visited * (1 + passes)  # the forward, and the passes of the backward
    assert products[(ROWS, STUDENT_DIM, KEYS)] == visited * (1 + passes)
    assert gradient_products(products, STUDENT_DIM) == (visited, visited)


def test_gradients_to_both_sides_share_a_pass(products) -> None:
    case = make_case(
        0, heads=Heads(1, 1, 1, 1), dims=(32, 64), batch=1, tokens=(64, 64), wanted=STUDENT + TEACHER, guard=False
    )
    evaluate(attention_kl, case.tensors, case, backend="triton", **case.options)
    visited = (64 // ROWS) * (64 // KEYS)
    assert products[(ROWS, 64, KEYS)] == 2 * visited


def test_a_key_tile_is_loaded_once_for_all_query_heads_that_share_it(products) -> None:
    """Eight query heads on one key head lie in the rows of a tile, as one head of eight times the rows would."""
    case = make_case(0, heads=Heads(8, 1, 8, 1), dims=(TEACHER_DIM, STUDENT_DIM), batch=1, tokens=(8, 96))
    with torch.no_grad():
        attention_kl(**case.tensors, **case.options, backend="triton")
    assert products[(ROWS, TEACHER_DIM, KEYS)] == (8 * 8 // ROWS) * (96 // KEYS)
