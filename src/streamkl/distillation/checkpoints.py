"""Atomic checkpoints: written under another name, marked as complete, then renamed."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from streamkl import durable

MARKER, PREFIX, STAGING = "complete.json", "checkpoint-", ".writing"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; the message names the last good one."""


def finish(staged: Path, folder: Path, about: dict[str, Any]) -> None:
    """Marks a written checkpoint as complete, syncs it to the disk, and gives it its name.

    Args:
        staged: Where it was written.
        folder: Where it belongs.
        about: The content of the marker besides the digests of the files.
    """
    marker = json.dumps({**about, "files": durable.digests(staged)}, indent=2)
    (staged / MARKER).write_text(marker + "\n")
    durable.replace_folder(staged, folder)


def about(folder: Path) -> dict[str, Any] | None:
    """The content of a checkpoint's marker; ``None`` if the checkpoint is not whole."""
    try:
        found = json.loads((folder / MARKER).read_text())
        if all(durable.digest(folder / name) == wanted for name, wanted in found["files"].items()):
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
        # Renamed first, so that a half-removed checkpoint never has its name.
        doomed = path.with_name(f".old-{path.name}")
        os.rename(path, doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def clean(output: Path) -> None:
    """Removes leftovers of an interrupted run."""
    for path in (output / STAGING, *output.glob(f".old-{PREFIX}*")):
        shutil.rmtree(path, ignore_errors=True)
