"""Checks of a model's path, before the hub is asked, and of its context length."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from streamkl.hub import check_path

PATIENCE = 10.0
"""How many seconds the hub has for an answer."""


def check_checkpoint(model: str | os.PathLike[str]) -> None:
    """Refuses a path that is not a model's folder, and a name that the hub does not have or that it cannot be asked.

    Raises:
        ValueError: The path is not there, or has no model, or the hub does not answer; the message says which.

    Examples:
        >>> from streamkl.integrations.transformers.checkpoint import check_checkpoint
        >>> check_checkpoint("./nothing")
        Traceback (most recent call last):
            ...
        ValueError: there is no folder ./nothing, so no model
    """
    path = Path(model).expanduser()
    if not check_path(model if isinstance(model, str) else path):
        _ask_hub(str(model))
        return
    if not path.is_dir():
        raise ValueError(f"there is no folder {model}, so no model")
    if not (path / "config.json").is_file():
        raise ValueError(f"{model} has no config.json: it is no model of transformers")


def _ask_hub(model: str) -> None:
    """Asks for a model's config once, if no cache has it: transformers asks for several files, and again and again."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(model, "config.json"), str):
        return
    try:
        get_hf_file_metadata(hf_hub_url(model, "config.json"), timeout=PATIENCE)
    except Exception as error:  # of the network, of the hub, of its offline mode
        why = (str(error) or type(error).__name__).strip().splitlines()[0]
        raise ValueError(f"there is no folder {model}, and the hub does not give its config.json: {why}") from None


def check_length(config: Any, length: int) -> None:
    """Refuses sequences that are longer than the context of a model, if its config has one.

    Raises:
        ValueError: They are longer.
    """
    room = getattr(config.get_text_config(), "max_position_embeddings", None)
    if room is not None and length > room:
        raise ValueError(f"a length of {length:,} tokens is more than the {room:,} that the model was made for")
