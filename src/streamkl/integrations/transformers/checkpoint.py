"""Checks of a model's path, before the hub is asked, and of its context length."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def check_checkpoint(model: str | os.PathLike[str]) -> None:
    """Refuses a path that is not a model's folder. A possible name on a hub passes.

    Raises:
        ValueError: The path is not there, or has no model; the message says which.

    Examples:
        >>> from streamkl.integrations.transformers.checkpoint import check_checkpoint
        >>> check_checkpoint("./nothing")
        Traceback (most recent call last):
            ...
        ValueError: there is no folder ./nothing, so no model
    """
    path = Path(model).expanduser()
    is_path = not isinstance(model, str) or path.is_absolute() or model.startswith((".", "~")) or path.exists()
    if not is_path:
        return
    if not path.is_dir():
        raise ValueError(f"there is no folder {model}, so no model")
    if not (path / "config.json").is_file():
        raise ValueError(f"{model} has no config.json: it is no model of transformers")


def check_length(config: Any, length: int) -> None:
    """Refuses sequences that are longer than the context of a model, if its config has one.

    Raises:
        ValueError: They are longer.
    """
    room = getattr(config.get_text_config(), "max_position_embeddings", None)
    if room is not None and length > room:
        raise ValueError(f"a length of {length:,} tokens is more than the {room:,} that the model was made for")
