"""An engine of vLLM in one process, and its answers."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from streamkl.sparse import AttentionCall, Selector

SETTINGS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}
"""What the environment of such a process has."""


class Generated(NamedTuple):
    """The answer to one prompt.

    Attributes:
        tokens: Its tokens.
        logprobs: The log-probabilities of each and of the next best, by token.
        cached: How many tokens of the prompt were in the cache.
    """

    tokens: list[int]
    logprobs: list[dict[int, float]]
    cached: int

    @classmethod
    def of(cls, out: Any) -> Generated:
        """From vLLM's."""
        answer = out.outputs[0]
        logprobs = [{token: entry.logprob for token, entry in each.items()} for each in answer.logprobs]
        return cls(list(answer.token_ids), logprobs, out.num_cached_tokens or 0)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Generated:
        """From `_asdict` that went through JSON, where keys are strings."""
        logprobs = [{int(token): found for token, found in each.items()} for each in value["logprobs"]]
        return cls(value["tokens"], logprobs, value["cached"])

    def difference(self, other: Generated, rounded: bool = False) -> float:
        """The largest difference of a log-probability that both have; infinite if tokens differ.

        Args:
            other: Another answer to the same prompt.
            rounded: Whether a later token than the first may differ, since rounding can turn it; then what comes before
                it is compared.
        """
        same = next((n for n, (a, b) in enumerate(zip(self.tokens, other.tokens, strict=True)) if a != b), None)
        if same is not None and not (rounded and same):
            return float("inf")
        pairs = list(zip(self.logprobs, other.logprobs, strict=True))[:same]
        return max(abs(a[token] - b[token]) for a, b in pairs for token in a.keys() & b.keys())


class Recorder:
    """A selector that keeps what it selects.

    Args:
        selector: Selects.

    Attributes:
        kept: The first query of each part of a prompt, and its selected keys ``[query_blocks, topk]``.
    """

    def __init__(self, selector: Selector) -> None:
        self.selector, self.topk, self.query_block = selector, selector.topk, selector.query_block
        self.kept: list[tuple[int, Tensor]] = []

    def select(self, call: AttentionCall) -> Tensor:
        """The selected keys of a call, which are kept."""
        found = self.selector.select(call)
        if call.cu_seqlens_q is None:
            self.kept.append((call.k.shape[2] - call.q.shape[2], found[0]))
            return found
        assert call.cu_seqlens_k is not None, "both are packed"
        queries, keys = (starts.diff().tolist() for starts in (call.cu_seqlens_q, call.cu_seqlens_k))
        blocks = found.split([-(-count // self.query_block) for count in queries])
        self.kept += [(k - q, block) for q, k, block in zip(queries, keys, blocks, strict=True)]
        return found


class Engine:
    """An engine of vLLM in this process: `SETTINGS` must be in its environment before vLLM is imported.

    Args:
        path: The folder of a model.
        streamkl: The settings of a sparse model; ``None`` for vLLM's own.
        options: More of vLLM's ``LLM``.
    """

    def __init__(self, path: Path, streamkl: dict[str, Any] | None, **options: Any) -> None:
        from vllm import LLM  # pyright: ignore[reportMissingImports]  # an extra

        overrides = {} if streamkl is None else {"hf_overrides": {"streamkl": streamkl}}
        defaults: dict[str, Any] = {
            "dtype": "float32", "max_model_len": 2304, "enforce_eager": True, "skip_tokenizer_init": True,
            "enable_prefix_caching": False, "max_num_batched_tokens": 4096, "max_num_seqs": 32, "seed": 0,
        }  # fmt: skip
        self.llm = LLM(str(path), **{**defaults, **overrides, **options})

    def generate(self, requests: list[list[int]], tokens: int = 8, together: bool = True) -> list[Generated]:
        """Greedy tokens of prompts, and the log-probability of each.

        Args:
            requests: The tokens of each prompt.
            tokens: How many are generated.
            together: Whether all prompts are given at once, or one after the other.
        """
        from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

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

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[Recorder]]:
        """Keeps what each layer of a sparse model selects meanwhile."""
        layers = [layer.self_attn.attn for layer in self.model.model.layers]
        recorders = [Recorder(layer.selector) for layer in layers]
        for layer, recorder in zip(layers, recorders, strict=True):
            layer.selector = recorder
        try:
            yield recorders
        finally:
            for layer, recorder in zip(layers, recorders, strict=True):
                layer.selector = recorder.selector

    def close(self) -> None:
        """Ends it, so that another can start."""
        from vllm.distributed import cleanup_dist_env_and_memory  # pyright: ignore[reportMissingImports]

        self.core.shutdown()
        del self.llm
        gc.collect()
        with contextlib.suppress(Exception):
            cleanup_dist_env_and_memory()
