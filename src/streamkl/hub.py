"""Names of models on the Hugging Face hub, told from paths before anything waits for a network."""

from __future__ import annotations

import re
from pathlib import Path

NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
"""``model`` or ``owner/model``."""


def check_path(model: str | Path) -> bool:
    """Whether a model is a path; ``False`` for what may be a name on the hub.

    Raises:
        ValueError: Nothing is there, and it is no name that the hub could have.

    Examples:
        >>> check_path("Qwen/Qwen3-0.6B")
        False
        >>> check_path("runs/one/model")
        Traceback (most recent call last):
            ...
        ValueError: there is no folder runs/one/model, so no model
    """
    if Path(model).expanduser().exists():
        return True
    if isinstance(model, str) and NAME.fullmatch(model):
        return False
    raise ValueError(f"there is no folder {model}, so no model")
