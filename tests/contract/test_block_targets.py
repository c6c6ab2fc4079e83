"""``target="block_sum"`` and ``"block_max"``: a key of the student's stands for a block of the teacher's keys."""

import random
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from streamkl import attention_kl, indexer_kl
from streamkl.testing.memory import counted_peak

HEADS = {
    "head_mean": (6, 2, 1),
    "groups": (6, 3, 3),
    "per_head": (4, 2, 4),
    "across": (12, 3, 2),
    "crossed": (12, 4, 6),
}
"""Heads and key heads of the teacher, and distributions."""

TARGETS = ("block_sum", "block_max")


def drawn(
    heads: int, kv_heads: int, students: int, tokens: int, blocks: int, block: int, seed: int = 0
) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed)
    shapes = ((2, heads, tokens, 16), (2, kv_heads, blocks * block, 16), (2, students, tokens, 8), (2, 1, blocks, 8))
    return [torch.randn(shape, generator=rng) for shape in shapes]


def target_of(
    target: str, q: Tensor, k: Tensor, allowed: Tensor, groups: int, block: int, rest: Tensor | None
) -> Tensor:
    """``[B, groups, Nq, blocks]`` in float64: a group's mean attention to the keys of each allowed block, as one."""
    logits = q.double() @ k.double().repeat_interleave(q.shape[1] // k.shape[1], 1).mT * q.shape[-1] ** -0.5
    logits = logits.masked_fill(~allowed.repeat_interleave(block, -1), -torch.inf)
    if rest is not None:
        logits = torch.cat((logits, rest.double()[..., None]), -1)
    p = logits.softmax(-1).nan_to_num(0.0)[..., : k.shape[2]]
    p = p.unflatten(1, (groups, -1)).mean(2).unflatten(-1, (-1, block))
    p = p.sum(-1) if target == "block_sum" else p.amax(-1)
    return p / p.sum(-1, keepdim=True).clamp(min=1e-300)


def materialised(target: Tensor, scores: Tensor, allowed: Tensor, reduction: str) -> Tensor:
    live = allowed.any(-1).expand(target.shape[:3])
    log_q = scores.masked_fill(~allowed, -torch.inf).log_softmax(-1)
    rows = torch.where(target > 0, target * (target.clamp(min=1e-300).log() - log_q), 0.0).sum(-1)
    rows = torch.where(live, rows, 0.0)
    return rows if reduction == "none" else rows.sum() / (live.sum() if reduction == "mean" else 1)


def compared(ours: Tensor, expected: Tensor, leaves: list[Tensor], wide: list[Tensor], atol: float) -> None:
    upstream = torch.linspace(0.5, 1.5, ours.numel(), dtype=torch.float64).view(ours.shape)
    torch.testing.assert_close(ours.double(), expected, rtol=atol, atol=atol)
    got = torch.autograd.grad(ours, leaves, upstream.to(ours.dtype))
    for x, y in zip(got, torch.autograd.grad(expected, wide, upstream, retain_graph=True), strict=True):
        torch.testing.assert_close(x.double(), y, rtol=0, atol=atol * max(1.0, float(y.abs().max())))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("rest", [False, True], ids=["", "rest"])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS.keys())
@pytest.mark.parametrize("target", TARGETS)
def test_it_is_the_sum_or_maximum_over_each_block_of_the_attention_written_out(target, heads, rest, reduction) -> None:
    """In float64: complete blocks, tails and sinks in the denominator."""
    block, tokens, blocks = 3, 17, 5
    q, k, student_q, student_k = (x.double() for x in drawn(*heads, tokens, blocks, block))
    leaves = [x.requires_grad_() for x in (student_q, student_k)]
    outside = q.new_ones(2, heads[0], tokens).cumsum(-1) * 0.2 if rest else None
    allowed = (torch.arange(blocks) + 1) * block <= torch.arange(tokens)[:, None] + 1
    scores = leaves[0] @ leaves[1].mT * 8**-0.5
    wanted = target_of(target, q, k, allowed, heads[2], block, outside)
    expected = materialised(wanted, scores, allowed, reduction)
    options: dict[str, Any] = {"causal": True, "key_span": block, "target": target, "teacher_rest": outside}
    for backend in ("tiled", "reference"):
        ours = attention_kl(q, k, *leaves, **options, reduction=reduction, backend=backend)
        compared(ours, expected, leaves, leaves, 1e-12)


