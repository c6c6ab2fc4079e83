"""The cache folder for things that are built, compiled or converted once, and the rules for native code in it.

Native code is sealed: the file ends in the digest of what comes before, which loaders of libraries ignore. A file that
is truncated, empty or without a seal is made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

SEAL = b"\nstreamkl sha256 "
ELSEWHERE = "set STREAMKL_CACHE to a folder of your own"


def directory() -> Path:
    """``STREAMKL_CACHE``, or ``streamkl`` in the user's cache directory; of a user without one `private_directory`."""
    root = os.environ.get("STREAMKL_CACHE")
    if root:
        return Path(root)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "streamkl"
    except RuntimeError:  # a user ID that has no name and no HOME, as containers are given
        return private_directory()


def private_directory() -> Path:
    """A folder of the user's own under the temporary one, for native code that `directory` cannot keep."""
    return Path(tempfile.gettempdir()) / f"streamkl-{os.geteuid()}"


@contextlib.contextmanager
def locked(path: Path, busy: str = "") -> Iterator[None]:
    """Holds a lock on ``path``, so that of processes that start together one builds and the others wait.

    With a sentence for ``busy`` the others do not wait, but raise it as a ``BlockingIOError``.
    """
    from filelock import FileLock, Timeout

    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    try:
        held = FileLock(path).acquire(timeout=0 if busy else -1)
    except Timeout:
        raise BlockingIOError(busy) from None
    with held:
        yield


def make(folder: Path) -> None:
    """Makes a folder for native code. ``PermissionError`` if the user cannot write it, or others can."""
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        reason = unsafe(folder)
    except OSError as error:
        reason = f"{folder} cannot be made ({error.strerror}); {ELSEWHERE}"
    if reason is None and not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
        reason = f"{folder} cannot be written; {ELSEWHERE}"
    if reason is not None:
        raise PermissionError(reason)


def unsafe(path: Path) -> str | None:
    """Why native code from a file or folder must not be run, and what to do, or ``None`` if it may.

    It must belong to the user or to root, and nobody else may be able to change it. In a sticky folder, such as
    ``/tmp``, others can add files and not change those that are there.
    """
    for status in (path.lstat(), path.stat()):  # of a link too: others may have put it there
        if status.st_uid not in (os.geteuid(), 0):
            return f"{path} belongs to another user, number {status.st_uid}; {ELSEWHERE}"
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode) and mode & stat.S_ISVTX:
        return None
    if mode & stat.S_IWOTH:
        return f"{path} can be written by every user; chmod o-w {path}, or {ELSEWHERE}"
    if mode & stat.S_IWGRP and not _is_private(path.stat().st_gid):
        return f"{path} can be written by its group; chmod g-w {path}, or {ELSEWHERE}"
    return None


def write(path: Path, content: bytes) -> None:
    """Writes native code and its seal, so that ``path`` is whole or as it was, even after a loss of power.

    The umask decides who may read it; nobody but the user may write it.
    """
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    handle = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    try:
        with open(handle, "wb") as file:
            file.write(content + SEAL + hashlib.sha256(content).hexdigest().encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name, too
    finally:
        os.close(folder)


def read(path: Path) -> bytes | None:
    """Native code as it was written, or ``None`` if it is not there, not whole, not readable or not safe."""
    try:
        if unsafe(path.parent) is not None or unsafe(path) is not None:
            return None
        content, seal, digest = path.read_bytes().rpartition(SEAL)
    except OSError:
        return None
    return content if seal and hashlib.sha256(content).hexdigest().encode() == digest else None


def use(path: Path) -> None:
    """Says that a file was used, which `prune` goes by."""
    with contextlib.suppress(OSError):  # the cache may be somebody else's, and read-only
        os.utime(path)


def prune(folder: Path, pattern: str, keep: int) -> None:
    """Removes all files but the ``keep`` last used ones, and what processes that were killed left of `write`.

    Whoever writes to the folder holds a lock, and so must the caller.
    """
    for leftover in folder.glob(f"{pattern}.*.tmp"):
        leftover.unlink(missing_ok=True)
    for file in sorted(folder.glob(pattern), key=lambda file: file.stat().st_mtime, reverse=True)[keep:]:
        file.unlink(missing_ok=True)


def _is_private(group: int) -> bool:
    """Whether a group has no other user: root's, and the one that Linux makes for each user, by the user's name."""
    if group == 0:
        return True
    import grp
    import pwd

    try:
        user, found = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(group)
    except KeyError:  # a number without a name
        return False
    return found.gr_name == user and set(found.gr_mem) <= {user}
