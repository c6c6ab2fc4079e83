"""``from_pretrained`` of a model that was saved sparse gives the sparse model.

transformers has no place for this, so its ``PreTrainedModel.from_pretrained`` is wrapped, once. The wrapper does nothing
to models whose config has no ``streamkl``.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.utils import cached_file

from streamkl.integrations.transformers import folder
from streamkl.integrations.transformers.model import attach_saved

DOWNLOAD = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
"""The options of ``from_pretrained`` that say where files come from."""


def wrap_from_pretrained() -> None:
    """Wraps it, unless it is wrapped already."""
    original = PreTrainedModel.from_pretrained.__func__  # pyright: ignore[reportFunctionMemberAccess]
    if hasattr(original, "streamkl"):
        return

    @functools.wraps(original)
    def from_pretrained(cls: type, name_or_path: Any, *args: Any, **options: Any) -> Any:
        given = options.get("attn_implementation", getattr(options.get("config"), "_attn_implementation", None))
        loaded = original(cls, name_or_path, *args, **options)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        settings = getattr(model.config, "streamkl", None)
        if settings is not None:
            found = _indexers(name_or_path, settings.get("indexers"), options)
            attach_saved(model, found, given)
        return loaded

    from_pretrained.streamkl = True  # pyright: ignore[reportFunctionMemberAccess]
    PreTrainedModel.from_pretrained = classmethod(from_pretrained)  # pyright: ignore[reportAttributeAccessIssue]


def _indexers(name_or_path: Any, where: str | None, options: dict[str, Any]) -> Path | None:
    """The folder of indexers beside a model, from the hub if the model is from there."""
    if where is None:
        return None
    download = {name: options[name] for name in DOWNLOAD if name in options}
    names = (folder.WEIGHTS, folder.DESCRIPTION, folder.MARKER)
    files = [cached_file(str(name_or_path), f"{where}/{name}", **download) for name in names]
    return Path(files[0]).parent
