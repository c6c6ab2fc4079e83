"""Seeded random problems over the whole contract; ``make fuzz`` runs 2,000 of them."""

import functools

import torch

from streamkl import attention_kl
from streamkl.testing import check_accuracy, random_case
from streamkl.testing.problems import DTYPES


def test_random_problem(fuzz_seed: int, backend: str, random_tiles) -> None:
    deterministic = random_tiles(fuzz_seed, backend)
    # The interpreter takes its time for each program, and little more for a large one.
    sizes = {"max_tokens": 24, "max_heads": 4, "max_batch": 2} if backend == "triton" else {}
    dtypes = tuple(d for d in DTYPES if backend == "tiled" or d != torch.float64)
    case = random_case(fuzz_seed, dtypes=dtypes, **sizes)
    errors = check_accuracy(case, backend, functools.partial(attention_kl, deterministic=deterministic))
    assert errors.worst <= 1, f"{errors}; {case}"
