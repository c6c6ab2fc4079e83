"""Calls of several threads at once give the same bits as each alone."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch

import streamkl
from streamkl.testing import INDEX, STUDENT, TEACHER, Case, Heads, IndexerHeads, evaluate, make_case, make_indexer_case
from streamkl.testing.threads import in_threads

HALF = (torch.bfloat16, torch.bfloat16)
LENGTHS = (50, 7, 131, 33, 90, 1, 64, 270)  # of several blocks of the CPU engine, the last
KINDS = (
    {"heads": Heads(4, 2, 4, 2), "wanted": STUDENT + TEACHER, "causal": True},
    {"heads": Heads(4, 2, 4, 2), "teacher_lse": True, "causal": True, "dtypes": HALF},
    {"heads": Heads(8, 2, 2, 1), "window": (20, 0)},
    {"heads": Heads(4, 2, 1, 1), "reduction": "none", "dtypes": HALF},
)


def attention_cases() -> list[Case]:
    """Per head and head means, each path to the gradients, of mixed lengths."""
    return [make_case(n, batch=1, tokens=(length, length), **KINDS[n % len(KINDS)]) for n, length in enumerate(LENGTHS)]


def indexer_cases() -> list[Case]:
    """Several index heads, over all keys and over a top-k, of mixed lengths."""

    def nearest(length: int) -> torch.Tensor:
        keys = torch.arange(length)[:, None] - torch.arange(8)
        return keys.clamp(min=-1).int()[None]

    return [
        make_indexer_case(
            n, batch=1, heads=IndexerHeads(4, 2, 3), tokens=(length, length), causal=True, wanted=INDEX,
            **({"topk_indices": nearest(length)} if n % 2 else {}),
        )
        for n, length in enumerate(LENGTHS)
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("cases", [attention_cases, indexer_cases], ids=["attention_kl", "indexer_kl"])
@pytest.mark.parametrize(
    ("engine", "torch_threads", "calls"),
    [
        ("tiled", 1, 3),
        ("cpu", 1, 12),
        ("cpu", 2, 12),
        pytest.param("tiled", 1, 25, marks=pytest.mark.nightly),
        pytest.param("cpu", 1, 200, marks=pytest.mark.nightly),
        pytest.param("cpu", 2, 200, marks=pytest.mark.nightly),
    ],
)
def test_eight_threads_have_the_loss_and_the_gradients_that_each_call_has_alone(
    engine, torch_threads, calls, cases
) -> None:
    drawn = cases()

    def run(n: int) -> torch.Tensor:
        case = drawn[n]
        function = getattr(streamkl, case.function)
        found = evaluate(
            function, case.tensors, case, teacher_lse=case.teacher_lse, backend=engine, **case.options
        ).named()
        return torch.cat([value.flatten().float() for value in found.values()])

    in_threads(run, len(drawn), threads=8, calls=calls, torch_threads=torch_threads)


def test_the_first_calls_of_a_process_may_come_from_several_threads() -> None:
    script = """
        import torch
        from concurrent.futures import ThreadPoolExecutor
        from streamkl import attention_kl

        q = torch.randn(1, 2, 70, 16)

        def run(n):
            student = (q + n).requires_grad_()
            attention_kl(q, q, student, q, causal=True).backward()
            return student.grad

        with ThreadPoolExecutor(8) as pool:
            first = list(pool.map(run, [1] * 8))
        assert all(torch.equal(x, first[0]) for x in first)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=300)
