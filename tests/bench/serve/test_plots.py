"""The picture of served loads is drawn, with and without times between tokens."""

from pathlib import Path

import pytest

from streamkl.bench.serve.records import DENSE, SPARSE, Row


@pytest.mark.parametrize("itl", [None, 0.1])
def test_it_is_drawn(itl: float | None, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from streamkl.bench.serve import plots

    rows = [Row(kind, tokens, 1.0, (0.9, 1.1), itl, 3.0) for kind in (DENSE, SPARSE) for tokens in (100, 1000)]
    plots.draw(rows, "a model", tmp_path / "a" / "serve.png")
    assert (tmp_path / "a" / "serve.png").stat().st_size > 10_000
