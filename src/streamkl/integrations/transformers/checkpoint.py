"""Whether a path names a model of transformers, before a hub is asked, and how long the sequences are that it reads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def check_checkpoint(model: str | os.PathLike[str]) -> None:
    """Refuses a path that is no model's folder. What may be a name on a hub is let through.

    Raises:
        ValueError: The path is not there, or has no model; the message says which.

    Example:
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
    """Refuses sequences that are longer than a model was made for, where its config says it.

    Raises:
        ValueError: They are.
    """
    room = getattr(config.get_text_config(), "max_position_embeddings", None)
    if room is not None and length > room:
        raise ValueError(f"a length of {length:,} tokens is more than the {room:,} that the model was made for")
