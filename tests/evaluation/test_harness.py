"""lm-eval runs a local task on a sparse model and writes its usual results."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lm_eval")

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
doc_to_choice: [" yes", " no"]
metric_list:
  - metric: acc
"""


def test_lm_eval_runs_a_local_task_with_sparse_attention(model_folder: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": f"{'word ' * 30}{n}?"}) + "\n" for n in range(3)))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "numbers.yaml").write_text(TASK.format(data=data))
    arguments = f"pretrained={model_folder},selector=oracle,topk=8,block=4,dtype=float32"
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
    found = {}
    for name, more in (("sparse", []), ("dense", ["--model", "hf"])):
        if name == "dense":
            words[2] = f"pretrained={model_folder},dtype=float32"
            words[words.index("--output_path") + 1] = str(tmp_path / "dense")
        ran = subprocess.run(
            [sys.executable, "-m", "streamkl", *words, *more], env=environment, capture_output=True, text=True
        )
        assert ran.returncode == 0, ran.stderr
        (results,) = (tmp_path / ("out" if name == "sparse" else "dense")).rglob("results_*.json")
        assert json.loads(results.read_text())["results"]["local_numbers"]["acc,none"] >= 0
        (samples,) = results.parent.glob("samples_*.jsonl")
        found[name] = [json.loads(line)["resps"] for line in samples.read_text().splitlines()]
    assert found["sparse"] != found["dense"], "eight keys are not all"
