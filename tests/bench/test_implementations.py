"""Which implementation can run what, and that the timed call computes what its name says."""

from dataclasses import replace

import pytest
import torch

from streamkl.bench.cells import Cell, draw_inputs
from streamkl.bench.implementations import LOSS_BASELINES, SUMMARIES, engine_name, prepare, refusal, row_losses
from streamkl.testing import Heads

CPU = torch.device("cpu")
FORWARD = Cell.square(2, 130, 32, dtype="float32")
TRAINING = Cell.square(2, 130, 32, dtype="float32", direction="training")
PLENTY = 1 << 40


@pytest.mark.parametrize("name", [name for name in LOSS_BASELINES if name != "compiled"])
def test_all_losses_agree(name: str) -> None:
    inputs = draw_inputs(FORWARD, CPU)
    ours = prepare("streamkl", FORWARD, inputs)()
    torch.testing.assert_close(prepare(name, FORWARD, inputs)(), ours, rtol=1e-5, atol=1e-5)
    rows = row_losses(name, FORWARD, inputs)
    assert rows is not None
    assert rows.shape == (1, 2, 130)
    torch.testing.assert_close(rows.mean(), ours, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["eager", "chunked"])
def test_training_leaves_the_gradients_of_ours(name: str) -> None:
    ours, theirs = draw_inputs(TRAINING, CPU), draw_inputs(TRAINING, CPU)
    prepare("streamkl", TRAINING, ours)()
    step = prepare(name, TRAINING, theirs)
    step()
    step()  # gradients of an earlier step are not added
    for key in ("student_q", "student_k"):
        torch.testing.assert_close(theirs[key].grad, ours[key].grad, rtol=1e-4, atol=1e-7)
    assert theirs["teacher_q"].grad is None


def test_attention_gives_gradients_to_all_three() -> None:
    inputs = draw_inputs(TRAINING, CPU)
    output = prepare("sdpa", TRAINING, inputs)()
    assert output.shape == inputs["teacher_q"].shape
    assert prepare("sdpa", FORWARD, inputs)().shape == output.shape


def test_what_cannot_run_says_why() -> None:
    mixture = Cell(128, Heads(4, 4, 1, 1), (32, 32))
    assert "does not differentiate" in (refusal("composed", TRAINING, CPU, PLENTY) or "")
    assert "mean of heads" in (refusal("composed", mixture, CPU, PLENTY) or "")
    assert "one width" in (refusal("composed", Cell(128, Heads(4, 4, 4, 4), (32, 64)), CPU, PLENTY) or "")
    assert "forward" in (refusal("products", TRAINING, CPU, PLENTY) or "")
    large = Cell.square(8, 65536, 128)
    assert "GB are available" in (refusal("eager", large, CPU, 16 << 30) or "")
    assert refusal("chunked", large, CPU, 16 << 30) is None
    others = [name for name in SUMMARIES if name not in ("plain", "products", "student")]
    assert [refusal(name, FORWARD, CPU, PLENTY) for name in others] == [None] * 6
    assert refusal("student", FORWARD, CPU, PLENTY) == "there is no indexer"
    indexer = Cell(128, Heads(4, 4, 2, 1), (32, 32), direction="training", indexer=True)
    assert [refusal(name, indexer, CPU, PLENTY) for name in ("streamkl", "eager", "sdpa", "student")] == [None] * 4
    assert refusal("chunked", indexer, CPU, PLENTY) == "not written for an indexer"
    assert refusal("plain", indexer, CPU, PLENTY) == "it is the cell itself"
    compressed = replace(indexer, key_span=4)
    assert [refusal(name, compressed, CPU, PLENTY) for name in ("streamkl", "plain")] == [None] * 2
    assert "several tokens" in (refusal("eager", compressed, CPU, PLENTY) or "")


def test_an_indexer_and_the_loss_of_frameworks_give_one_loss() -> None:
    cell = Cell(200, Heads(4, 2, 3, 1), (32, 24), dtype="float32", direction="training", indexer=True)
    losses, gradients = [], []
    for name in ("streamkl", "eager"):
        inputs = draw_inputs(cell, "cpu")
        losses.append(prepare(name, cell, inputs)())
        gradients.append({key: inputs[key].grad for key in cell.wanted})
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("change", [{"key_span": 4}, {"rest": True}], ids=str)
def test_beside_compressed_keys_or_a_rest_plain_is_the_cell_without(change) -> None:
    plain = Cell(203, Heads(4, 2, 3, 1), (32, 24), dtype="float32", direction="training", indexer=True)
    cell = replace(plain, **change)
    inputs = draw_inputs(cell, "cpu")
    theirs = prepare("plain", cell, inputs)()
    torch.testing.assert_close(theirs, prepare("streamkl", plain, draw_inputs(plain, "cpu"))())
    ours = prepare("streamkl", cell, inputs)()
    assert abs(float(ours - theirs)) > 1e-4
    assert all(inputs[name].grad is not None for name in cell.wanted)


def test_the_engine_is_that_of_the_call() -> None:
    assert engine_name(FORWARD, CPU, "tiled") == "tiled"
    assert engine_name(FORWARD, CPU, "reference") == "reference"
    assert engine_name(FORWARD, CPU, "auto") in ("cpu", "tiled")
