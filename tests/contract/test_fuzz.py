"""Seeded random problems over the whole contract; ``make fuzz`` runs 2,000 of them."""

import functools
import random

import pytest
import torch

from streamkl import attention_kl
from streamkl.engines import tiled
from streamkl.engines.triton import architecture
from streamkl.engines.triton.meta import Config
from streamkl.testing import check_accuracy, random_case
from streamkl.testing.problems import DTYPES


def test_random_problem(fuzz_seed: int, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(fuzz_seed)
    deterministic, sizes = None, {}
    if backend == "triton":
        monkeypatch.setattr(architecture, "INTERPRETED", random_config(rng))
        monkeypatch.setattr(architecture, "INTERPRETED_PROCESSORS", rng.choice((1, 1, 16)))  # 16 split the keys
        monkeypatch.setattr(architecture, "TILES_A_SHARE", 1)
        # The interpreter takes its time for each program, and little more for a large one.
        deterministic, sizes = rng.random() < 0.5, {"max_tokens": 24, "max_heads": 4, "max_batch": 2}
    monkeypatch.setattr(tiled, "BLOCK_Q", rng.choice((8, 16, 32)))
    monkeypatch.setattr(tiled, "BLOCK_K", rng.choice((8, 16, 64)))
    dtypes = tuple(d for d in DTYPES if backend == "tiled" or d != torch.float64)
    case = random_case(fuzz_seed, dtypes=dtypes, **sizes)
    errors = check_accuracy(case, backend, functools.partial(attention_kl, deterministic=deterministic))
    assert errors.worst <= 1, f"{errors}; {case}"


def random_config(rng: random.Random) -> Config:
    """Tiles of any shape; wide heads held, or read in chunks with gradients made in pieces."""
    return Config(
        rows=rng.choice((16, 32, 64)), keys=rng.choice((8, 16, 32)), warps=1, stages=1,
        hold=rng.choice((128, 1024)), chunk=rng.choice((64, 128)), grad=rng.choice((64, 128)),
    )  # fmt: skip