@pytest.mark.parametrize("target", TARGETS)
def test_random_problem(fuzz_seed: int, backend: str, target: str) -> None:
    check_random(fuzz_seed, backend, target)


def check_random(fuzz_seed: int, backend: str, target: str) -> None:
    """A problem of head means or of an indexer, with an LSE or without, with selected blocks or all."""
    rng = random.Random(f"blocks {fuzz_seed}")
    most = 3 if backend == "triton" else 6  # the interpreter takes its time
    block, blocks, kv_heads = rng.choice((2, 3, 4, 8)), rng.randint(1, most), rng.choice((1, 2))
    tokens = block * blocks + rng.randint(0, block - 1) if rng.random() < 0.6 else rng.randint(1, 4 * most)
    students = 1 if rng.random() < 0.6 else 2
    heads = 2 * rng.choice((1, 2)) * kv_heads
    q, k, student_q, student_k = drawn(heads, kv_heads, students, tokens, blocks, block, fuzz_seed)
    causal, reduction = rng.random() < 0.7, rng.choice(("mean", "sum", "none"))
    seen = (torch.arange(tokens)[:, None] + 1) // block + blocks - tokens // block if causal else blocks
    allowed = (torch.arange(blocks) < seen).expand(2, 1, tokens, blocks)
    options: dict[str, Any] = {"causal": causal, "target": target, "reduction": reduction, "backend": backend}
    options["key_span"] = block if causal else 1
    if rng.random() < 0.3:
        topk = torch.rand(2, tokens, blocks, generator=torch.Generator().manual_seed(fuzz_seed)).argsort(-1)
        topk = topk[..., : rng.randint(1, blocks)]
        allowed = allowed & torch.zeros(2, tokens, blocks).scatter(-1, topk, 1.0).bool()[:, None]
        options["topk_indices"] = topk
    rest = None
    if rng.random() < 0.4:
        rest = options["teacher_rest"] = torch.randn(2, heads, tokens, generator=torch.Generator().manual_seed(1))
    if target == "block_sum" and rng.random() < 0.5:
        logits = q.double() @ k.double().repeat_interleave(heads // kv_heads, 1).mT / 4
        logits = logits.masked_fill(~allowed.repeat_interleave(block, -1), -torch.inf)
        options["teacher_lse"] = logits.logsumexp(-1).float()
    indexer = students > 1 and rng.random() < 0.7
    leaves = [x.requires_grad_() for x in (student_q, student_k[:, 0] if indexer else student_k)]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    scores = wide[0] @ (wide[1][:, None] if indexer else wide[1]).mT * 8**-0.5
    scores = scores.relu().sum(1, keepdim=True) if indexer else scores
    wanted = target_of(target, q, k, allowed, scores.shape[1], block, rest)
    expected = materialised(wanted, scores, allowed, reduction)
    ours = (indexer_kl if indexer else attention_kl)(q, k, *leaves, **options)
    compared(ours, expected, leaves, wide, 2e-5)


def test_blocks_of_one_key_are_tokens(backend) -> None:
    q, k, student_q, student_k = drawn(4, 2, 2, 12, 12, 1)
    summed, largest, tokens = (
        attention_kl(q, k, student_q, student_k, causal=True, target=target, backend=backend)
        for target in ("block_sum", "block_max", "token")
    )
    assert torch.equal(summed, tokens)
    torch.testing.assert_close(largest, tokens, rtol=1e-6, atol=0)


@pytest.mark.parametrize("target", TARGETS)
def test_packed_blocks_are_those_of_their_sequences(backend, target: str) -> None:
    q, k, student_q, student_k = drawn(4, 2, 1, 11, 3, 3)
    options: dict[str, Any] = {"causal": True, "key_span": 3, "target": target, "reduction": "none"}
    cu_q, cu_k, alone = torch.tensor([0, 4, 11]), torch.tensor([0, 1, 3]), []
    packed = [x[0].transpose(0, 1) for x in (q, k, student_q, student_k)]
    ours = attention_kl(*packed, **options, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, backend=backend)
    for n in range(2):
        rows, blocks = slice(cu_q[n], cu_q[n + 1]), slice(cu_k[n], cu_k[n + 1])
        keys = slice(3 * int(cu_k[n]), 3 * int(cu_k[n + 1]))
        part = (q[:1, :, rows], k[:1, :, keys], student_q[:1, :, rows], student_k[:1, :, blocks])
        alone.append(attention_kl(*part, **options, backend=backend)[0])
    torch.testing.assert_close(ours, torch.cat(alone, 1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"target": "block_mean"}, "target must be one of 'token', 'block_sum', 'block_max': got 'block_mean'"),
        ({"target": "block_max", "teacher_lse": torch.zeros(2, 4, 12)}, "teacher_lse is not taken with .*'block_max'"),
        ({"teacher_k": torch.zeros(2, 2, 0, 16)}, "a whole number of teacher_k per student_k: got 0 and 4"),
        ({"teacher_k": torch.zeros(2, 2, 13, 16)}, "a whole number of teacher_k per student_k: got 13 and 4"),
        ({"target": "token"}, "teacher_k and student_k must have the same tokens: got 12 and 4"),
        ({"divergence": "reverse", "student_q": torch.zeros(2, 4, 12, 8)}, "'reverse' is defined for target='token'"),
        ({"teacher_q": torch.zeros(2, 4, 12, 16, requires_grad=True), "student_q": torch.zeros(2, 4, 12, 8)},
         "gradients to the teacher exist for target='token'"),
        ({"key_padding_mask": torch.ones(2, 12) > 0}, "as many queries as keys: got 12 and 4"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(changed: dict[str, Any], message: str) -> None:
    names = ("teacher_q", "teacher_k", "student_q", "student_k")
    call = {**dict(zip(names, drawn(4, 2, 2, 12, 4, 3), strict=True)), "target": "block_sum", **changed}
    with pytest.raises(ValueError, match=message):
        attention_kl(**call)


def test_the_memory_of_a_maximum_over_blocks_does_not_grow_with_queries_times_keys() -> None:
    """Four times the tokens make sixteen times the pairs, and four times the memory."""
    peaks = []
    for tokens in (128, 512):
        q, k, student_q, student_k = drawn(2, 1, 1, tokens, tokens // 4, 4)
        student_q.requires_grad_()
        call = partial(attention_kl, q[:1], k[:1], student_q[:1], student_k[:1], causal=True, key_span=4)
        peaks.append(counted_peak(lambda call=call: call(target="block_max").backward()))
    assert peaks[1] < 5 * peaks[0]


@pytest.mark.parametrize("target", TARGETS)
def test_minus_infinity_at_one_place_of_every_block_makes_nan_and_elsewhere_is_no_attention(backend, target) -> None:
    q, k, student_q, student_k = drawn(2, 1, 1, 17, 5, 3)
    q[..., 0] = q[..., 0].abs() + 0.1
    k[:, :, 4, 0] = -torch.inf  # the second key of the second block
    allowed = (torch.arange(5) + 1) * 3 <= torch.arange(17)[:, None] + 1
    wanted = target_of(target, q, k, allowed, 1, 3, None)
    scores = student_q.double() @ student_k.double().mT * 8**-0.5
    options: dict[str, Any] = {"causal": True, "key_span": 3, "target": target, "reduction": "none"}
    rows = attention_kl(q, k, student_q, student_k, **options, backend=backend)
    torch.testing.assert_close(rows.double(), materialised(wanted, scores, allowed, "none"), rtol=0, atol=1e-5)
    k[:, :, 1, 0] = -torch.inf
    rows = attention_kl(q, k, student_q, student_k, **options, backend=backend)
    assert torch.equal(rows.isnan(), ((torch.arange(17) >= 2) & (torch.arange(17) < 8)).expand_as(rows))
