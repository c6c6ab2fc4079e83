"""What the plugin does to the config of a model that is to be sparse, and what it refuses before anything starts."""

from __future__ import annotations

import logging
import re
from typing import Any

from streamkl.integrations.saved.description import check_model, describe_model
from streamkl.integrations.vllm.families import SPARSE
from streamkl.integrations.vllm.settings import Settings, settings_of
from streamkl.sparse import OracleSelector

logger = logging.getLogger(__name__)

VERSION = (0, 32)
"""The minor version of vLLM whose interfaces are used: they change with every one."""
OPERATOR = "streamkl::vllm_attention"
SCHEDULER = "streamkl.integrations.vllm.scheduler.AlignedScheduler"


def hook_after(other: Any) -> type:
    """A class whose ``verify_and_update_config`` vLLM calls for an architecture.

    Args:
        other: The class of vLLM's own for the architecture, if there is one; it is called first.
    """
    if getattr(other, "is_streamkl", False):
        return other

    class Hook(*() if other is None else (other,)):
        is_streamkl = True

        @staticmethod
        def verify_and_update_model_config(model_config: Any) -> None:
            if hasattr(other, "verify_and_update_model_config"):
                other.verify_and_update_model_config(model_config)

        @staticmethod
        def verify_and_update_config(vllm_config: Any) -> None:
            if other is not None:
                other.verify_and_update_config(vllm_config)
            settings = settings_of(vllm_config.model_config)
            if settings is not None:
                make_sparse(vllm_config, settings)

    return Hook


def make_sparse(vllm_config: Any, settings: Settings) -> None:
    """Lets vLLM build the sparse class of a model, and end the chunks of prompts with query blocks.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        settings: Of the model.

    Raises:
        ValueError: Something of the config is not supported.
    """
    from vllm.logger import init_logger  # pyright: ignore[reportMissingImports]  # an extra
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

    check(vllm_config, settings)
    config = vllm_config.model_config.hf_config
    config.architectures = [
        name if name.startswith(SPARSE) else f"{SPARSE}{name}" for name in vllm_config.model_config.architectures
    ]
    vllm_config.scheduler_config.scheduler_cls = SCHEDULER
    selector = settings.selector
    init_logger(f"vllm.{__name__}").info(
        "Prompts attend to %d keys, selected for blocks of %d queries", selector.topk, selector.query_block
    )
    compilation = vllm_config.compilation_config
    if current_platform.is_cuda_alike():
        logger.warning("Sparse prefill has not been run on a GPU yet: check it by `streamkl selfcheck --vllm`")
        if compilation.splitting_ops is None:  # the graph is cut where vLLM would cut it, and at our operator
            compilation.splitting_ops = [*compilation._attention_ops, OPERATOR]


def check(vllm_config: Any, settings: Settings) -> None:
    """Refuses what is not supported, in a sentence.

    Raises:
        ValueError: It is not.
    """
    import vllm  # pyright: ignore[reportMissingImports]  # an extra
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

    found = tuple(int(part) for part in re.findall(r"\d+", vllm.__version__)[:2])
    parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
    block = settings.selector.query_block
    chunk = min(
        scheduler.max_num_batched_tokens,
        scheduler.long_prefill_token_threshold or scheduler.max_num_batched_tokens,
    )
    for wrong, sentence in (
        (
            found != VERSION,
            f"StreamKL's plugin is for vLLM {'.'.join(map(str, VERSION))}, and {vllm.__version__} is installed: "
            f"install that version, or take 'streamkl' out of the config to serve the dense model",
        ),
        (
            not (current_platform.is_cpu() or current_platform.is_cuda_alike()),
            "sparse prefill in vLLM runs on CPUs and GPUs: take 'streamkl' out of the config",
        ),
        (
            parallel.tensor_parallel_size > 1 and isinstance(settings.selector, OracleSelector),
            "the oracle selects by the mean of all heads, which no rank of tensor parallelism has: use indexers, or "
            "--tensor-parallel-size 1",
        ),
        (
            isinstance(settings.selector, OracleSelector) and settings.selector.per_kv_head,
            "sparse prefill in vLLM has one selection for all heads: take 'per_kv_head' out of the selector",
        ),
        (
            parallel.pipeline_parallel_size > 1 and settings.indexers is not None,
            "indexers are for all layers of a model, of which a rank of pipeline parallelism has a part: use "
            "--pipeline-parallel-size 1",
        ),
        (
            max(getattr(parallel, f"{kind}_context_parallel_size", 1) for kind in ("decode", "prefill")) > 1,
            "sparse prefill in vLLM does not run with context parallelism",
        ),
        (vllm_config.speculative_config is not None, "sparse prefill in vLLM does not run with speculative decoding"),
        (vllm_config.kv_transfer_config is not None, "sparse prefill in vLLM does not transfer KV caches"),
        (
            vllm_config.cache_config.cache_dtype != "auto",
            f"sparse prefill reads a KV cache of the model's dtype: got {vllm_config.cache_config.cache_dtype}",
        ),
        (
            scheduler.scheduler_cls not in (None, SCHEDULER),
            f"chunks of prompts must end with query blocks, which {SCHEDULER} sees to: got {scheduler.scheduler_cls}",
        ),
        (
            chunk < block,
            f"a chunk of a prompt must hold a query block of {block} tokens: got chunks of {chunk} "
            f"(--max-num-batched-tokens, --long-prefill-token-threshold)",
        ),
    ):
        if wrong:
            raise ValueError(sentence)
    if settings.indexers is not None:
        assert settings.description is not None, "a folder has a description"
        import torch

        ours = describe_model(vllm_config.model_config.hf_config, torch.empty(0))  # its weights are not loaded yet
        check_model(settings.indexers, settings.description, ours)
