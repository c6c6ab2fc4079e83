"""The gate lets a right engine pass, and no other."""

import pytest
import torch

from streamkl.bench import gate
from streamkl.bench.cells import Cell
from streamkl.engines import tiled
from streamkl.testing import Heads

CPU = torch.device("cpu")
CELL = Cell(65536, Heads(4, 2, 2, 1), (32, 24), dtype="float32", direction="training")


@pytest.fixture(autouse=True)
def _few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "TOKENS", 97)


def test_a_right_engine_passes() -> None:
    assert 0 < gate.check(CELL, "tiled", CPU, torch.get_num_threads()) <= 1


def test_logits_wrong_by_one_per_cent_do_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = tiled._Operand.score
    monkeypatch.setattr(tiled._Operand, "score", lambda *args: logits(*args) * 1.01)
    with pytest.raises(
        gate.RedGateError, match=r"65,536 tokens, 4/2x32 to 2/1x24, .* forward alone: loss .* \(allowed"
    ):
        gate.check(CELL, "tiled", CPU, torch.get_num_threads())


def test_gradients_alone_wrong_by_one_per_cent_do_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    train = tiled.train

    def wrong(*args: object) -> tuple:
        loss, gradients, mass = train(*args)  # type: ignore[arg-type]
        return loss, gradients._replace(b_k=gradients.b_k * 1.01), mass

    monkeypatch.setattr(tiled, "train", wrong)
    with pytest.raises(gate.RedGateError, match="gradients to student_q, student_k"):
        gate.check(CELL, "tiled", CPU, torch.get_num_threads())


def test_losses_that_are_not_numbers_do_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = tiled._Operand.score
    monkeypatch.setattr(tiled._Operand, "score", lambda *args: logits(*args) * torch.nan)
    with pytest.raises(gate.RedGateError, match="nan"):
        gate.check(CELL, "tiled", CPU, torch.get_num_threads())


def test_layouts_that_differ_are_checked_apart() -> None:
    same = Cell(128, CELL.heads, CELL.dims, dtype="float32", direction="forward")
    assert gate.key(CELL) == gate.key(same)
    for change in ({"mask": "full"}, {"dtype": "bfloat16"}, {"direction": "training-both"}, {"dims": (24, 24)}):
        assert gate.key(Cell(**{**CELL.__dict__, **change})) != gate.key(CELL)
