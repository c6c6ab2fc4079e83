"""The check of the plugin for vLLM on this machine: a tiny model, dense and sparse, each engine in a process.

``python -m streamkl.selfcheck.serving REQUEST`` is one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from streamkl.selfcheck.checks import Outcome
from streamkl.selfcheck.engine import SETTINGS, Engine, Generated
from streamkl.selfcheck.tiny import make, random_prompts

CLOSE = {"float32": 1e-4, "float16": 0.03, "bfloat16": 0.25}
"""What log-probabilities may differ by, where nothing but the order of sums differs."""
LENGTHS, ANSWER = (50, 129, 300, 601, 1000), 4
ALL = {"kind": "indexer", "topk": 2048, "query_block": 32}
SOME = {"kind": "indexer", "topk": 96, "query_block": 32}

Answers = list[Generated]
"""Of each prompt."""


def checks(dtype: str, backend: str = "") -> Iterator[Outcome]:
    """Holds sparse engines to dense ones, and chunked, cached and whole prompts to each other.

    Args:
        dtype: Of the model: float32, float16 or bfloat16.
        backend: vLLM's attention backend, which the sparse one extends; vLLM's choice if it is empty.
    """
    with tempfile.TemporaryDirectory() as place:
        tiny = make("llama", Path(place))
        usual: dict[str, Any] = {"dtype": dtype, **({"attention_backend": backend} if backend else {})}

        def answers(streamkl: dict[str, Any] | None, **options: Any) -> Answers:
            return asked(streamkl, 1, **options)[0]

        def asked(streamkl: dict[str, Any] | None, times: int, **options: Any) -> list[Answers]:
            given = None if streamkl is None else {"indexers": str(tiny.indexers), **streamkl}
            return _start({"model": str(tiny.path), "streamkl": given, "times": times, "options": {**usual, **options}})

        dense = answers(None)
        every = answers({"selector": ALL})
        yield _compare("all keys, beside dense attention", dense, every, dtype)
        decoded = answers({"selector": ALL, "decode": "sparse"})
        yield _compare("all keys for decoded tokens, too", dense, decoded, dtype)
        whole, again = asked({"selector": SOME}, 2, enable_prefix_caching=True, block_size=128)
        cached = sum(answer.cached for answer in again)
        found = _compare(f"prompts with {cached} tokens cached", whole, again, dtype)
        found.passed &= cached > 0
        yield found
        chunks = answers({"selector": SOME}, max_num_batched_tokens=250)
        yield _compare("prompts in chunks", whole, chunks, dtype)
        apart = difference(dense, whole)
        yield Outcome("vLLM: selected keys, beside all", apart > CLOSE[dtype], f"log-probabilities {apart:.2g} apart")


def difference(one: Answers, other: Answers) -> float:
    """The largest difference of a log-probability; infinite if a first token differs."""
    return max(a.difference(b, rounded=True) for a, b in zip(one, other, strict=True))


def _compare(name: str, one: Answers, other: Answers, dtype: str) -> Outcome:
    found = difference(one, other)
    return Outcome(
        f"vLLM: {name}", found <= CLOSE[dtype],
        f"log-probabilities within {found:.2g}, at most {CLOSE[dtype]:g} in {dtype}",
    )  # fmt: skip


def _start(request: dict[str, Any]) -> list[Answers]:
    """Answers to the same prompts, once or several times, by an engine in another process.

    Raises:
        RuntimeError: It failed.
    """
    command = [sys.executable, "-m", __name__, json.dumps(request)]
    ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **SETTINGS})
    if ended.returncode:
        raise RuntimeError(f"vLLM failed with {request}:\n{ended.stderr[-3000:]}")
    found = json.loads(ended.stdout.rstrip().rpartition("\n")[2])
    return [[Generated.from_json(answer) for answer in time] for time in found]


def _main(request: dict[str, Any]) -> None:
    engine = Engine(Path(request["model"]), request["streamkl"], gpu_memory_utilization=0.3, **request["options"])
    times = [engine.generate(random_prompts(*LENGTHS), ANSWER) for _ in range(request["times"])]
    sys.stdout.write("\n" + json.dumps([[answer._asdict() for answer in answers] for answers in times]) + "\n")


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
