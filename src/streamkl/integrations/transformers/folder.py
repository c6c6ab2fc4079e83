"""Indexers of a model as a folder: weights, a description, and a marker that says that both are whole.

It is written under another name and renamed when all of it is there. The marker holds the digests of the files, so a
folder that was cut off, or changed since, is not loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

WEIGHTS, DESCRIPTION, MARKER = "indexers.safetensors", "indexers.json", "complete.json"
FORMAT = 1


def write(folder: str | os.PathLike[str], weights: dict[str, Tensor], description: dict[str, Any]) -> Path:
    """Writes a folder, in place of one that was there before.

    Raises:
        ValueError: There is something else at that place.
    """
    folder = Path(folder)
    if folder.exists() and not (folder / DESCRIPTION).exists() and (folder.is_file() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there already and holds no indexers: choose another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
        made, old = Path(temporary) / "new", Path(temporary) / "old"
        made.mkdir()
        save_file({name: weight.detach().contiguous() for name, weight in weights.items()}, made / WEIGHTS)
        (made / DESCRIPTION).write_text(json.dumps({"format": FORMAT, **description}, indent=2) + "\n")
        digests = {name: _digest(made / name) for name in (WEIGHTS, DESCRIPTION)}
        (made / MARKER).write_text(json.dumps(digests, indent=2) + "\n")
        if folder.exists():
            os.rename(folder, old)
        os.rename(made, folder)
        shutil.rmtree(old, ignore_errors=True)
    return folder


def read(folder: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The weights and the description of a folder.

    Raises:
        ValueError: It is not there, not whole, or of another format; the message says which.
    """
    folder = Path(folder)
    marked = marker(folder)
    try:
        digests = json.loads(marked.read_text())
    except ValueError as error:
        raise ValueError(f"{marked} is damaged: {error}") from error
    for name in (WEIGHTS, DESCRIPTION):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} has no {name}: copy the whole folder")
        if _digest(folder / name) != digests.get(name):
            raise ValueError(f"{folder / name} is not what was written: it is damaged, or was changed; copy it again")
    description = json.loads((folder / DESCRIPTION).read_text())
    if description["format"] != FORMAT:
        raise ValueError(f"{folder} has format {description['format']}, and this StreamKL reads {FORMAT}: upgrade it")
    return load_file(folder / WEIGHTS), description


def marker(folder: Path) -> Path:
    """The file that says that a folder is whole.

    Raises:
        ValueError: There is none; the message says where it may be.
    """
    if (folder / MARKER).is_file():
        return folder / MARKER
    if not folder.is_dir():
        raise ValueError(f"there is no folder of indexers at {folder}")
    inside = [path.parent for path in sorted(folder.glob(f"*/{MARKER}")) if (path.parent / WEIGHTS).is_file()]
    if inside:
        raise ValueError(f"{folder} is no folder of indexers: {' or '.join(map(str, inside))} is")
    raise ValueError(f"{folder} has no {MARKER}: writing it did not end, or it is no folder of indexers")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
