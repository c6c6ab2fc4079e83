"""The entry ``streamkl`` of a model's config, as ``SparseModel.save_pretrained`` writes it."""

from __future__ import annotations

import dataclasses
from pathlib import PurePosixPath
from typing import Any

from streamkl.integrations.saved.schema import entries, one_of, text
from streamkl.integrations.saved.selectors import check_selector
from streamkl.sparse import IndexerSelector, Selector

FOLDER = "streamkl"
"""The folder of indexers inside of a model's folder."""


def check_folder(value: Any, place: str) -> None:
    """Refuses a value that is not the path of a folder inside the model's, on any system."""
    text(1000)(value, place)
    parts = PurePosixPath(value).parts
    if not parts or parts[0] == "/" or ".." in parts or any(character in value for character in "\\:"):
        raise ValueError(f"{place} must be a folder in the model's: got {value!r}")


check_settings = entries({"selector": check_selector, "decode": one_of("dense", "sparse")}, {"indexers": check_folder})
"""Raises a ``ValueError`` unless ``config.streamkl`` is as ``SparseModel.save_pretrained`` writes it."""


def as_saved(selector: Selector | None, saved: Selector | None) -> Selector | None:
    """The selector with the saved ``normalise``, unless it sets its own."""
    if isinstance(selector, IndexerSelector) and isinstance(saved, IndexerSelector) and selector.normalise is None:
        return dataclasses.replace(selector, normalise=saved.normalise)
    return selector
