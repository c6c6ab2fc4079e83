"""Refuses a transformers or a torch that is too old, with a clear message."""

from __future__ import annotations

import importlib.metadata
import re

from streamkl.extras import how_to_install

MINIMUM = {"transformers": (5, 20), "torch": (2, 6)}
"""The oldest versions that are tested."""


def check_requirements() -> None:
    """Raises an ``ImportError`` that says what is missing or too old, and what to do."""
    for name, minimum in MINIMUM.items():
        wanted = ".".join(map(str, minimum))
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            raise ImportError(f"{name} is not installed: {how_to_install('hf')}") from None
        if tuple(int(part) for part in re.findall(r"\d+", found)[:2]) < minimum:
            raise ImportError(f"{name} {wanted} or later is needed, and {found} is installed: pip install -U {name}")
