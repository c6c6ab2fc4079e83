"""``benchmarks/paired_perplexity.py``: passages that two reports share are compared, and a wrong method is named."""

import json
import math
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "paired_perplexity.py"


def report(folder: Path, methods: dict[str, list[float]]) -> Path:
    """A report of passages of ten tokens, with the mean losses of each method."""
    folder.mkdir()
    lines = [{"run": {}}] + [
        {"task": "perplexity", "length": 10, "number": n, "method": method, "found": {"nll": 10 * loss, "tokens": 10}}
        for method, losses in methods.items()
        for n, loss in enumerate(losses)
    ]
    (folder / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def run(*arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True)


def test_passages_are_paired(tmp_path: Path) -> None:
    one = report(tmp_path / "one", {"dense": [1.0, 2.0, 3.0, 9.0]})
    other = report(tmp_path / "other", {"dense": [0.0], "run k2 b1": [1.1, 2.2, 3.3]})
    said = run(one, "dense", other).stdout
    assert said.startswith(f"{math.exp(2):.3f} and {math.exp(2.2):.3f} on 3 passages: {100 * math.expm1(0.2):+.2f}% [")
    assert run(one, "dense", other, "run k2 b1").stdout == said


def test_a_method_that_is_not_there_is_named(tmp_path: Path) -> None:
    one = report(tmp_path / "one", {"dense": [1.0, 2.0]})
    ended = run(one, "oracle", one, "dense")
    assert ended.returncode == 1
    assert "has dense, and not 'oracle'" in ended.stderr
