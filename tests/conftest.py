"""Fixtures and options of all tests: the engines under test, small tiles, and the options that size the fuzz."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores: one thread each, in the processes they start too
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # a plugin may have imported torch before

if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:  # torch's own outlives a run, and a kernel in it its instruction set
    _compiled = tempfile.TemporaryDirectory(prefix="streamkl-inductor-")  # workers inherit it; removed at the end
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = _compiled.name

from streamkl.engines import tiled
from streamkl.engines import triton as triton_engine
from streamkl.engines.triton.configs import architecture
from streamkl.engines.triton.meta import Config

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, which nothing has done yet

pytest_plugins = ["streamkl.testing.nan_poison"]

TOO_OLD = triton_engine.unsupported(torch.device("cpu"))
"""Why kernels cannot be interpreted here: an older torch brings an older Triton, or none."""
ENGINES = ("tiled", "cpu") if TOO_OLD else ("tiled", "cpu", "triton")
LIMITED = {"oracle": ("tiled", "cpu")}
"""By the mark of a test, the engines that do what it asks; without one, all do."""
INTERPRETED_EVERY = {"topk": 30, "attends": 14, "selects": 5, "indexer": 3, "": 3}
"""Of how many seeds Triton's interpreter takes one, by the mark of a test: a query that selects keys is a program."""
INTERPRETED_CASES = 7
"""Of how many parametrised cases of any other test it takes one: prime to 2, 3 and 4, so that all values take part."""
TILE = Config(rows=64, keys=16, warps=1, stages=1, hold=1024, grad=64)
"""A tile of the Triton engine: the interpreter takes as long for a row as for many."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz-seeds", type=int, default=100, help="how many seeded problems the fuzz runs")
    parser.addoption("--fuzz-from", type=int, default=0, help="the first seed of the fuzz")
    parser.addoption("--nightly", action="store_true", help="leave out neither cases of the interpreter nor long tests")
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
    """Leaves out what takes long and differs little: tests marked ``nightly``, and most cases of Triton's interpreter.

    Not with ``--nightly``, nor where a case is named. What the interpreter runs besides the fuzz is slow. The longest
    tests come first.
    """
    for item in items:
        if item.get_closest_marker("nightly") or (_is_interpreted(item) and "fuzz_seed" not in _drawn(item)):
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: item.get_closest_marker("longest") is None)
    if config.getoption("--nightly") or any("[" in argument for argument in config.args):
        return
    kept, left_out, cases = [], [], Counter[str]()
    for item in items:
        is_left_out = item.get_closest_marker("nightly") is not None
        if _is_interpreted(item):
            test, seed = item.nodeid.partition("[")[0], _drawn(item).get("fuzz_seed")
            every = next(n for mark, n in INTERPRETED_EVERY.items() if not mark or item.get_closest_marker(mark))
            number, every = (cases[test], INTERPRETED_CASES) if seed is None else (seed, every)
            is_left_out = is_left_out or number % every != 0
            cases[test] += 1
        (left_out if is_left_out else kept).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


def _drawn(item: pytest.Item) -> dict[str, Any]:
    """What a test is parametrised with."""
    return item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}


def _is_interpreted(item: pytest.Item) -> bool:
    return _drawn(item).get("backend") == "triton" or item.get_closest_marker("interpreted") is not None


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles so small that a small problem has many of them, ragged and masked ones among them."""
    monkeypatch.setattr(tiled, "BLOCK_Q", 16)
    monkeypatch.setattr(tiled, "BLOCK_K", 24)
    monkeypatch.setattr(architecture, "INTERPRETED", TILE)


@pytest.fixture(autouse=True, scope="session")
def _interpreter_patched_once() -> Iterator[None]:
    """Triton's interpreter patches its language at each call; once a launch is enough, and a third faster.

    It reduces by XOR, as every step of a sort does, one element at a time; numpy does so for a whole array.
    """
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

    reduce = interpreter.ReduceOps.apply_impl

    def reduce_by_xor(self: Any, given: Any) -> Any:
        if self.combine_fn is not interpreter.tl.standard._xor_combine:
            return reduce(self, given)
        reduced = interpreter.np.bitwise_xor.reduce(given[0].handle.data, axis=self.axis, keepdims=self.keep_dims)
        return self.to_tensor(reduced, given[0].dtype)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(interpreter, "_patch_lang", patch_once)
        monkeypatch.setattr(interpreter.ReduceOps, "apply_impl", reduce_by_xor)
        yield
