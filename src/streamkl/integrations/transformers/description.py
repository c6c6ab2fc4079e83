"""The description of a folder of indexers and of their model: written, checked, and compared."""

from __future__ import annotations

import reprlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

import streamkl
from streamkl.indexer import HeadIndexer, Indexer
from streamkl.integrations.transformers.families import Family
from streamkl.integrations.transformers.schema import (
    LARGEST,
    entries,
    integer,
    list_of,
    nullable,
    number,
    one_of,
    text,
)
from streamkl.integrations.transformers.selection import check_selector, to_json
from streamkl.sparse import Selector

ALIKE = 0.9
"""The least cosine between the fingerprints of a model and of the one that indexers were made for: a finetuned model is
near 1, another one near 0."""
NAME = 4096
"""The most characters of a model's name or path."""

SIZE = integer(0, LARGEST)
check_description = entries(
    {
        "streamkl": text(100),
        "family": text(100),
        "model": entries(
            {
                "name": text(NAME),
                "model_type": text(100),
                "hidden_size": SIZE,
                "num_hidden_layers": SIZE,
                "num_attention_heads": SIZE,
                "num_key_value_heads": nullable(SIZE),
                "fingerprint": list_of(number, 64),
            }
        ),
        "indexer": entries(
            {
                "kind": one_of("head", "lightning"),
                "head_dim": integer(1, LARGEST),
                "rope_dim": SIZE,
                "rope_layout": one_of("half", "interleaved"),
                "activation": one_of("relu", None),
            },
            {"heads": integer(1, LARGEST), "temperature": one_of(True, False)},
        ),
        "layers": list_of(SIZE, LARGEST),
        "selector": check_selector,
    }
)
"""Refuses a description with a ``ValueError`` unless each of its entries is of the right kind and size."""


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
        "model": describe_model(model, family),
        "indexer": describe_indexer(next(iter(indexers.values()))),
        "layers": [int(layer) for layer in indexers],
        "selector": to_json(selector),
    }
    check_description(description, "the description")
    return description


def describe_indexer(indexer: nn.Module) -> dict[str, Any]:
    """The arguments of an indexer."""
    assert isinstance(indexer, Indexer)
    return {
        "kind": "head" if isinstance(indexer, HeadIndexer) else "lightning",
        "heads": getattr(indexer, "heads", 1),
        "head_dim": indexer.head_dim,
        "rope_dim": indexer.rope_dim,
        "rope_layout": indexer.rope_layout,
        "activation": indexer.activation,
        "temperature": indexer.log_temperature is not None,
    }


def describe_model(model: Any, family: Family) -> dict[str, Any]:
    """The properties by which a model is recognised."""
    config = model.config.get_text_config()
    attention = next(iter(family.attentions(model).values()))
    name = str(getattr(model.config, "_name_or_path", ""))[:NAME]
    return {
        "name": "".join(character if character.isprintable() else "?" for character in name),
        "model_type": config.model_type,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "fingerprint": [round(float(x), 8) for x in family.fingerprint(attention)],
    }


def check_model(path: Path, description: dict[str, Any], model: nn.Module, family: Family) -> None:
    """Refuses indexers of another model."""
    theirs, ours = description["model"], describe_model(model, family)
    whose = f"{path} holds indexers for {theirs['name'] or 'a model'!r} ({theirs['model_type']})"
    for key in ours:
        if key not in ("name", "fingerprint") and theirs[key] != ours[key]:
            raise ValueError(
                f"{whose} with {key} = {theirs[key]}, and this model has {ours[key]}: use its own indexers"
            )
    if not theirs["fingerprint"] or not ours["fingerprint"]:  # weights that could not be read
        return
    one, other = (torch.tensor(x["fingerprint"], dtype=torch.float64) for x in (theirs, ours))
    alike = torch.nn.functional.cosine_similarity(one, other, dim=0) if one.shape == other.shape else torch.zeros(())
    if not alike >= ALIKE:  # so that a nan is refused
        raise ValueError(
            f"{whose}, whose weights are not those of this model (cosine {alike:.2f}): train indexers for this one"
        )


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
