"""The build: cached, safe for processes that start together, and clear when it cannot be done."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CALL = """
import torch, streamkl
from streamkl import engines
q = torch.randn(1, 2, 50, 16)
loss = streamkl.attention_kl(q, q, q * 0.5, q, backend={backend!r})
print(engines.choose("auto", q.device).engine.name, round(loss.item(), 4))
"""


def start(backend: str, **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", CALL.format(backend=backend)], env={**os.environ, **environment}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


@pytest.mark.slow
def test_two_processes_that_start_together_share_one_build(tmp_path: Path) -> None:
    processes = [start("cpu", STREAMKL_CACHE=str(tmp_path)) for _ in range(2)]
    outputs = [process.communicate(timeout=900) for process in processes]
    assert all(process.returncode == 0 for process in processes), outputs
    assert all(stdout.startswith("cpu ") for stdout, _ in outputs)
    assert len(list(tmp_path.glob("*.so"))) == 1, "one library, and no temporary left"
    assert sum("building the CPU engine" in stderr for _, stderr in outputs) == 1
    library = next(tmp_path.glob("*.so")).read_bytes()
    assert b"GOMP_parallel" in library, "without OpenMP at::parallel_for runs on one thread, without a word"


def test_without_a_compiler_auto_takes_tiled_and_the_named_engine_says_what_is_missing(tmp_path: Path) -> None:
    environment = {"STREAMKL_CACHE": str(tmp_path), "CXX": "/nonexistent/c++"}
    auto, named = start("auto", **environment), start("cpu", **environment)
    assert auto.communicate(timeout=600)[0].startswith("tiled ")
    assert "no C++ compiler was found" in named.communicate(timeout=600)[1]
    assert named.returncode != 0


def test_a_compiler_that_fails_is_quoted(tmp_path: Path) -> None:
    process = start("cpu", STREAMKL_CACHE=str(tmp_path), CXX="/bin/false")
    assert "the compiler failed: /bin/false" in process.communicate(timeout=600)[1]
    assert list(tmp_path.glob("*.so")) == []


def test_build_command_prints_where_the_library_is() -> None:
    result = subprocess.run([sys.executable, "-m", "streamkl", "build"], capture_output=True, text=True, timeout=900)
    assert Path(result.stdout.strip()).exists(), result.stderr
