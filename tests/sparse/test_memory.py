"""Memory of a selection, counted at the allocator: the answer, and little beside it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HOOK = Path(__file__).parent.parent / "engines" / "allocations.c"
TOPK = 64


@pytest.fixture(scope="module")
def hook(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if sys.platform != "linux" or compiler is None:
        pytest.skip("the allocator hook needs Linux and a C compiler")
    library = tmp_path_factory.mktemp("hook") / "allocations.so"
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, HOOK], check=True)
    return library


@pytest.mark.slow
@pytest.mark.parametrize("query_block", [1, 64])
@pytest.mark.parametrize("kind", ["index", "oracle"])
def test_a_selection_takes_memory_of_its_answer_and_never_of_all_pairs(kind: str, query_block: int, hook: Path) -> None:
    peaks = {}
    for tokens in (8192, 16384, 32768):
        result = subprocess.run(
            [sys.executable, Path(__file__).parent / "selection_allocations.py", kind, str(tokens), str(TOPK),
             str(query_block), "cpu"],
            env={**os.environ, "LD_PRELOAD": str(hook)}, capture_output=True, text=True, check=True,
        )  # fmt: skip
        found = json.loads(result.stdout)
        assert found["allocations"] > 0, "the hook saw nothing"
        peaks[tokens] = found["peak"]
    print(kind, query_block, peaks)
    for tokens in (16384, 32768):
        assert peaks[tokens] <= 2.1 * peaks[tokens // 2], peaks
    assert peaks[32768] < 32768 * 32768 / 16, "a byte for every pair would be a gigabyte"
