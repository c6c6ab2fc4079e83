"""Sparse prefill in vLLM: a plugin that serves a checkpoint with a folder of indexers, or one that was saved sparse.

vLLM loads it by its entry point (``vllm.general_plugins``). ``streamkl`` in a model's config, or in ``--hf-overrides``,
switches it on; every other model is vLLM's own.
"""

from __future__ import annotations

import logging

from streamkl.integrations.vllm.families import ARCHITECTURES, SPARSE

__all__ = ["register"]


def register() -> None:
    """The entry point: makes the sparse models known to vLLM, and looks at configs of their architectures.

    Nothing of vLLM is replaced, and a config without ``streamkl`` is left alone. It may be called several times.
    """
    try:
        from vllm import ModelRegistry  # pyright: ignore[reportMissingImports]  # an extra
        from vllm.model_executor.models.config import MODELS_CONFIG_MAP  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        logging.getLogger(__name__).warning("StreamKL does not know this vLLM, and serves no sparse model: %s", error)
        return
    from streamkl.integrations.vllm.config import hook_after

    for architecture in ARCHITECTURES:
        ModelRegistry.register_model(f"{SPARSE}{architecture}", f"{__name__}.models:{SPARSE}{architecture}")
        MODELS_CONFIG_MAP[architecture] = hook_after(MODELS_CONFIG_MAP.get(architecture))
