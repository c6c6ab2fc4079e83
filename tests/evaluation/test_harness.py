"""lm-eval runs a local task on a sparse model and writes its usual results."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lm_eval")
pytest.importorskip("transformers")

import torch

from streamkl.evaluation.methods import DENSE, Method
from streamkl.evaluation.subject import Subject

TASK = """
task: local_numbers
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_target: 0
doc_to_choice: ["yes", "no"]
metric_list:
  - metric: acc
"""


@pytest.mark.slow
def test_lm_eval_runs_a_local_task_with_sparse_attention(model_folder: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    texts = [f"{'word ' * 30}{n}?" for n in range(3)]
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "numbers.yaml").write_text(TASK.format(data=data))
    arguments = f"pretrained={model_folder},selector=oracle,topk=8,query_block=4,dtype=float32"
    words = [
        "lm-eval",
        "--model_args",
        arguments,
        "--tasks",
        "local_numbers",
        "--include_path",
        str(tmp_path / "tasks"),
    ]
    words += ["--output_path", str(tmp_path / "out"), "--log_samples", "--device", "cpu"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")}
    ran = subprocess.run([sys.executable, "-m", "streamkl", *words], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    (results,) = (tmp_path / "out").rglob("results_*.json")
    assert json.loads(results.read_text())["results"]["local_numbers"]["acc,none"] >= 0
    (samples,) = results.parent.glob("samples_*.jsonl")
    found = [float(json.loads(line)["resps"][0][0][0]) for line in samples.read_text().splitlines()]
    subject = Subject(model_folder, dtype=torch.float32)
    wanted = {}
    for method in (DENSE, Method("oracle", 8, 4)):
        subject.use(method)
        wanted[method.name] = [likelihood(subject, text, " yes") for text in texts]
    assert found == pytest.approx(wanted["oracle k8 b4"], abs=1e-3)
    assert found != pytest.approx(wanted["dense"], abs=1e-2), "eight keys are not all"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"selector": "best"}, "selector must be one of oracle"),
        ({"selector": "oracle", "indexers": "folder"}, "give one of them"),
        ({"topk": 8}, "topk and query_block go with a selector or with indexers"),
        ({"batch_size": 4}, "batch_size must be 1: got 4"),
    ],
)
def test_model_args_that_would_be_ignored_are_refused(arguments: dict, message: str) -> None:
    from streamkl.evaluation.harness import SparseLM

    with pytest.raises(ValueError, match=message):
        SparseLM("no model is loaded", **arguments)


@torch.no_grad()
def likelihood(subject: Subject, text: str, more: str) -> float:
    """Of ``more`` after ``text``, computed as lm-eval does: the last token is no input."""
    ids = subject.tokenizer.encode(text + more)
    targets = torch.tensor(subject.tokenizer.encode(more))
    logits = subject.model(torch.tensor([ids[:-1]])).logits[0, -len(targets) :].log_softmax(-1)
    return float(logits.gather(1, targets[:, None]).sum())
