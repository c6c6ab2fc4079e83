"""The description of a model's indexers: written, and compared with a model's layers."""

from __future__ import annotations

import reprlib
from pathlib import Path
from typing import Any

from torch import Tensor, nn

import streamkl
from streamkl.integrations.saved.description import check_description, describe_indexer, describe_model
from streamkl.integrations.saved.selectors import to_json
from streamkl.integrations.transformers.families import Family
from streamkl.sparse import Selector


def describe(model: nn.Module, family: Family, indexers: nn.ModuleDict, selector: Selector) -> dict[str, Any]:
    """The description of a model's indexers.

    Raises:
        ValueError: It could not be read again.
    """
    if not indexers:
        raise ValueError("there are no indexers to save")
    description = {
        "streamkl": streamkl.__version__,
        "family": family.name,
        "model": describe_model(model.config, fingerprint(model, family)),
        "indexer": describe_indexer(next(iter(indexers.values()))),
        "layers": [int(layer) for layer in indexers],
        "selector": to_json(selector),
    }
    check_description(description, "the description")
    return description


def fingerprint(model: nn.Module, family: Family) -> Tensor:
    """Some weights of a model's first attention module, by which it is recognised."""
    return family.fingerprint(next(iter(family.attentions(model).values())))


def check_indexers(path: Path, description: dict[str, Any], indexers: nn.ModuleDict) -> None:
    """Refuses indexers that differ from the description, as the model's own config may make them."""
    if not indexers:
        raise ValueError(f"{path} does not fit the model: none of its layers attends to all keys")
    said = {"heads": 1, "temperature": False, **description["indexer"]}
    for key, value in describe_indexer(next(iter(indexers.values()))).items():
        if said[key] != value:
            raise ValueError(f"{path} does not fit the model: its indexers have {key} = {said[key]}, not {value}")
    theirs, ours = sorted(description["layers"]), sorted(int(layer) for layer in indexers)
    if theirs != ours:
        raise ValueError(
            f"{path} does not fit the model: it is for layers {reprlib.repr(theirs)}, not {reprlib.repr(ours)}"
        )
