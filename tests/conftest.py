"""What all tests share: the engines under test, small tiles, and the options that size the fuzz."""

from __future__ import annotations

import os

import pytest
import torch

from streamkl.engines import tiled

pytest_plugins = ["streamkl.testing.nan_poison"]

ENGINES = ("tiled", "cpu")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz-seeds", type=int, default=300, help="how many seeded problems the fuzz runs")
    parser.addoption("--fuzz-from", type=int, default=0, help="the first seed of the fuzz")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", ENGINES)
    if "fuzz_seed" in metafunc.fixturenames:
        first, count = metafunc.config.getoption("--fuzz-from"), metafunc.config.getoption("--fuzz-seeds")
        metafunc.parametrize("fuzz_seed", range(first, first + count))


@pytest.fixture(autouse=True, scope="session")
def _one_thread_a_worker() -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles so small that a small problem has many of them, ragged and masked ones among them."""
    monkeypatch.setattr(tiled, "BLOCK_Q", 16)
    monkeypatch.setattr(tiled, "BLOCK_K", 24)
