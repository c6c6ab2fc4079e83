"""The cost of attention distillation: every call runs, the gate holds, and what is added is told."""

from pathlib import Path

import pytest

pytest.importorskip("transformers")

from streamkl.bench import attention, isolated
from streamkl.bench.attention import ATTENTION, BOTH, LOGITS, MATERIALISED, STUDENT, TEACHER
from streamkl.bench.costs import Cost
from streamkl.bench.gate import RedGateError
from streamkl.testing.tiny_models import tiny_model


@pytest.mark.nightly  # a process per call
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_call_runs_and_its_memory_is_measured(dtype: str, tmp_path: Path) -> None:
    tiny_model("llama", hidden_size=64).save_pretrained(tmp_path)
    costs = attention.run(str(tmp_path), [64], [64], 64, seconds=0.0, dtype=dtype, checkpointing=True)
    assert [cost.call for cost in costs] == [STUDENT, TEACHER, LOGITS, ATTENTION, BOTH, MATERIALISED]
    assert all(cost.seconds is not None and cost.seconds > 0 for cost in costs)
    assert all(cost.extra_bytes >= 0 for cost in costs)


def test_every_call_runs(tmp_path: Path) -> None:
    tiny_model("llama", hidden_size=64).save_pretrained(tmp_path)
    bench = attention.Bench(str(tmp_path), "float32", checkpointing=True)
    losses = {name: bench.call(name, bench.ids(64)) for name in (STUDENT, LOGITS, ATTENTION, BOTH, MATERIALISED)}
    assert losses[ATTENTION] == pytest.approx(losses[MATERIALISED], rel=1e-5)
    assert losses[BOTH] > losses[LOGITS]
    assert bench.call(TEACHER, bench.ids(64)) == 0


@pytest.mark.slow
def test_memory_is_measured_in_a_process_of_its_own(tmp_path: Path) -> None:
    tiny_model("llama", hidden_size=64).save_pretrained(tmp_path)
    request = {"model": str(tmp_path), "dtype": "float32", "checkpointing": True, "tokens": 256, "call": BOTH}
    assert isolated.extra_bytes(attention.__name__, request) > 0


def test_a_loss_that_is_not_that_of_the_matrices_shows_no_figure(tmp_path: Path, monkeypatch) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    bench = attention.Bench(str(tmp_path), "float32", checkpointing=False)
    bench.check()
    bench.distiller.weights[1] = 1.1
    with pytest.raises(RedGateError, match="the losses at 256 tokens are"):
        bench.check()


def test_the_summary_says_what_attention_adds() -> None:
    seconds = {STUDENT: 2.0, TEACHER: 0.5, LOGITS: 3.0, ATTENTION: 3.0, BOTH: 4.0}
    costs = [Cost(2048, name, taken, 1000 + 100 * (name == BOTH)) for name, taken in seconds.items()]
    costs += [Cost(8192, name, None, 2000) for name in seconds]
    assert attention.summary(costs) == [
        "2,048 tokens: attention KL adds 10.0% to the peak of a step with logits KL",
        "2,048 tokens: beyond the teacher's forward it adds 0.25x of the student's step",
        "8,192 tokens: attention KL adds 0.0% to the peak of a step with logits KL",
    ]
