"""``key_span``: keys that stand for several tokens, and are seen from the last of them on."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from streamkl import attention_kl, attention_lse, indexer_kl
from streamkl.testing import (
    Heads,
    check_accuracy,
    evaluate,
    make_case,
    make_indexer_case,
    random_case,
    random_indexer_case,
)
from streamkl.testing.problems import DTYPES

LATER = 40_000
"""The first seed here: other draws than those of the other fuzz tests."""


def test_random_problem(fuzz_seed: int, backend: str, random_tiles) -> None:
    """Of heads, of head means and of indexers, packed and not, and with selected keys."""
    seed, topk = LATER + fuzz_seed, fuzz_seed % 5 == 1
    deterministic = random_tiles(seed, backend, few_keys=topk)
    sizes: dict[str, Any] = {"max_tokens": 96, "max_heads": 8}  # few tokens make few keys, and eager may be lucky
    if backend == "triton":
        sizes = {"max_tokens": 8 if topk else 24, "max_heads": 3, "max_batch": 1}
    dtypes = tuple(d for d in DTYPES if backend == "tiled" or d != torch.float64)
    draw, function = ((random_case, attention_kl), (random_indexer_case, indexer_kl))[fuzz_seed % 2]
    case = draw(seed, dtypes=dtypes, topk=topk, key_span=True, **sizes)
    errors = check_accuracy(case, backend, functools.partial(function, deterministic=deterministic))
    assert errors.worst <= 1, f"{errors}; {case}"


def drawn(tokens: int, keys: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(0)
    shapes = {"teacher_q": (2, 6, tokens, 16), "teacher_k": (2, 2, keys, 16), "index_q": (2, 3, tokens, 8),
              "index_k": (2, keys, 8), "index_w": (2, tokens, 3)}  # fmt: skip
    return {name: torch.randn(shape, generator=rng).to(dtype) for name, shape in shapes.items()}


@pytest.mark.parametrize("key_span", [2, 3, 4, 7])
@pytest.mark.parametrize("tokens", [24, 30])
@pytest.mark.parametrize("engine", ["tiled", "reference"])
def test_it_is_the_mask_written_out(key_span: int, tokens: int, engine: str) -> None:
    """In float64: row i sees entry j where (j + 1) m <= i + 1; rows that see none do not count."""
    x = drawn(tokens, tokens // key_span, torch.float64)
    leaves = [x[name].requires_grad_() for name in ("index_q", "index_k", "index_w")]
    rows, entries = torch.arange(tokens)[:, None], torch.arange(tokens // key_span)
    allowed = (entries + 1) * key_span <= rows + 1
    live = allowed.any(-1)
    logits = x["teacher_q"] @ x["teacher_k"].repeat_interleave(3, 1).mT / 4
    p = logits.masked_fill(~allowed, -torch.inf)[:, :, live].softmax(-1).mean(1)
    scores = (x["index_q"] @ x["index_k"][:, None].mT * 8**-0.5).relu()
    scores = (scores * x["index_w"].mT[..., None]).sum(1).masked_fill(~allowed, -torch.inf)[:, live]
    log_q = scores.log_softmax(-1)
    expected = torch.where(p > 0, p * (p.clamp(min=1e-300).log() - log_q), 0.0).sum(-1).mean()
    ours = indexer_kl(**x, key_span=key_span, backend=engine)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)
    pairs = zip(torch.autograd.grad(ours, leaves), torch.autograd.grad(expected, leaves), strict=True)
    for got, wanted in pairs:
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


def test_rows_that_see_no_entry_are_zero_and_leave_no_gradient(backend) -> None:
    x = drawn(15, 3)
    x["index_q"].requires_grad_()
    rows = indexer_kl(**x, key_span=4, reduction="none", backend=backend)
    assert not rows[:, :, :3].any()
    rows.sum().backward()
    assert not x["index_q"].grad[:, :, :3].any()
    assert x["index_q"].grad[:, :, 7:].any()
    lse = attention_lse(x["teacher_q"], x["teacher_k"], causal=True, key_span=4, backend=backend)
    assert torch.equal(lse == -torch.inf, (torch.arange(15) < 3).expand_as(lse))


@pytest.mark.parametrize("first", [4, 12, 20])
def test_queries_from_a_multiple_of_the_span_on_see_what_they_see_among_all(first, backend) -> None:
    """A chunk of a prefill, against all entries so far; the last of 23 tokens make none."""
    x = drawn(23, 5)
    whole = indexer_kl(**x, key_span=4, reduction="none", backend=backend)
    rows = {name: y if name.endswith("_k") else y[..., first:, :] for name, y in x.items()}
    part = indexer_kl(**rows, key_span=4, reduction="none", backend=backend)
    torch.testing.assert_close(part, whole[:, :, first:], rtol=1e-5, atol=1e-6)


def test_packed_sequences_have_entries_of_their_own(backend) -> None:
    x, cu_q, cu_k = drawn(26, 6), torch.tensor([0, 9, 12, 26]), torch.tensor([0, 2, 2, 5])
    packed = {name: y[0] if y.dim() == 3 else y[0].transpose(0, 1) for name, y in x.items()}
    options: dict[str, Any] = {"key_span": 4, "reduction": "none", "backend": backend}
    ours = indexer_kl(**packed, **options, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    alone = []
    for n in range(3):
        q, k = slice(cu_q[n], cu_q[n + 1]), slice(cu_k[n], cu_k[n + 1])
        rows = {name: y[:1, ..., k if name.endswith("_k") else q, :] for name, y in x.items()}
        alone.append(indexer_kl(**rows, **options)[0])
    torch.testing.assert_close(ours[:, :26], torch.cat(alone, 1), rtol=1e-5, atol=1e-6)


def test_selecting_every_entry_changes_nothing_and_entries_ahead_stay_hidden(backend) -> None:
    x = drawn(14, 4)
    options: dict[str, Any] = {"key_span": 3, "reduction": "none", "backend": backend}
    every = torch.arange(4).expand(2, 14, 4)
    dense, selected = indexer_kl(**x, **options), indexer_kl(**x, **options, topk_indices=every)
    torch.testing.assert_close(selected, dense, rtol=1e-5, atol=1e-6)


def test_a_span_of_one_token_is_causal_bit_for_bit(backend) -> None:
    case = make_case(1, heads=Heads(4, 2, 2, 1), batch=1, tokens=(20, 30), causal=True, guard=False)
    one, plain = (
        evaluate(attention_kl, case.tensors, case, **case.options, **span, backend=backend).named()
        for span in ({"key_span": 1}, {})
    )
    assert all(torch.equal(one[name], plain[name]) for name in plain)


def test_a_given_lse_over_other_entries_is_refused(backend) -> None:
    case = make_indexer_case(2, batch=1, tokens=(40, 10), key_span=4, guard=False)
    q, k = (case.tensors[name] for name in ("teacher_q", "teacher_k"))
    right = attention_lse(q, k, causal=True, key_span=4)
    assert indexer_kl(**case.tensors, **case.options, teacher_lse=right, backend=backend).isfinite()
    with pytest.raises(ValueError, match="sum to 1"):
        indexer_kl(**case.tensors, **case.options, teacher_lse=attention_lse(q, k), backend=backend)
