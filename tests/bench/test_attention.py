"""The cost of attention distillation: every call runs, the gate holds, and what is added is told."""

from pathlib import Path

import pytest

pytest.importorskip("transformers")

from streamkl.bench import attention
from streamkl.bench.attention import ATTENTION, BOTH, LOGITS, MATERIALISED, STUDENT, TEACHER, Cost
from streamkl.bench.gate import RedGateError
from streamkl.testing.tiny_models import tiny_model


@pytest.mark.slow
def test_every_call_runs_and_its_memory_is_measured(tmp_path: Path) -> None:
    tiny_model("llama", hidden_size=64).save_pretrained(tmp_path)
    costs = attention.run(str(tmp_path), [64], [64], 64, seconds=0.0, dtype="float32", checkpointing=True)
    assert [cost.call for cost in costs] == [STUDENT, TEACHER, LOGITS, ATTENTION, BOTH, MATERIALISED]
    assert all(cost.seconds is not None and cost.seconds > 0 for cost in costs)
    assert all(cost.extra_bytes >= 0 for cost in costs)


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
