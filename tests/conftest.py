"""Fixtures and options of all tests: the engines under test, small tiles, and the options that size the fuzz."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores: one thread each, in the processes they start too
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from streamkl.engines import tiled
from streamkl.engines.triton import architecture
from streamkl.engines.triton.meta import Config

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, which nothing has done yet

pytest_plugins = ["streamkl.testing.nan_poison"]

ENGINES = ("tiled", "cpu", "triton")
LIMITED = {"sparse": ("tiled", "cpu")}
"""By the mark of a test, the engines that do what it asks; without one, all do."""
INTERPRETED_EVERY = {"topk": 30, "attends": 30, "indexer": 3, "": 2}
"""Triton's interpreter takes one of so many seeds, by the mark of a test: with topk each query is a program."""
TILE = Config(rows=64, keys=16, warps=1, stages=1, hold=1024, grad=64)
"""A tile of the Triton engine: the interpreter takes as long for a row as for many."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz-seeds", type=int, default=300, help="how many seeded problems the fuzz runs")
    parser.addoption("--fuzz-from", type=int, default=0, help="the first seed of the fuzz")
    parser.addoption("--every-seed", action="store_true", help="the fuzz leaves out no seed in Triton's interpreter")
    parser.addoption("--needles", type=int, default=2, help="how many numbers a real model looks for in prose")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        limits = [engines for mark, engines in LIMITED.items() if metafunc.definition.get_closest_marker(mark)]
        metafunc.parametrize("backend", [name for name in ENGINES if all(name in engines for engines in limits)])
    if "fuzz_seed" in metafunc.fixturenames:
        first, count = metafunc.config.getoption("--fuzz-from"), metafunc.config.getoption("--fuzz-seeds")
        metafunc.parametrize("fuzz_seed", range(first, first + count))


@pytest.hookimpl(tryfirst=True)  # before `-m` reads the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what the interpreter takes long for: half of the seeds, and most of those of selected keys.

    What it runs besides the fuzz is slow.
    """
    for item in items:
        drawn = _drawn(item)
        if drawn.get("backend") == "triton" and "fuzz_seed" not in drawn:
            item.add_marker(pytest.mark.slow)
    if config.getoption("--every-seed"):
        return
    left_out = [item for item in items if _is_left_out(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not _is_left_out(item)]


def _drawn(item: pytest.Item) -> dict[str, Any]:
    """What a test is parametrised with."""
    return item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}


def _is_left_out(item: pytest.Item) -> bool:
    drawn = _drawn(item)
    if drawn.get("backend") != "triton" or "fuzz_seed" not in drawn:
        return False
    every = next(n for mark, n in INTERPRETED_EVERY.items() if not mark or item.get_closest_marker(mark))
    return drawn["fuzz_seed"] % every != 0


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles so small that a small problem has many of them, ragged and masked ones among them."""
    monkeypatch.setattr(tiled, "BLOCK_Q", 16)
    monkeypatch.setattr(tiled, "BLOCK_K", 24)
    monkeypatch.setattr(architecture, "INTERPRETED", TILE)


@pytest.fixture(autouse=True, scope="session")
def _interpreter_patched_once() -> Iterator[None]:
    """Triton's interpreter patches its language at each call; once a launch is enough, and a third faster."""
    if importlib.util.find_spec("triton") is None:
        yield
        return
    from triton.runtime import interpreter

    patch_lang, active = interpreter._patch_lang, {}

    def restore() -> None:
        for scope in reversed(active.values()):
            scope.restore()
        active.clear()

    def patch_once(fn: Any) -> Any:
        outermost, module = not active, fn.__module__  # the modules that a function sees are its own module's
        if module not in active:
            active[module] = patch_lang(fn)
        return SimpleNamespace(restore=restore if outermost else lambda: None)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(interpreter, "_patch_lang", patch_once)
        yield
