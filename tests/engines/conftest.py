"""The allocator hook: what a forward and backward of an engine take from the allocator."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def allocations(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, int]]:
    """A function of tokens, dtype, path and backend that gives a call's peaks.

    The path is ``one_pass``, ``two_passes``, ``window``, ``indexer`` or ``topk``. Peaks are bytes of scratch, number
    of gradients and their accumulators, of row vectors. Those are told by their sizes, which no tile has where
    ``tokens`` is odd.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if sys.platform != "linux" or compiler is None:
        pytest.skip("the allocator hook needs Linux and a C compiler")
    library = tmp_path_factory.mktemp("hook") / "allocations.so"
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, HERE / "allocations.c"], check=True)

    def peaks(
        tokens: int, dtype: str, path: str, backend: str, heads: int = 1, dim: int = 64, threads: int = 2
    ) -> dict[str, int]:
        result = subprocess.run(
            [sys.executable, HERE / "allocations.py", *map(str, (tokens, dtype, path, backend, heads, dim, threads))],
            env={**os.environ, "LD_PRELOAD": str(library)}, capture_output=True, text=True, check=True,
        )  # fmt: skip
        return json.loads(result.stdout)

    return peaks
