"""The backends of sparse layers, by the backend of vLLM's that each extends."""

from __future__ import annotations

import functools
import importlib
from typing import Any

BACKENDS = {
    "CPU_ATTN": ("STREAMKL_CPU", f"{__name__}.cpu"),
    "FLASH_ATTN": ("STREAMKL_FLASH", f"{__name__}.flash"),
    "TRITON_ATTN": ("STREAMKL_TRITON", f"{__name__}.triton"),
}
"""The name and the module of each, by the name of vLLM's own."""


@functools.cache
def backend_for(dense: str) -> Any:
    """The class of a sparse backend, which vLLM knows by its name from then on.

    Args:
        dense: The name of vLLM's own backend of the layer.

    Raises:
        ValueError: None extends it.
    """
    from vllm.v1.attention.backends.registry import register_backend  # pyright: ignore[reportMissingImports]  # an extra

    if dense not in BACKENDS:
        raise ValueError(
            f"sparse prefill extends vLLM's backends {', '.join(BACKENDS)}, and not {dense}: choose one of them by "
            f"--attention-backend, or take 'streamkl' out of the config"
        )
    name, module = BACKENDS[dense]
    register_backend(name, f"{module}.SparseBackend")
    return importlib.import_module(module).SparseBackend
