"""Tiny checkpoints with indexers, engines of vLLM in this process, and a reference in transformers' own modules."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from streamkl.selfcheck.tiny import Tiny, make, random_prompts

HAVE_VLLM = importlib.util.find_spec("vllm") is not None
collect_ignore_glob = [] if HAVE_VLLM else ["test_serving.py", "test_refusals.py", "test_selfcheck.py"]

if HAVE_VLLM:  # else the other tests of this process would not compile, and nor would the processes they start
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind",
        TORCH_COMPILE_DISABLE="1", VLLM_LOGGING_LEVEL="WARNING", VLLM_NO_USAGE_STATS="1",
    )  # fmt: skip


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Tiny]:
    """A function of a family that gives its tiny checkpoint, made once."""
    made: dict[tuple[str, int], Tiny] = {}

    def get(family: str = "llama", heads: int = 1) -> Tiny:
        if (family, heads) not in made:
            made[family, heads] = make(family, tmp_path_factory.mktemp(f"{family}{heads}"), heads)
        return made[family, heads]

    return get


class Engine:
    """An engine of vLLM in this process."""

    def __init__(self, path: Path, streamkl: dict[str, Any] | None, **options: Any) -> None:
        from vllm import LLM

        overrides = {} if streamkl is None else {"hf_overrides": {"streamkl": streamkl}}
        defaults: dict[str, Any] = {
            "dtype": "float32", "max_model_len": 2304, "enforce_eager": True, "skip_tokenizer_init": True,
            "enable_prefix_caching": False, "max_num_batched_tokens": 4096, "max_num_seqs": 32, "seed": 0,
        }  # fmt: skip
        self.llm = LLM(str(path), **{**defaults, **overrides, **options})

    def generate(self, requests: list[list[int]], tokens: int = 8, together: bool = True) -> list[Generated]:
        """Greedy tokens of prompts, and the log-probability of each."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=tokens, logprobs=3, detokenize=False, ignore_eos=True)
        batches = [requests] if together else [[each] for each in requests]
        found = [
            out
            for batch in batches
            for out in self.llm.generate([{"prompt_token_ids": each} for each in batch], params, use_tqdm=False)
        ]
        return [Generated.of(out) for out in found]

    @property
    def core(self) -> Any:
        """The part of vLLM that has the scheduler."""
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def model(self) -> Any:
        """The model that vLLM built."""
        return self.llm.apply_model(lambda model: model)[0]

    def close(self) -> None:
        """Ends it, so that another can start."""
        from vllm.distributed import cleanup_dist_env_and_memory

        self.core.shutdown()
        del self.llm
        gc.collect()
        with contextlib.suppress(Exception):
            cleanup_dist_env_and_memory()


class Generated(NamedTuple):
    """The answer to one prompt."""

    tokens: list[int]
    logprobs: list[dict[int, float]]
    cached: int

    @classmethod
    def of(cls, out: Any) -> Generated:
        """From vLLM's."""
        answer = out.outputs[0]
        logprobs = [{token: entry.logprob for token, entry in each.items()} for each in answer.logprobs]
        return cls(list(answer.token_ids), logprobs, out.num_cached_tokens or 0)

    def difference(self, other: Generated) -> float:
        """The largest difference of a log-probability that both have; infinite if tokens differ."""
        if self.tokens != other.tokens:
            return float("inf")
        pairs = zip(self.logprobs, other.logprobs, strict=True)
        return max(abs(a[token] - b[token]) for a, b in pairs for token in a.keys() & b.keys())


@pytest.fixture
def engine() -> Iterator[Callable[..., Engine]]:
    """A function that starts an engine in place of the one before."""
    running: list[Engine] = []

    def start(path: Path, streamkl: dict[str, Any] | None = None, **options: Any) -> Engine:
        while running:
            running.pop().close()
        running.append(Engine(path, streamkl, **options))
        return running[-1]

    yield start
    while running:
        running.pop().close()


@torch.no_grad()
def masked_attention(tiny: Tiny, prompt: list[int], selector: Any) -> tuple[Tensor, dict[int, Tensor]]:
    """Log-probabilities after each token of a prompt and the selected keys of each layer.

    transformers' own modules attend under a mask that leaves the selected keys, so nothing of the plugin is used.
    """
    from streamkl.sparse import AttentionCall

    n, selected = len(prompt), {}

    def restrict(layer: int) -> Callable:
        def hook(module: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
            indexer = tiny.modules[layer]
            cos, sin = (x[..., : indexer.rope_dim // 2] for x in kwargs["position_embeddings"])
            if indexer.rope_dim < module.head_dim:
                step = module.head_dim // indexer.rope_dim
                cos, sin = (x[..., : module.head_dim // 2 : step] for x in kwargs["position_embeddings"])
            tables = tuple(torch.cat((x, x), -1) for x in (cos, sin))
            none = torch.zeros(1, 1, n, 1)
            found = selector.select(
                AttentionCall(none, none, index=indexer(kwargs["hidden_states"], position_embeddings=tables))
            )[0]
            selected[layer] = found
            seen = torch.zeros(len(found), n + 1, dtype=torch.bool)
            seen.scatter_(1, found.long().where(found >= 0, n), True)
            rows = seen[:, :n].repeat_interleave(selector.query_block, 0)[:n] & torch.ones(n, n).tril().bool()
            mask = torch.zeros(1, 1, n, n).masked_fill(~rows, float("-inf"))
            return args, {**kwargs, "attention_mask": mask}

        return hook

    tiny.model.set_attn_implementation("eager")
    hooks = [
        each.self_attn.register_forward_pre_hook(restrict(number), with_kwargs=True)
        for number, each in enumerate(tiny.model.model.layers)
    ]
    try:
        logits = tiny.model(torch.tensor([prompt])).logits[0]
    finally:
        for hook in hooks:
            hook.remove()
    return logits.log_softmax(-1), selected


@pytest.fixture
def prompts() -> Callable[..., list[list[int]]]:
    """A function of lengths that gives random prompts."""
    return random_prompts


@pytest.fixture
def reference() -> Callable[..., tuple[Tensor, dict[int, Tensor]]]:
    """The tiny model under a mask that leaves the selected keys."""
    return masked_attention
