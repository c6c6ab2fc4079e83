"""Seeded random problems over the whole contract; ``make fuzz`` runs 2,000 of them."""

import random

import pytest
import torch

from streamkl.engines import tiled
from streamkl.testing import check_accuracy, random_case
from streamkl.testing.problems import DTYPES


def test_random_problem(fuzz_seed: int, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(fuzz_seed)
    monkeypatch.setattr(tiled, "BLOCK_Q", rng.choice((8, 16, 32)))
    monkeypatch.setattr(tiled, "BLOCK_K", rng.choice((8, 16, 64)))
    case = random_case(fuzz_seed, dtypes=tuple(d for d in DTYPES if backend != "cpu" or d != torch.float64))
    errors = check_accuracy(case, backend)
    assert errors.worst <= 1, f"{errors}; {case}"
