"""The suites have the cells that they claim, and those of real models are what their configurations say."""

from dataclasses import replace

from streamkl.bench.implementations import BASELINES
from streamkl.bench.models import MODELS
from streamkl.bench.suites import QUICK_CELLS, QUICK_TOKENS, SUITES


def test_forward_and_training_cover_the_same_grid() -> None:
    shapes = {(c.tokens, c.heads.teacher, c.dims[0], c.mask) for c in SUITES["forward"].cells}
    expected = {(n, h, d, m) for n, h in ((4096, 8), (16384, 4)) for d in (64, 128) for m in ("causal", "full")}
    assert shapes == expected
    for direction in ("training", "training-both"):
        cells = [c for c in SUITES["training"].cells if c.direction == direction]
        assert {(c.tokens, c.heads.teacher, c.dims[0], c.mask) for c in cells} == expected


def test_streamkl_comes_first_and_every_baseline_is_known() -> None:
    for suite in SUITES.values():
        assert suite.implementations == ("streamkl", *suite.baselines)
        assert set(suite.baselines) <= set(BASELINES)


def test_a_quick_suite_is_small() -> None:
    for suite in SUITES.values():
        cells = suite.quick().cells
        assert 1 <= len(cells) <= QUICK_CELLS
        assert max(cell.tokens for cell in cells) <= QUICK_TOKENS


def test_a_student_head_divides_the_teacher_s() -> None:
    for layout in MODELS.values():
        assert layout.heads % layout.kv_heads == 0
    assert {cell.heads.student for cell in SUITES["models"].cells} == {1} | {m.heads for m in MODELS.values()}


def test_directions_of_a_training_shape_are_measured_in_one_run() -> None:
    cells = SUITES["training"].cells
    assert [cell.direction for cell in cells] == ["training", "training-both"] * (len(cells) // 2)
    assert [replace(cell, direction="training-both") for cell in cells[::2]] == list(cells[1::2])
