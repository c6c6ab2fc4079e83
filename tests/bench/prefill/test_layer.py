"""One layer's selection and sparse attention beside dense attention."""

import pytest
from typer.testing import CliRunner

from streamkl.bench.gate import RedGateError
from streamkl.bench.models import Layout
from streamkl.bench.prefill import layer
from streamkl.cli import app

SMALL = layer.Layer(Layout(4, 2, 32), tokens=256, topk=64, query_blocks=(32, 1), index_dim=32)


@pytest.mark.parametrize("training", [False, True])
def test_three_things_are_timed(training: bool) -> None:
    times = layer.run(SMALL._replace(training=training), budget=0.0, rounds=2)
    assert len(times.sdpa) == 2
    for block in SMALL.query_blocks:
        assert min(times.selection[block] + times.attention[block]) > 0
        last = (times.selection[block][-1] + times.attention[block][-1]) / times.sdpa[-1]
        assert times.ratios(block)[-1] == pytest.approx(last)


def test_a_wrong_attention_is_not_timed(monkeypatch) -> None:
    right = layer.sparse_attention
    monkeypatch.setattr(layer, "sparse_attention", lambda *a, **k: 1.02 * right(*a, **k))
    with pytest.raises(RedGateError, match="attention errs by"):
        layer.run(SMALL, budget=0.01)


def test_neither_is_one_with_wrong_gradients(monkeypatch) -> None:
    right = layer.sparse_attention

    def wrong(q, k, *rest, **options):
        return right(q, k.detach() + 0.8 * (k - k.detach()), *rest, **options)

    monkeypatch.setattr(layer, "sparse_attention", wrong)
    layer.run(SMALL, budget=0.01)
    with pytest.raises(RedGateError, match=r"attention errs by .* in its dk"):
        layer.run(SMALL._replace(training=True), budget=0.01)


def test_the_command_prints_the_ratio_and_refuses_an_unknown_model() -> None:
    result = CliRunner().invoke(
        app, ["bench", "layer", "SmolLM2-135M", "--tokens", "300", "--topk", "64", "--seconds", "0", "--rounds", "2",
              "--query-block", "64", "1"]
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "medians of 2 rounds" in result.output
    assert "query blocks of 1: selection" in result.output
    assert "SmolLM2-135M" in CliRunner().invoke(app, ["bench", "layer", "nothing"]).output
