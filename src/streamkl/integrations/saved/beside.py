"""The folder of indexers beside a model, in its folder or on the hub."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from streamkl.integrations.saved import folder


def indexers_beside(name_or_path: Any, where: str, download: dict[str, Any]) -> Path:
    """The folder of indexers beside a model, from the hub if the model is from there.

    Args:
        name_or_path: The model's folder, or its name on the hub.
        where: The folder of indexers in it, checked by `check_folder`.
        download: Options of ``from_pretrained`` that say where files are, such as ``revision``.

    Raises:
        ValueError: The files are not there, or are links that leave the model's folder.
    """
    from transformers.utils.hub import cached_file

    names = (folder.WEIGHTS, folder.DESCRIPTION, folder.MARKER)
    try:
        files = [str(cached_file(str(name_or_path), f"{where}/{name}", **download)) for name in names]
    except OSError as error:
        raise ValueError(
            f"the config of {name_or_path} says that its indexers are in {where!r}, and they are not: copy that folder "
            f"too, or take 'streamkl' out of config.json"
        ) from error
    if os.path.isdir(str(name_or_path)):
        _check_inside(Path(str(name_or_path), str(download.get("subfolder") or "")), files)
    return Path(files[0]).parent


def _check_inside(model: Path, files: list[str]) -> None:
    """Refuses links that leave a model's folder; files of a hub's cache may be links to its blobs."""
    root = Path(os.path.realpath(model))
    inside = [root, *(parent.parent / "blobs" for parent in root.parents if parent.name == "snapshots")]
    for file in files:
        if not any(Path(os.path.realpath(file)).is_relative_to(place) for place in inside):
            raise ValueError(f"{file} is a link that leaves the model's folder: copy what it points to into {model}")
