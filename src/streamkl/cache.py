"""Where what is built or compiled once is kept."""

from __future__ import annotations

import os
from pathlib import Path


def directory() -> Path:
    """``STREAMKL_CACHE``, or ``streamkl`` in the user's cache directory."""
    root = os.environ.get("STREAMKL_CACHE")
    return Path(root) if root else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "streamkl"
