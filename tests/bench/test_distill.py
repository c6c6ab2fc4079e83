"""A distillation step's cost: every call runs, and memory is repeatable; its gate is tested with the model."""

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from streamkl.bench import distill, isolated
from streamkl.bench.distill import FORWARD, MATERIALISED, STEP, WITH_HEAD
from streamkl.testing.tiny_models import tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny Llama."""
    path = tmp_path_factory.mktemp("llama")
    tiny_model("llama", max_position_embeddings=2048).save_pretrained(path)
    return str(path)


@pytest.mark.slow
def test_every_call_runs_and_the_matrices_are_seen_in_memory(folder: str) -> None:
    bench = distill.Bench(folder, heads=2, head_dim=16)
    for name in (FORWARD, WITH_HEAD, STEP, MATERIALISED):
        bench.ready(name)
        bench.call(name, bench.ids(64))()
    request = {"model": folder, "heads": 2, "head_dim": 16, "tokens": 512}
    step, matrices = (
        isolated.extra_bytes(distill.__name__, {**request, "call": name}) for name in (STEP, MATERIALISED)
    )
    assert matrices - step > 2 * 2 * 512**2  # two matrices in bfloat16, at least


@pytest.mark.nightly  # a process per call
def test_every_call_is_measured_with_repeatable_memory_and_the_matrices_are_seen(folder: str) -> None:
    costs = distill.run(folder, [512], 512, seconds=0.0, heads=2, head_dim=16)
    assert [cost.call for cost in costs] == [FORWARD, WITH_HEAD, STEP, MATERIALISED]
    assert all(cost.tokens == 512 and cost.seconds > 0 for cost in costs)
    extra = {cost.call: cost.extra_bytes for cost in costs}
    assert extra[MATERIALISED] - extra[STEP] > 2 * 2 * 512**2  # two matrices in bfloat16, at least
    again = isolated.extra_bytes(
        distill.__name__, {"model": folder, "heads": 2, "head_dim": 16, "tokens": 512, "call": STEP}
    )
    assert again == pytest.approx(extra[STEP], abs=4e6)  # stacks and buffers of threads are not always the same
