"""``examples/quickstart.sh`` on six layers: from text and a checkpoint to a report, once, and the page's example."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT, PAGE = ROOT / "examples" / "quickstart.sh", ROOT / "docs" / "quickstart-sparse.md"
SMALL = {
    "LENGTHS": "160", "QUERY_BLOCKS": "1 32", "ORACLE_BUDGETS": "48", "ORACLE_CONTEXTS": "1", "ORACLE_SEGMENTS": "0",
    "BUDGETS": "48", "CONTEXTS": "1", "SEGMENTS": "1", "LAYER_SEGMENTS": "1", "LENGTH": "160", "STEPS": "2",
}  # fmt: skip

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="the quickstart is a script for bash")


def quickstart(folder: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Runs the script in a folder."""
    here = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{here}{os.pathsep}{os.environ['PATH']}", "HF_HUB_OFFLINE": "1", **variables}
    if "PYTEST_XDIST_WORKER" in os.environ:
        environment["OMP_NUM_THREADS"] = "1"
    bash = shutil.which("bash")
    assert bash is not None
    return subprocess.run([bash, str(SCRIPT)], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.longest
@pytest.mark.filterwarnings("ignore:a top-k of .* shared by a query block")  # an eighth of 160 tokens is fewer than 64
def test_the_quickstart_reports_on_trained_indexers_and_does_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in ("transformers", "accelerate", "matplotlib", "gguf"):
        pytest.importorskip(package)
    from streamkl.testing import smollm2

    prose = smollm2.prose()
    for name, text in (("train", prose[: len(prose) // 2]), ("test", prose[len(prose) // 2 :])):
        (tmp_path / "quickstart" / "books" / name).mkdir(parents=True)
        (tmp_path / "quickstart" / "books" / name / "prose.txt").write_text(text)
    model, tokenizer = smollm2.load(num_hidden_layers=6)
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    monkeypatch.setattr(smollm2, "checkpoint", lambda: tmp_path / "model")  # for the page
    ran = quickstart(tmp_path, MODEL=str(tmp_path / "model"), **SMALL)
    assert ran.returncode == 0, ran.stderr

    output = tmp_path / "quickstart"
    pictures = {"oracle": ("frontier", "quality", "layers"), "report": ("frontier", "quality", "gaps", "layers")}
    for name, drawn in pictures.items():  # one context tells no gap: without passages there is no picture of gaps
        folder = output / name
        page = (folder / "report.md").read_text()
        assert ("(gaps.png)" in page) is ("gaps" in drawn)
        for picture in drawn:
            assert (folder / f"{picture}.png").stat().st_size > 10_000
            assert f"({picture}.png)" in page
    assert (output / "run" / "curves.png").stat().st_size > 10_000
    report = json.loads((output / "report" / "report.json").read_text())
    methods = {
        "dense",
        *(f"{name} k48 b{query_block}" for name in ("run/indexers", "oracle", "window") for query_block in (1, 32)),
    }
    for task in ("needle", "perplexity"):
        assert {f["method"] for f in report["figures"] if f["task"] == task} == methods, task
    assert {gap["kind"] for gap in report["gaps"]} == {"oracle", "indexer", "realization"}

    kept = ("oracle/results.jsonl", "report/results.jsonl", "run/curves.jsonl", "run/indexers/indexers.safetensors")
    before = {name: ((output / name).stat().st_mtime_ns, (output / name).read_bytes()) for name in kept}
    ran = quickstart(tmp_path, MODEL=str(tmp_path / "model"), **SMALL)
    assert ran.returncode == 0, ran.stderr
    assert before == {name: ((output / name).stat().st_mtime_ns, (output / name).read_bytes()) for name in kept}

    monkeypatch.chdir(tmp_path)
    code = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    exec(compile("\n".join(code), PAGE.name, "exec"), {"__name__": "__main__"})
    assert "IndexerSelector" in capsys.readouterr().out


def test_without_apt_or_books_the_quickstart_says_how_to_bring_your_own(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    found = shutil.which("dirname")
    assert found is not None
    (tmp_path / "bin" / "dirname").symlink_to(found)
    ran = quickstart(tmp_path, PATH=str(tmp_path / "bin"))
    assert ran.returncode == 1
    assert "no apt-get" in ran.stderr
    assert "BOOKS=folder" in ran.stderr
    (tmp_path / "mine" / "train").mkdir(parents=True)
    ran = quickstart(tmp_path, BOOKS="mine")
    assert ran.returncode == 1
    assert "mine has no folder test" in ran.stderr
