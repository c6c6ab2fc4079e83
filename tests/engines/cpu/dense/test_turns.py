"""Blocks of rows that add to one dK in turn: the same bits and the same memory with any number of threads."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from streamkl import attention_kl
from streamkl.testing import STUDENT, TEACHER, Case, Heads, evaluate, make_case

MASKS = {
    "causal": {"causal": True},
    "none": {},
    "window": {"causal": True, "window": (8, 0)},
    "ahead": {"window": (0, 300)},
    "packed": {"cu_seqlens": ([0, 400, 410, 1100], [0, 500, 500, 1150])},
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("teacher_lse", [False, True], ids=["two_passes", "one_pass"])
def test_gradients_have_the_same_bits_with_any_number_of_threads(teacher_lse: bool, mask: dict) -> None:
    """More threads than key heads, so that several add to the same keys, and more than there are blocks of rows."""
    case = make_case(
        0, heads=Heads(4, 2, 2 if teacher_lse else 4, 1), tokens=(1100, 1150), batch=1, teacher_lse=teacher_lse,
        wanted=STUDENT if teacher_lse else STUDENT + TEACHER, **mask,
    )  # fmt: skip
    before = torch.get_num_threads()
    try:
        alone = gradients(case, 1)
        for threads in (2, 3, 64):
            for name, value in gradients(case, threads).items():
                assert torch.equal(value, alone[name]), f"{name} with {threads} threads"
    finally:
        torch.set_num_threads(before)


def gradients(case: Case, threads: int) -> dict[str, torch.Tensor]:
    torch.set_num_threads(threads)
    return evaluate(
        attention_kl, case.tensors, case, **case.options, teacher_lse=case.teacher_lse, backend="cpu"
    ).gradients  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("path", ["window", "one_pass", "two_passes", "indexer"])
def test_64_threads_have_one_dk_and_scratch_of_their_own(path: str, allocations) -> None:
    """A dK for each would be 134 MB, which is more than all scratch."""
    one, many = (allocations(8193, "float32", path, "cpu", threads=threads) for threads in (1, 64))
    print(f"{path}: {one} with 1 thread, {many} with 64")
    assert many["gradients"] <= one["gradients"]
    assert many["rows"] <= one["rows"]
    assert many["scratch"] <= 64 * 1.1 * one["scratch"]


@pytest.mark.slow
def test_64_threads_on_selected_keys_have_no_more_dks_than_take_as_much_as_the_indices(allocations) -> None:
    one, many = (allocations(8193, "float32", "topk", "cpu", threads=threads) for threads in (1, 64))
    indices, dk = 96 * 8, 64 * 4  # bytes per token
    print(f"{one} with 1 thread, {many} with 64")
    assert many["gradients"] <= one["gradients"] + indices // dk - 1
    assert many["scratch"] <= 64 * 1.1 * one["scratch"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_hundred_thousand_tokens_take_as_much_memory_with_64_threads_as_with_2() -> None:
    """Within 1.3, which is what 64 threads' scratch takes beside the gradients."""
    two, many = (resident(100_000, threads, 8) for threads in (2, 64))
    print(f"{two / 1e6:.0f} MB with 2 threads, {many / 1e6:.0f} MB with 64")
    assert many <= 1.3 * two


def resident(tokens: int, threads: int, window: int) -> int:
    command = [sys.executable, Path(__file__).parent / "resident.py", *map(str, (tokens, threads, window))]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
