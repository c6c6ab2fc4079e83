"""``benchmarks/beside_commit.py``: both checkouts run, and a commit reads cells that later ones have more fields of."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from streamkl.bench.cells import Cell
from streamkl.bench.suites import SUITES

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "beside_commit.py"


@pytest.mark.slow
def test_a_commit_runs_beside_the_checkout() -> None:
    if subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True).returncode:
        pytest.skip("no repository")
    command = [sys.executable, str(SCRIPT), "HEAD", "forward", "--quick", "--seconds", "0.01", "--threads", "1"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-3000:]
    cells = SUITES["forward"].quick().cells  # beside a header of two lines
    assert result.stdout.count("\n| ") == 2 + len(cells)
    assert "forward: " in result.stdout
    assert "x before, " in result.stdout


def test_a_cell_is_told_without_what_has_its_default() -> None:
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        from beside_commit import portable
    finally:
        sys.path.pop(0)
    cell = Cell.square(2, 64, 16, mask="full")
    assert set(portable(cell)) == {"tokens", "heads", "dims", "mask"}
    assert Cell.of_dict(portable(cell)) == cell
