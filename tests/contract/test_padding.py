"""``key_padding_mask``: a padded batch has the losses and gradients of its sequences without their padding."""

from typing import Any

import pytest
import torch
from torch import Tensor

from streamkl import attention_kl, attention_lse, indexer_kl

TOKENS = 14
SPANS = [(0, 9), (5, 14), (3, 10), (0, 14), (6, 6)]
"""Padded on the right, on the left, on both sides, not at all, and nothing but padding."""
MASK = torch.tensor([[start <= n < end for n in range(TOKENS)] for start, end in SPANS])


@pytest.fixture(params=["reference", "tiled", "cpu"])
def engine(request: pytest.FixtureRequest) -> str:
    """Engines that are quick: none of them knows of padding."""
    return request.param


def drawn(**shapes: tuple[int, ...]) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()}


def heads(*counts: int) -> list[tuple[int, ...]]:
    return [(len(SPANS), count, TOKENS, 16) for count in counts]


def sliced(x: Any, name: str, row: int) -> Any:
    """One row of the batch, without its padding."""
    start, end = SPANS[row]
    dim = {"index_k": 1, "index_w": 1, "topk_indices": -2}.get(name, 2 if x.dim() == 4 else -1)
    return x[row : row + 1].narrow(dim, start, end - start)


def check(function: Any, tensors: dict[str, Tensor], wanted: tuple[str, ...], rows: dict[str, Tensor], **options: Any):
    """Compares the rows of a padded batch, and their gradients, with those of each sequence alone."""
    leaves = {name: x.requires_grad_(name in wanted) for name, x in tensors.items()}
    weight = rows.get("row_weight", torch.ones(len(SPANS), TOKENS))
    found = function(**leaves, **rows, **options, key_padding_mask=MASK, reduction="none")
    total = function(**leaves, **rows, **options, key_padding_mask=MASK, reduction="mean")
    got = torch.autograd.grad(found.sum(), [leaves[name] for name in wanted])
    expected, sums = torch.zeros_like(found), 0.0
    for row, (start, end) in enumerate(SPANS):
        if start == end:
            continue
        own = {name: sliced(x, name, row) for name, x in {**leaves, **rows}.items()}
        if "topk_indices" in own:
            own["topk_indices"] = own["topk_indices"] - start
        alone = function(**own, **options, reduction="none")
        expected[row, :, start:end] = alone[0]
        sums += float(weight[row, start:end].sum()) * found.shape[1]
    torch.testing.assert_close(found, expected.detach(), rtol=1e-6, atol=1e-6)
    assert not found.masked_select(~MASK[:, None]).any()
    torch.testing.assert_close(total, expected.sum().detach() / sums, rtol=1e-5, atol=1e-6)
    for name, x, y in zip(wanted, got, torch.autograd.grad(expected.sum(), [leaves[n] for n in wanted]), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("mask", [{"causal": True}, {"causal": False}, {"window": (3, 2)}], ids=str)
@pytest.mark.parametrize("given", ["", "rows"])
def test_a_padded_batch_has_the_losses_of_its_sequences(given, mask, engine) -> None:
    names = ("teacher_q", "teacher_k", "student_q", "student_k")
    tensors = drawn(**dict(zip(names, heads(4, 2, 2, 1), strict=True)))
    rows = {}
    if given:
        rows = drawn(teacher_rest=(len(SPANS), 4, TOKENS), row_weight=(len(SPANS), TOKENS))
        rows["row_weight"].abs_()
        rows["teacher_lse"] = attention_lse(
            tensors["teacher_q"], tensors["teacher_k"], key_padding_mask=MASK, backend=engine, **mask
        )
    check(attention_kl, tensors, names[2:], rows, backend=engine, **mask)


def test_so_has_one_of_selected_keys_that_names_padding_too(engine) -> None:
    names = ("teacher_q", "teacher_k", "student_q", "student_k")
    tensors = drawn(**dict(zip(names, heads(2, 2, 2, 2), strict=True)))
    rng = torch.Generator().manual_seed(1)
    topk = torch.rand(len(SPANS), TOKENS, TOKENS, generator=rng).argsort(-1)[..., :6]
    found = attention_kl(**tensors, topk_indices=topk, key_padding_mask=MASK, reduction="none", backend=engine)
    real = MASK[:, None].expand(-1, TOKENS, -1).gather(-1, topk)
    shown = attention_kl(
        **tensors, topk_indices=torch.where(real, topk, -1), reduction="none", backend=engine
    )  # what is left of each query's keys
    torch.testing.assert_close(found, torch.where(MASK[:, None], shown, 0.0), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("key", [TOKENS, 2 * TOKENS, -2])
def test_selected_keys_that_there_are_not_are_refused_with_a_mask_too(key: int) -> None:
    tensors = drawn(**dict(zip("qk", heads(2, 2), strict=True)))
    topk = torch.arange(4, device="cpu").repeat(len(SPANS), TOKENS, 1)
    topk[2, 7, 3] = key
    for mask in ({}, {"key_padding_mask": MASK}):
        with pytest.raises(ValueError, match="topk_indices must be keys from 0 to"):
            attention_lse(**tensors, topk_indices=topk, **mask)


def test_so_has_an_indexer(engine) -> None:
    batch = len(SPANS)
    tensors = drawn(
        teacher_q=(batch, 4, TOKENS, 16), teacher_k=(batch, 2, TOKENS, 16), index_q=(batch, 2, TOKENS, 16),
        index_k=(batch, TOKENS, 16), index_w=(batch, TOKENS, 2),
    )  # fmt: skip
    check(indexer_kl, tensors, ("index_q", "index_k", "index_w"), {}, backend=engine)


def test_the_lse_of_padded_queries_is_minus_infinity(engine) -> None:
    tensors = drawn(**dict(zip("qk", heads(4, 2), strict=True)))
    lse = attention_lse(**tensors, causal=True, key_padding_mask=MASK, backend=engine)
    assert torch.equal(lse == -torch.inf, ~MASK[:, None].expand_as(lse))
    for row, (start, end) in enumerate(SPANS[:4]):
        own = {name: x[row : row + 1, :, start:end] for name, x in tensors.items()}
        torch.testing.assert_close(lse[row, :, start:end], attention_lse(**own, causal=True, backend=engine)[0])


def test_it_compiles_in_one_graph_for_any_mask() -> None:
    tensors = drawn(**dict(zip(("teacher_q", "teacher_k", "student_q", "student_k"), heads(2, 2, 2, 2), strict=True)))

    def loss(mask: Tensor) -> Tensor:
        return attention_kl(**tensors, causal=True, key_padding_mask=mask, backend="tiled")

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for mask in (MASK, MASK.flip(1)):
        assert torch.equal(compiled(mask), loss(mask))


WRONG = {
    "holes": (torch.arange(TOKENS).expand(len(SPANS), -1) % 3 != 0, "next to each other"),
    "integers": (MASK.long(), "must be of bool, true for real tokens: got torch.int64"),
    "another shape": (MASK[:, 1:], r"must have shape \[5, 14\]: got \[5, 13\]"),
    "a list": (MASK.tolist(), "must be of bool, true for real tokens: got list"),
    "another device": (MASK.to("meta"), "the device of the keys, cpu: got meta"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_mask_is_refused(wrong: str) -> None:
    mask, message = WRONG[wrong]
    tensors = drawn(**dict(zip("qk", heads(2, 2), strict=True)))
    with pytest.raises(ValueError, match=message):
        attention_lse(**tensors, key_padding_mask=mask)


def test_it_is_refused_with_packed_tensors_and_with_other_numbers_of_queries() -> None:
    tensors = drawn(q=(TOKENS, 2, 16), k=(TOKENS, 2, 16))
    cu = torch.tensor([0, TOKENS])
    with pytest.raises(ValueError, match="together with cu_seqlens"):
        attention_lse(**tensors, cu_seqlens_q=cu, cu_seqlens_k=cu, key_padding_mask=MASK)
    q, k = torch.zeros(5, 2, 3, 16), torch.zeros(5, 2, TOKENS, 16)
    with pytest.raises(ValueError, match="as many queries as keys: got 3 and 14"):
        attention_lse(q, k, key_padding_mask=MASK)
