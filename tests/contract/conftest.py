"""Tests of the contract: what every engine promises, whatever it is. ``docs/contract.md`` lists them."""

import random
from collections.abc import Callable

import pytest

from streamkl.engines import tiled
from streamkl.engines.triton.configs import architecture
from streamkl.engines.triton.meta import Config


@pytest.fixture(autouse=True)
def _hostile_memory(nan_poison: None, small_tiles: None) -> None:
    """Fresh memory is nan, and problems have many tiles."""


@pytest.fixture
def random_tiles(monkeypatch: pytest.MonkeyPatch) -> Callable[..., bool | None]:
    """Cuts the problem of a seed for an engine; returns whether to ask for determinism, or ``None`` not to say.

    Problems that select ``few_keys`` have tiles of fewer keys.
    """

    def cut(seed: int, backend: str, few_keys: bool = False) -> bool | None:
        rng, deterministic = random.Random(seed), None
        if backend == "triton":
            config = random_config(rng)
            monkeypatch.setattr(architecture, "INTERPRETED", config._replace(keys=4) if few_keys else config)
            monkeypatch.setattr(architecture, "INTERPRETED_PROCESSORS", rng.choice((1, 1, 16)))  # 16 split the keys
            monkeypatch.setattr(architecture, "TILES_PER_SPLIT", 1)
            deterministic = rng.random() < 0.5
        monkeypatch.setattr(tiled, "BLOCK_Q", rng.choice((8, 16, 32)))
        monkeypatch.setattr(tiled, "BLOCK_K", rng.choice((8, 16, 64)))
        return deterministic

    return cut


def random_config(rng: random.Random) -> Config:
    """Tiles of any shape; wide heads held, or read in chunks with gradients made in pieces."""
    return Config(
        rows=rng.choice((16, 32, 64)), keys=rng.choice((8, 16, 32)), warps=1, stages=1,
        hold=rng.choice((128, 1024)), chunk=rng.choice((64, 128)), grad=rng.choice((64, 128)),
    )  # fmt: skip
