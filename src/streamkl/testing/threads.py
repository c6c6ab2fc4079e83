"""Runs calls in several threads at once, and compares each result with that of a single thread, bit for bit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor


def in_threads(run: Callable[[int], Tensor], inputs: int, threads: int, calls: int, torch_threads: int = 1) -> None:
    """Calls ``run(n)`` from several threads and compares each result with that of a call alone, bit for bit.

    How work is divided over torch's own threads may change last bits, so all calls use the same number of them.

    Args:
        run: Takes the number of an input.
        inputs: How many inputs there are; each thread takes them in an order of its own.
        threads: How many threads call at once.
        calls: How many calls each of them makes.
        torch_threads: How many of torch's threads each call has.

    Raises:
        AssertionError: Some results differ, or some calls raised; the message counts them.
    """
    together = threading.Barrier(threads)

    def work(thread: int, wanted: list[Tensor]) -> list[str]:
        together.wait()
        wrong = []
        for call in range(calls):
            n = (3 * thread + call) % inputs
            try:
                if not torch.equal(run(n), wanted[n]):
                    wrong.append("other bits")
            except Exception as error:  # a mixed-up call may raise anything
                wrong.append(f"{type(error).__name__}: {error}")
        return wrong

    before = torch.get_num_threads()
    torch.set_num_threads(torch_threads)  # new threads take it over
    try:
        with ThreadPoolExecutor(1) as alone, ThreadPoolExecutor(threads) as pool:
            wanted = list(alone.map(run, range(inputs)))
            found = [wrong for part in pool.map(work, range(threads), [wanted] * threads) for wrong in part]
    finally:
        torch.set_num_threads(before)
    assert not found, f"{len(found)} of {threads * calls} calls went wrong, as with {found[0]}"
