"""Memory is that of the call, and of no other process."""

from pathlib import Path

import pytest
import torch

from streamkl.bench import isolated
from streamkl.bench.cells import Cell

CPU = torch.device("cpu")


@pytest.mark.slow
def test_eager_adds_its_matrices_and_ours_does_not() -> None:
    cell = Cell.square(1, 2048, 16, dtype="float32", direction="training")
    hold = torch.ones(1 << 28)  # 1 GB that a child must not inherit into its peak
    eager = isolated.run(cell, "eager", "auto", CPU, 1)
    ours = isolated.run(cell, "streamkl", "tiled", CPU, 1)
    matrix = 4 * 2048**2
    assert 3 * matrix < eager.extra_bytes < 12 * matrix
    assert ours.extra_bytes < 2 * matrix
    assert eager.extra_bytes < eager.resident_bytes < hold.nbytes
    assert ours.loss == pytest.approx(eager.loss, rel=1e-5)
    assert ours.seconds > 0


def test_a_child_that_fails_is_quoted() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)streamkl failed on 16 tokens.*engines.nonsense"):
        isolated.run(Cell.square(1, 16, 16), "streamkl", "nonsense", CPU, 1)


def test_a_child_has_the_threads_of_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "counts_threads.py").write_text("import torch\nprint(torch.get_num_threads())\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            assert isolated.extra_bytes("counts_threads", {}) == threads
    finally:
        torch.set_num_threads(before)
