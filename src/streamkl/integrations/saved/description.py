"""The description of a folder of indexers and of their model: checked, compared, and made into indexers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from streamkl.indexer import HeadIndexer, Indexer, LightningIndexer
from streamkl.integrations.saved.schema import (
    LARGEST,
    entries,
    integer,
    list_of,
    nullable,
    number,
    one_of,
    text,
)
from streamkl.integrations.saved.selectors import check_selector

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
                "kind": one_of("head", "lightning", "group", "compressed", "block"),
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


def describe_indexer(indexer: nn.Module) -> dict[str, Any]:
    """The arguments of an indexer."""
    assert isinstance(indexer, Indexer)
    return {
        "kind": indexer.kind,
        "heads": getattr(indexer, "heads", 1),
        "head_dim": indexer.head_dim,
        "rope_dim": indexer.rope_dim,
        "rope_layout": indexer.rope_layout,
        "activation": indexer.activation,
        "temperature": indexer.log_temperature is not None,
    }


def indexer_of(described: dict[str, Any], hidden_dim: int) -> Indexer:
    """An untrained indexer from the arguments that `describe_indexer` gives.

    Args:
        described: The arguments, checked by `check_description`.
        hidden_dim: Width of the hidden states.
    """
    options = {"heads": 1, **described}
    kind = options.pop("kind")
    if kind == "head":
        del options["heads"]
        return HeadIndexer(hidden_dim, **options)
    return LightningIndexer(hidden_dim, **options)


def describe_model(config: Any, fingerprint: Tensor) -> dict[str, Any]:
    """The properties by which a model is recognised.

    Args:
        config: Of the model, as transformers has it.
        fingerprint: Some of its weights; empty if they cannot be read.
    """
    name = str(getattr(config, "_name_or_path", ""))[:NAME]
    text_config = config.get_text_config()
    return {
        "name": "".join(character if character.isprintable() else "?" for character in name),
        "model_type": text_config.model_type,
        "hidden_size": text_config.hidden_size,
        "num_hidden_layers": text_config.num_hidden_layers,
        "num_attention_heads": text_config.num_attention_heads,
        "num_key_value_heads": getattr(text_config, "num_key_value_heads", None),
        "fingerprint": [round(float(x), 8) for x in fingerprint],
    }


def check_model(path: Path, description: dict[str, Any], ours: dict[str, Any]) -> None:
    """Refuses indexers of another model.

    Args:
        path: The folder.
        description: Of the folder.
        ours: The model by `describe_model`.

    Raises:
        ValueError: They belong to another model.
    """
    theirs = description["model"]
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
