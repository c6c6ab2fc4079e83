"""Atomic files and folders: written under another name, synced to the disk, then renamed."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

STAGING, READY = ".streamkl-writing", ".streamkl-written"
"""Folders inside the target folder: of files while they are written, and when all of them are written."""


@contextlib.contextmanager
def replacing_files(folder: Path, names: Sequence[str]) -> Iterator[Path]:
    """A staging folder; its files replace those of the same names in ``folder`` when the ``with`` block ends.

    Everything else in the folder stays; if the block raises, nothing changes. The last of several names is the marker
    of the others: it is removed before they are replaced and written after them, so that a process that dies in between
    leaves no marker. The next call then finishes the interrupted one. One writer at a time.

    Args:
        folder: Created if it does not exist. A link among its files is replaced, not its target.
        names: The files, all of which the block has to write.

    Examples:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from streamkl.durable import replacing_files
        >>> with tempfile.TemporaryDirectory() as temporary:
        ...     with replacing_files(Path(temporary), ["data.txt"]) as staged:
        ...         _ = (staged / "data.txt").write_text("all of it")
        ...     (Path(temporary) / "data.txt").read_text()
        'all of it'
    """
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / READY).is_dir() and not (folder / READY).is_symlink():
        _publish(folder, names)
    for left in (STAGING, READY):
        _remove(folder / left)
    try:
        (folder / STAGING).mkdir()
        yield folder / STAGING
        missing = [name for name in names if not (folder / STAGING / name).is_file()]
        assert not missing, f"the block did not write {', '.join(missing)}"
        sync_all(folder / STAGING)
        os.rename(folder / STAGING, folder / READY)
    except BaseException:
        _remove(folder / STAGING)
        if made:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise
    _publish(folder, names)


def replace_folder(staged: Path, folder: Path) -> None:
    """Syncs a folder to the disk and renames it to ``folder``, replacing what is there."""
    sync_all(staged)
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(staged, folder)
    sync(folder.parent)


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            found.update(piece)
    return found.hexdigest()


def digests(folder: Path) -> dict[str, str]:
    """The digest of every file in a folder, by its path there."""
    return {str(path.relative_to(folder)): digest(path) for path in files(folder)}


def files(folder: Path) -> list[Path]:
    """Every file in a folder and in those inside it."""
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


def sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:  # Windows opens no folders
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_all(folder: Path) -> None:
    """Waits until a folder and all files in it are on the disk."""
    for path in (*files(folder), folder):
        sync(path)


def _publish(folder: Path, names: Sequence[str]) -> None:
    """Moves the finished files to their place. It can be repeated after an interruption at any point."""
    ready, marker = folder / READY, names[-1]
    if (ready / marker).exists():  # else all were moved, and this is what is left
        if len(names) > 1:
            (folder / marker).unlink(missing_ok=True)
            sync(folder)
        for name in names[:-1]:
            if (ready / name).exists():
                os.replace(ready / name, folder / name)
        sync(folder)
        os.replace(ready / marker, folder / marker)
    _remove(ready)
    sync(folder)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
