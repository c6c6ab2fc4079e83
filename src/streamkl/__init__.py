"""StreamKL: attention distillation by KL divergence, tile by tile, in O(N) memory."""

from importlib.metadata import version as _version

__version__ = _version("streamkl")
__all__ = ["__version__", "attention_kl", "attention_lse", "attention_mass", "indexer_kl", "topk_recall"]

try:
    from streamkl.api import attention_kl, attention_lse, indexer_kl
    from streamkl.sparse.diagnostics import attention_mass, topk_recall
except (ImportError, AttributeError, OSError) as _error:
    # A missing, broken or too old torch. The package itself still imports, so that `streamkl doctor` can say so.
    _reason = _error

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module 'streamkl' has no attribute {name!r}")
        raise ImportError(
            f"streamkl.{name} did not load ({type(_reason).__name__}: {_reason}); "
            f"run `streamkl doctor`, which says what is missing"
        ) from _reason
