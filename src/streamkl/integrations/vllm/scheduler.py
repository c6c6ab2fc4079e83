"""A scheduler of vLLM that ends every chunk of a prompt, but the last, with a query block.

Query blocks are counted from the first token of a sequence. A chunk that ended within one would let its queries select
keys apart from the others of their block, and the prompt would not be what it is in one chunk.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler  # pyright: ignore[reportMissingImports]  # an extra

from streamkl.integrations.vllm.settings import settings_of


class AlignedScheduler(Scheduler):
    """vLLM's scheduler with chunks that are rounded down to query blocks."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        settings = settings_of(vllm_config.model_config)
        assert settings is not None, "the config hook sets this scheduler for sparse models only"
        self.query_block = settings.selector.query_block
        super().__init__(vllm_config, *args, **kwargs)

    def _reserve_prefill_lookahead(self, request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
        """How many tokens of a request this step computes; 0 lets it wait. vLLM asks for every request."""
        tokens = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        end = num_computed_tokens + tokens
        if end >= request.num_tokens:  # a decode, or the end of a prompt
            return tokens
        return max(end // self.query_block * self.query_block - num_computed_tokens, 0)
