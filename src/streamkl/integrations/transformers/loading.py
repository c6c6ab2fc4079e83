"""``from_pretrained`` of a model that was saved sparse, or with an implementation of StreamKL, gives a sparse model.

transformers has no hook for this, so its ``PreTrainedModel.from_pretrained`` is wrapped, once. The wrapper does nothing
for models whose config has no ``streamkl``, unless an implementation of StreamKL is asked for.
"""

from __future__ import annotations

import functools
from typing import Any

from transformers import PreTrainedModel

from streamkl.integrations.saved.beside import indexers_beside
from streamkl.integrations.saved.settings import check_settings
from streamkl.integrations.transformers.model import attach_loaded, configs_of
from streamkl.integrations.transformers.selection import PREFIX

DOWNLOAD = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
"""The options of ``from_pretrained`` for the source of files."""

MARK = "finds_streamkl"
"""An attribute of the wrapped ``from_pretrained``."""


def wrap_from_pretrained() -> None:
    """Wraps it, unless it is wrapped already."""
    original = PreTrainedModel.from_pretrained.__func__  # pyright: ignore[reportFunctionMemberAccess]
    if hasattr(original, MARK):
        return

    @functools.wraps(original)
    def from_pretrained(cls: type, name_or_path: Any, *args: Any, **options: Any) -> Any:
        given = options.get("attn_implementation", getattr(options.get("config"), "_attn_implementation", None))
        loaded = original(cls, name_or_path, *args, **options)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        settings, *_ = [config.__dict__.pop("streamkl", None) for config in configs_of(model)]
        if settings is not None or str(given).startswith(PREFIX):
            attach(model, settings, given, name_or_path, options)
        return loaded

    setattr(from_pretrained, MARK, True)
    PreTrainedModel.from_pretrained = classmethod(from_pretrained)  # pyright: ignore[reportAttributeAccessIssue]


def attach(
    model: PreTrainedModel, settings: Any, given: str | None, name_or_path: Any, options: dict[str, Any]
) -> None:
    """Makes a loaded model sparse.

    Args:
        model: The model.
        settings: ``streamkl`` of its config, unchecked; ``None`` if there is none.
        given: The attention implementation that was asked for, if one was.
        name_or_path: The source of the model.
        options: Of ``from_pretrained``.

    Raises:
        ValueError: The settings are wrong, or point to indexers that do not exist or do not belong to the model.
    """
    if settings is not None:
        check_settings(settings, f"'streamkl' in the config of {name_or_path}")
    where = None if settings is None else settings.get("indexers")
    attach_loaded(
        model, settings, None if where is None else indexers_beside(name_or_path, where, _download(options)), given
    )


def _download(options: dict[str, Any]) -> dict[str, Any]:
    """The options of ``from_pretrained`` that say where files are."""
    return {name: options[name] for name in DOWNLOAD if name in options}
