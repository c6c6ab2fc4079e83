"""The settings of a sparse model: ``streamkl`` of its config, or of ``--hf-overrides``, which come first."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

from streamkl.integrations.saved import folder
from streamkl.integrations.saved.beside import indexers_beside
from streamkl.integrations.saved.description import check_description
from streamkl.integrations.saved.schema import entries, one_of, text
from streamkl.integrations.saved.selectors import check_selector, from_json
from streamkl.integrations.saved.settings import as_saved, check_settings
from streamkl.sparse import IndexerSelector, RandomSelector, Selector

check_given = entries({}, {"selector": check_selector, "decode": one_of("dense", "sparse"), "indexers": text(4096)})
"""Raises a ``ValueError`` unless ``--hf-overrides`` say what the plugin knows; a user may name any folder."""


class Settings(NamedTuple):
    """What a sparse model selects keys with.

    Attributes:
        selector: Selects the keys of prompts, and of decoded tokens if ``decode`` is sparse.
        decode: How a decoded token attends.
        indexers: The folder of indexers, if the selector is one of an indexer.
        description: Of that folder, checked.
    """

    selector: Selector
    decode: Literal["dense", "sparse"]
    indexers: Path | None
    description: dict[str, Any] | None


def settings_of(model_config: Any) -> Settings | None:
    """The settings of a model, or ``None`` if it is to be vLLM's own.

    Args:
        model_config: vLLM's ``ModelConfig``.

    Raises:
        ValueError: The settings are wrong, or their indexers are not there or not whole.
    """
    value = getattr(model_config.hf_config, "streamkl", None)
    if value is None:
        return None
    overrides = model_config.hf_overrides
    given = isinstance(overrides, dict) and "streamkl" in overrides
    if given:
        check_given(value, "'streamkl' of --hf-overrides")
    else:
        check_settings(value, f"'streamkl' in the config of {model_config.model}")
    place = None
    if "indexers" in value:
        options = {} if model_config.revision is None else {"revision": model_config.revision}
        place = (
            Path(value["indexers"]).expanduser()
            if given
            else indexers_beside(model_config.model, value["indexers"], options)
        )
    description = None if place is None else _description(place)
    selector = _selector(value, description)
    if not isinstance(selector, IndexerSelector):
        place = description = None
    return Settings(selector, value.get("decode", "dense"), place, description)


def _description(place: Path) -> dict[str, Any]:
    _, description = folder.read(place)
    check_description(description, str(place / folder.DESCRIPTION))
    return description


def _selector(value: dict[str, Any], description: dict[str, Any] | None) -> Selector:
    """The selector of the settings, or else the one that the indexers were saved with."""
    saved = None if description is None else from_json(description["selector"])
    selector = as_saved(from_json(value["selector"]) if "selector" in value else saved, saved)
    if selector is None:
        raise ValueError("'streamkl' has neither a selector nor a folder of indexers: there is nothing to select by")
    if isinstance(selector, RandomSelector):
        raise ValueError("random keys are not served: a prompt would draw others in every chunk")
    if isinstance(selector, IndexerSelector):
        if description is None:
            raise ValueError("an indexer's selector needs a folder of indexers: name it as 'indexers' of 'streamkl'")
        activation = description["indexer"]["activation"]
        if activation != selector.activation:
            raise ValueError(f"the indexers have activation {activation!r}, and the selector {selector.activation!r}")
    return selector
