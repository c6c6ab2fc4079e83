"""Two and four ranks over gloo, each started once for all tests of them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

WORKER = Path(__file__).parent.parent / "workers" / "context_parallel.py"
SEEDS = 24


@pytest.fixture(scope="session", params=[2, 4], ids=lambda ranks: f"{ranks}_ranks")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the ranks found, by what was asked; ``ranks`` is how many there are."""
    seeds = 300 if request.config.getoption("--nightly") else SEEDS
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base  # what one worker finds is there for all
    to = base / f"{request.param}_ranks.json"
    with FileLock(f"{to}.lock"):
        if not to.exists():
            run(request.param, to, seeds)
    return {"ranks": request.param, "seeds": seeds, **json.loads(to.read_text())}


def run(ranks: int, to: Path, seeds: int) -> None:
    """Runs the worker on so many ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    result = subprocess.run(
        [*command, str(WORKER), str(to), str(seeds)],
        capture_output=True,
        text=True,
        timeout=3600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr[-5000:]
