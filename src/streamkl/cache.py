"""Where what is built, compiled or converted once is kept."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def directory() -> Path:
    """``STREAMKL_CACHE``, or ``streamkl`` in the user's cache directory."""
    root = os.environ.get("STREAMKL_CACHE")
    return Path(root) if root else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "streamkl"


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds a lock on ``path``, so that of processes that start together one makes a thing and the others wait."""
    try:
        import fcntl
    except ImportError:  # Windows: each process makes its own, and the last rename counts
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
