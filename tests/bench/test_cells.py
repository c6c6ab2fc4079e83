"""A cell: what it is called, what it survives, what is drawn for it."""

import pytest
import torch

from streamkl.bench.cells import Cell, draw_inputs
from streamkl.testing import Heads

MIXTURE = Cell(4096, Heads(32, 8, 1, 1), (128, 64), direction="training", label="Qwen3-8B")


def test_a_cell_says_what_it_is() -> None:
    assert str(Cell.square(8, 16384, 64, mask="full")) == "16,384 tokens, 8x64, full, bfloat16, forward"
    assert str(MIXTURE) == "4,096 tokens, Qwen3-8B 32/8x128 to 1x64, causal, bfloat16, training"


def test_a_cell_survives_json() -> None:
    assert Cell.of_dict(MIXTURE.to_dict()) == MIXTURE


def test_shapes_are_read_or_refused() -> None:
    assert Cell.of_shape("2x8x4096x128") == Cell.square(8, 4096, 128, batch=2)
    for wrong in ("8x4096x128", "1x8x0x64", "1x8xNx64"):
        with pytest.raises(ValueError, match=f"such as 1x8x4096x128, not '{wrong}'"):
            Cell.of_shape(wrong)


def test_pairs_are_those_that_the_mask_allows() -> None:
    assert Cell.square(1, 5, 8, mask="full", batch=2).pairs == 50
    assert Cell.square(1, 5, 8).pairs == int(torch.ones(5, 5).tril().sum())
    assert Cell.square(1, 9, 8, key_span=4).pairs == 4 * 1 + 2 * 2
    assert Cell.square(1, 5, 8, topk=2).pairs == 1 + 4 * 2


def test_inputs_have_the_cell_s_layout_and_want_its_gradients() -> None:
    inputs = draw_inputs(MIXTURE.shortened(16), "cpu")
    assert {name: list(x.shape) for name, x in inputs.items()} == {
        "teacher_q": [1, 32, 16, 128],
        "teacher_k": [1, 8, 16, 128],
        "student_q": [1, 1, 16, 64],
        "student_k": [1, 1, 16, 64],
    }
    assert [name for name, x in inputs.items() if x.requires_grad] == ["student_q", "student_k"]
    assert {x.dtype for x in inputs.values()} == {torch.bfloat16}
