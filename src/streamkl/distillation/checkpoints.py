"""Checkpoints that are whole or not there: written under another name, marked as complete, then renamed."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MARKER, PREFIX, STAGING = "complete.json", "checkpoint-", ".writing"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; the message says which one is the last good one."""


def finish(staged: Path, folder: Path, about: dict[str, Any]) -> None:
    """Marks a written checkpoint as complete, makes sure that it is on the disk, and gives it its name.

    Args:
        staged: Where it was written.
        folder: Where it belongs.
        about: What the marker says besides the files' digests.
    """
    digests = {str(path.relative_to(staged)): digest(path) for path in _files(staged)}
    (staged / MARKER).write_text(json.dumps({**about, "files": digests}, indent=2) + "\n")
    for path in (*_files(staged), staged):
        _sync(path)
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(staged, folder)
    _sync(folder.parent)


def about(folder: Path) -> dict[str, Any] | None:
    """What the marker of a checkpoint says; ``None`` if it is not whole."""
    try:
        found = json.loads((folder / MARKER).read_text())
        if all(digest(folder / name) == wanted for name, wanted in found["files"].items()):
            return found
    except (OSError, ValueError, KeyError):
        pass
    return None


def steps(output: Path) -> list[tuple[int, Path]]:
    """The checkpoints of a run by their step, whole or not."""
    names = ((re.fullmatch(rf"{PREFIX}(\d+)", path.name), path) for path in output.glob(f"{PREFIX}*"))
    return sorted((int(match[1]), path) for match, path in names if match)


def latest(output: Path) -> Path | None:
    """The last checkpoint of a run that is whole."""
    return next((path for _, path in reversed(steps(output)) if about(path) is not None), None)


def rotate(output: Path, keep: int) -> None:
    """Removes all but the last ``keep`` checkpoints."""
    for _, path in steps(output)[:-keep]:
        # Renamed first, so that a checkpoint of which half is gone is never found under its name.
        doomed = path.with_name(f".old-{path.name}")
        os.rename(path, doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def clean(output: Path) -> None:
    """Removes what an interrupted run left under other names."""
    for path in (output / STAGING, *output.glob(f".old-{PREFIX}*")):
        shutil.rmtree(path, ignore_errors=True)


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            found.update(piece)
    return found.hexdigest()


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def _sync(path: Path) -> None:
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:  # Windows opens no folders
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
