"""Tiny checkpoints with indexers, engines of vLLM in this process, and a reference in transformers' own modules."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from streamkl.selfcheck.engine import SETTINGS, Engine
from streamkl.selfcheck.tiny import Tiny, make, random_prompts

HAVE_VLLM = importlib.util.find_spec("vllm") is not None
collect_ignore_glob = [] if HAVE_VLLM else ["test_serving.py", "test_refusals.py", "test_selfcheck.py"]

if HAVE_VLLM:  # else the other tests of this process would not compile, and nor would the processes they start
    os.environ.update(
        SETTINGS, VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind", TORCH_COMPILE_DISABLE="1"
    )


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Tiny]:
    """A function of a family that gives its tiny checkpoint, made once."""
    made: dict[tuple[str, int], Tiny] = {}

    def get(family: str = "llama", heads: int = 1) -> Tiny:
        if (family, heads) not in made:
            made[family, heads] = make(family, tmp_path_factory.mktemp(f"{family}{heads}"), heads)
        return made[family, heads]

    return get


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
