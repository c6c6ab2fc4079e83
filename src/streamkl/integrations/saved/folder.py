"""Indexers of a model as a folder: weights, a description, and a marker that both are whole.

The marker holds the digests of both files, so a truncated or changed folder is not loaded. A folder with other content
and no marker is never written to. Other files in a folder of indexers stay.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from streamkl import durable
from streamkl.integrations.saved import schema

WEIGHTS, DESCRIPTION, MARKER = "indexers.safetensors", "indexers.json", "complete.json"
FORMAT = 1
DTYPES = ("BF16", "F16", "F32", "F64")
"""The allowed dtypes of weights, by their names in safetensors."""
LEFT = (durable.STAGING, durable.READY)
"""Possible leftovers of a killed writer in a folder."""
HEADER = 1 << 23
"""The most bytes of the names and shapes of the weights."""


def write(folder: str | os.PathLike[str], weights: dict[str, Tensor], description: dict[str, Any]) -> Path:
    """Writes the three files to a folder, in place of existing ones.

    A link to a folder is followed. A process that dies leaves the old files, the new ones, or a folder that is not
    loaded and may be written to again.

    Raises:
        ValueError: There is something else at that place.
    """
    check_place(folder)
    with durable.replacing_files(Path(os.path.realpath(folder)), (WEIGHTS, DESCRIPTION, MARKER)) as staged:
        save_file({name: weight.detach().contiguous() for name, weight in weights.items()}, staged / WEIGHTS)
        (staged / DESCRIPTION).write_text(json.dumps({"format": FORMAT, **description}, indent=2) + "\n")
        (staged / MARKER).write_text(json.dumps(durable.digests(staged), indent=2) + "\n")
    return Path(folder)


def check_place(folder: str | os.PathLike[str]) -> None:
    """Refuses to write to anything but a folder of indexers, an empty folder, or a free path.

    Raises:
        ValueError: It is a file, or has files and no marker.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: indexers are written to a folder")
    if not folder.is_dir() or all(path.name in LEFT for path in folder.iterdir()):
        return
    if _digests(folder / MARKER) is None and _digests(folder / durable.READY / MARKER) is None:
        raise ValueError(f"{folder} is there already and holds no indexers: choose another folder")


def read(folder: str | os.PathLike[str]) -> tuple[dict[str, list[int]], dict[str, Any]]:
    """The shapes of a folder's weights, by name, and its description, of which only the format is checked.

    Raises:
        ValueError: It is not there, not whole, or of another format; the message says which.
    """
    folder = Path(folder)
    marked = marker(folder)
    digests = _digests(marked)
    assert digests is not None, "it is a marker"
    for name in (WEIGHTS, DESCRIPTION):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} has no {name}: copy the whole folder")
        if durable.digest(folder / name) != digests[name]:
            raise ValueError(f"{folder / name} is not what was written: it is damaged, or was changed; copy it again")
    description = schema.read(folder / DESCRIPTION)
    if not isinstance(description, dict) or "format" not in description:
        raise ValueError(f"{folder / DESCRIPTION} describes no indexers")
    form = description.pop("format")
    if type(form) is not int or form != FORMAT:
        raise ValueError(f"{folder} has format {str(form)[:20]}, and this StreamKL reads {FORMAT}: upgrade it")
    return _shapes(folder / WEIGHTS), description


def check_shapes(folder: str | os.PathLike[str], wanted: dict[str, Tensor], shapes: dict[str, list[int]]) -> None:
    """Refuses weights of other names or shapes than a model's indexers have.

    Args:
        folder: The folder, for the message.
        wanted: The indexers' weights by their names in the folder; they may be on the meta device.
        shapes: The shapes in the folder, as `read` returns them.

    Raises:
        ValueError: A weight is missing, too many, or of another shape.
    """
    if wanted.keys() != shapes.keys():
        missing, more = sorted(wanted.keys() - shapes.keys()), sorted(shapes.keys() - wanted.keys())
        raise ValueError(f"{folder} does not fit the model: it lacks {missing[:3]} and has {more[:3]} besides")
    for name, weight in wanted.items():
        if list(weight.shape) != shapes[name]:
            raise ValueError(
                f"{folder} does not fit the model: {name} must be of shape {list(weight.shape)}, and is of "
                f"{shapes[name]}"
            )


def read_weights(folder: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The weights of a folder whose shapes have been checked."""
    return load_file(Path(folder) / WEIGHTS)


def marker(folder: Path) -> Path:
    """The file that says that a folder is whole.

    Raises:
        ValueError: There is none; the message says where it may be.
    """
    if _digests(folder / MARKER) is not None:
        return folder / MARKER
    if not folder.is_dir():
        raise ValueError(f"there is no folder of indexers at {folder}")
    inside = [path for path in sorted(folder.iterdir()) if path.name not in LEFT and _digests(path / MARKER)]
    if inside:
        raise ValueError(f"{folder} is no folder of indexers: {' or '.join(map(str, inside))} is")
    if (folder / MARKER).is_file():
        raise ValueError(f"{folder / MARKER} is damaged, or is not that of a folder of indexers")
    raise ValueError(f"{folder} has no {MARKER}: writing it did not end, or it is no folder of indexers")


def _digests(path: Path) -> dict[str, str] | None:
    """The content of a marker: the digests of both files; ``None`` if it is not such a marker."""
    try:
        found = schema.read(path) if path.is_file() else None
    except ValueError:
        return None
    if not isinstance(found, dict) or found.keys() != {WEIGHTS, DESCRIPTION}:
        return None
    whole = all(isinstance(digest, str) and re.fullmatch("[0-9a-f]{64}", digest) for digest in found.values())
    return found if whole else None


def _shapes(path: Path) -> dict[str, list[int]]:
    """The shapes in a file of weights, of which no weight is read."""
    with path.open("rb") as file:
        if int.from_bytes(file.read(8), "little") > HEADER:
            raise ValueError(f"{path} is damaged: its header has more than {HEADER:,} bytes")
    try:
        with safe_open(path, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  # it is no dictionary
            shapes = {name: each.get_shape() for name, each in slices.items()}
            dtypes = {each.get_dtype() for each in slices.values()}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} holds no weights: {error}") from error
    if unknown := sorted(dtypes.difference(DTYPES)):
        raise ValueError(f"{path} must have weights of {', '.join(DTYPES)}: got {', '.join(unknown)}")
    return shapes
