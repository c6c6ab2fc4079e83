"""Two real processes over gloo: DTensor rules by batch and heads; FSDP2 around a loss, and around a sparse model."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

WORKERS = Path(__file__).parent / "workers"


@pytest.mark.slow
@pytest.mark.parametrize("worker", ["dtensor", "fsdp", "fsdp_sparse"])
def test_two_ranks_equal_one(worker: str) -> None:
    if worker.startswith("fsdp") and not hasattr(torch.cpu.Stream, "record_event"):
        pytest.skip("FSDP2 of this torch does not run on CPUs")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    result = subprocess.run(
        [*command, str(WORKERS / f"{worker}.py")],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr[-5000:]
    assert result.stdout.count("equal") == 2
