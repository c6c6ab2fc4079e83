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
from streamkl.selfcheck.tiny import make, random_prompts

CLOSE = {"float32": 1e-4, "float16": 0.03, "bfloat16": 0.25}
"""What log-probabilities may differ by, where nothing but the order of sums differs."""
LENGTHS, ANSWER = (50, 129, 300, 601, 1000), 4
SETTINGS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}
ALL = {"kind": "indexer", "topk": 2048, "query_block": 32}
SOME = {"kind": "indexer", "topk": 96, "query_block": 32}

Answers = list[list[dict[int, float]]]
"""For each prompt and each token of its answer: the token first, then others, each with its log-probability."""


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
            return asked(streamkl, 1, **options)[0][0]

        def asked(streamkl: dict[str, Any] | None, times: int, **options: Any) -> tuple[list[Answers], list[int]]:
            given = None if streamkl is None else {"indexers": str(tiny.indexers), **streamkl}
            return _start({"model": str(tiny.path), "streamkl": given, "times": times, "options": {**usual, **options}})

        dense = answers(None)
        every = answers({"selector": ALL})
        yield _compare("all keys, beside dense attention", dense, every, dtype)
        decoded = answers({"selector": ALL, "decode": "sparse"})
        yield _compare("all keys for decoded tokens, too", dense, decoded, dtype)
        (whole, again), cached = asked({"selector": SOME}, 2, enable_prefix_caching=True)
        found = _compare(f"prompts with {cached[1]} tokens cached", whole, again, dtype)
        found.passed &= cached[1] > 0
        yield found
        chunks = answers({"selector": SOME}, max_num_batched_tokens=250)
        yield _compare("prompts in chunks", whole, chunks, dtype)
        apart = difference(dense, whole)
        yield Outcome("vLLM: selected keys, beside all", apart > CLOSE[dtype], f"log-probabilities {apart:.2g} apart")


def difference(one: Answers, other: Answers) -> float:
    """The largest difference of a log-probability, up to the first token that differs; infinite if it is the first."""
    worst = 0.0
    for ours, theirs in zip(one, other, strict=True):
        for n, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            if next(iter(a)) != next(iter(b)):
                worst = float("inf") if n == 0 else worst
                break
            worst = max(worst, *(abs(a[token] - b[token]) for token in a.keys() & b.keys()))
    return worst


def _compare(name: str, one: Answers, other: Answers, dtype: str) -> Outcome:
    found = difference(one, other)
    return Outcome(
        f"vLLM: {name}", found <= CLOSE[dtype],
        f"log-probabilities within {found:.2g}, at most {CLOSE[dtype]:g} in {dtype}",
    )  # fmt: skip


def _start(request: dict[str, Any]) -> tuple[list[Answers], list[int]]:
    """Answers to the same prompts by an engine in another process, each time, and how many tokens it had cached.

    Raises:
        RuntimeError: It failed.
    """
    command = [sys.executable, "-m", __name__, json.dumps(request)]
    ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **SETTINGS})
    if ended.returncode:
        raise RuntimeError(f"vLLM failed with {request}:\n{ended.stderr[-3000:]}")
    found = json.loads(ended.stdout.rstrip().rpartition("\n")[2])
    times = [[[{int(t): x for t, x in token.items()} for token in one] for one in time] for time in found["answers"]]
    return times, found["cached"]


def _main(request: dict[str, Any]) -> None:
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]  # an extra

    overrides = {} if request["streamkl"] is None else {"hf_overrides": {"streamkl": request["streamkl"]}}
    usual = {
        "max_model_len": 2048, "enforce_eager": True, "skip_tokenizer_init": True, "enable_prefix_caching": False,
        "max_num_batched_tokens": 4096, "max_num_seqs": 16, "seed": 0, "gpu_memory_utilization": 0.3,
    }  # fmt: skip
    engine = LLM(request["model"], **{**usual, **overrides, **request["options"]})
    params = SamplingParams(temperature=0, max_tokens=ANSWER, logprobs=3, detokenize=False, ignore_eos=True)
    prompts: Any = [{"prompt_token_ids": prompt} for prompt in random_prompts(*LENGTHS)]
    answers, cached = [], []
    for _ in range(request["times"]):
        found = engine.generate(prompts, params, use_tqdm=False)
        answers.append([_answer(each.outputs[0]) for each in found])
        cached.append(sum(each.num_cached_tokens or 0 for each in found))
    sys.stdout.write("\n" + json.dumps({"answers": answers, "cached": cached}) + "\n")


def _answer(out: Any) -> list[dict[int, float]]:
    """The log-probabilities of an answer's tokens, the chosen token first."""
    pairs = zip(out.token_ids, out.logprobs, strict=True)
    return [{token: found[token].logprob, **{t: x.logprob for t, x in found.items()}} for token, found in pairs]


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
