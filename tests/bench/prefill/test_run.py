"""``streamkl bench prefill`` end to end on a tiny shape: the gate, both methods, the table, file and picture."""

import json

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("transformers")

from streamkl.bench.gate import RedGateError
from streamkl.bench.prefill import gate, models, records
from streamkl.bench.prefill.stopwatch import PARTS
from streamkl.cli import app

TINY = {
    "model_type": "qwen3", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _tiny_shape(monkeypatch) -> None:
    monkeypatch.setitem(models.SHAPES, "tiny", TINY)


def test_dense_and_sparse_take_turns_and_everything_is_written(tmp_path) -> None:
    output, picture = tmp_path / "prefill.jsonl", tmp_path / "prefill.png"
    options = [
        "--layers",
        "2",
        "--tokens",
        "300",
        "--topk",
        "32",
        "--query-block",
        "16",
        "--index-dim",
        "16",
        "--rounds",
        "2",
    ]
    command = ["bench", "prefill", "tiny", *options, "--no-memory", "--output", str(output), "--picture", str(picture)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "random weights (a stress test), 2 of 3 layers" in result.output
    dense, sparse = records.read(output)
    assert (dense.method, dense.topk, sparse.method, sparse.topk, sparse.query_block) == ("dense", 0, "indexer", 32, 16)
    assert dense.parts["selection"] == 0.0
    assert sparse.parts["selection"] > 0.0
    for record in (dense, sparse):
        assert record.random_weights
        assert len(record.seconds) == 2
        assert all(record.parts[part] > 0.0 for part in PARTS if part != "selection")
        assert sum(record.parts.values()) in record.seconds
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert json.loads(output.read_text().splitlines()[0])["machine"]["torch"] == torch.__version__


@pytest.mark.slow
def test_memory_is_measured_in_a_process_of_its_own(tmp_path) -> None:
    from streamkl.bench.prefill.run import Job, _memory_alone
    from streamkl.testing import smollm2

    job = Job(str(smollm2.checkpoint()), 512, layers=1, topk=64, query_block=32, index_dim=64)
    added = _memory_alone(job, "indexer")
    assert 1 << 20 < added < 1 << 30, "a layer's activations at 512 tokens"


def test_a_wrong_sparse_attention_is_not_timed(monkeypatch) -> None:
    from streamkl.integrations.transformers import attention

    model = models.make("tiny", None, torch.float32)
    prompt = torch.randint(0, 64, (1, 64), generator=torch.Generator().manual_seed(0))
    assert gate.check(model, prompt, 16) <= 1
    right = attention.sparse_attention
    monkeypatch.setattr(attention, "sparse_attention", lambda *a, **k: 1.01 * right(*a, **k))
    with pytest.raises(RedGateError, match="logits differ"):
        gate.check(model, prompt, 16)


def test_what_is_not_a_model_is_said(tmp_path) -> None:
    result = CliRunner().invoke(app, ["bench", "prefill", "nothing", "--output", str(tmp_path / "x.jsonl")])
    assert result.exit_code == 2
    assert "Qwen3-0.6B" in result.output
    assert "'nothing'" in result.output
