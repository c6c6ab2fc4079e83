"""The indexers of a model's layers: made, described, saved, and known again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import streamkl
from streamkl.indexer import HeadIndexer, Indexer
from streamkl.indexer.base import Activation
from streamkl.integrations.transformers import folder
from streamkl.integrations.transformers.families import Family, family_of
from streamkl.integrations.transformers.selection import from_json, to_json
from streamkl.sparse import Selector

ALIKE = 0.9
"""The cosine between a model's weights and the fingerprint of the one that indexers were made for: that of a finetuned
model is near 1, that of another one near 0."""


class Indexers(nn.ModuleDict):
    """An indexer for each global attention layer, by its number.

    They are not modules of the model: ``model.state_dict()`` is what it was, and an optimizer takes
    ``indexers.parameters()``. Those of a model that has indexers of its own share its parameters.
    """

    def of(self, layer: int) -> Indexer | None:
        """The indexer of a layer; ``None`` if it has none."""
        return dict(self.items()).get(str(layer))  # pyright: ignore[reportReturnType]


def new_indexers(
    model: nn.Module,
    *,
    head_dim: int = 64,
    activation: Activation = "relu",
    heads: int = 1,
    temperature: bool = False,
) -> Indexers:
    """Untrained indexers for a model that has none.

    Args:
        model: A causal language model of transformers.
        head_dim: Width of an indexer's head.
        activation: ``"relu"``, or ``None`` for none.
        heads: Heads of an indexer; several are added up with weights that the hidden state chooses.
        temperature: Whether an indexer learns a temperature of its scores.

    Returns:
        A `HeadIndexer`, or for several heads a `LightningIndexer`, for each layer that sees all keys, on its device,
        float32.

    Raises:
        ValueError: The model's family is not known, or it has indexers of its own.
    """
    family = family_of(model.config)
    made = Indexers()
    for layer, attention in family.attentions(model).items():
        if family.is_global(attention):
            indexer = family.new_indexer(attention, head_dim, activation, heads, temperature)
            made[str(layer)] = indexer.to(next(attention.parameters()).device)
    return made


def own_indexers(model: nn.Module, family: Family) -> Indexers:
    """The indexers that a model has itself, over its own parameters; empty for most."""
    found = {layer: family.indexer(attention) for layer, attention in family.attentions(model).items()}
    return Indexers({str(layer): indexer for layer, indexer in found.items() if indexer is not None})


def save_indexers(path: str | os.PathLike[str], model: nn.Module, indexers: Indexers, selector: Selector) -> Path:
    """Writes a folder of indexers, which `load_indexers` reads.

    Args:
        path: The folder; one of indexers is replaced, anything else refused.
        model: The model that they belong to.
        indexers: Its indexers.
        selector: What they are used with.
    """
    family = family_of(model.config)
    weights = {_name(model, family, int(layer), name): weight for layer, name, weight in _weights(indexers)}
    description = {
        "streamkl": streamkl.__version__,
        "family": family.name,
        "model": _describe(model, family),
        "indexer": _shapes(next(iter(indexers.values()))),
        "layers": [int(layer) for layer in indexers],
        "selector": to_json(selector),
    }
    return folder.write(path, weights, description)


def load_indexers(path: str | os.PathLike[str], model: nn.Module) -> tuple[Indexers, Selector]:
    """Reads a folder of indexers for a model.

    Args:
        path: The folder.
        model: The model.

    Returns:
        The indexers, on the model's devices, and the selector that they were saved with. If the model has indexers of
        its own, those have the folder's weights now.

    Raises:
        ValueError: The folder is not whole, or its indexers belong to another model.
    """
    weights, description = folder.read(path)
    family = family_of(model.config)
    _check_model(Path(path), description, model, family)
    indexers = own_indexers(model, family)
    if not indexers:
        shapes = description["indexer"]
        indexers = new_indexers(
            model, head_dim=shapes["head_dim"], activation=shapes["activation"], heads=shapes.get("heads", 1),
            temperature=shapes.get("temperature", False),
        )  # fmt: skip
    wanted = {_name(model, family, int(layer), name): weight for layer, name, weight in _weights(indexers)}
    if wanted.keys() != weights.keys():
        missing, more = sorted(wanted.keys() - weights.keys()), sorted(weights.keys() - wanted.keys())
        raise ValueError(f"{path} does not fit the model: it lacks {missing[:3]} and has {more[:3]} besides")
    with torch.no_grad():
        for name, weight in wanted.items():
            if weight.shape != weights[name].shape:
                raise ValueError(
                    f"{path} does not fit the model: {name} must be of shape {list(weight.shape)}, "
                    f"and is of {list(weights[name].shape)}"
                )
            weight.copy_(weights[name])
    return indexers, from_json(description["selector"])


def _weights(indexers: Indexers) -> list[tuple[str, str, Tensor]]:
    return [
        (layer, *entry) for layer, indexer in indexers.items() for entry in indexer.state_dict(keep_vars=True).items()
    ]


def _name(model: nn.Module, family: Family, layer: int, weight: str) -> str:
    """The name of a weight in a folder: the one that it has in the checkpoint, if it is there."""
    attention = family.attentions(model)[layer]
    if getattr(attention, "indexer", None) is None:
        return f"layers.{layer}.{weight}"
    prefix = next(name for name, module in model.named_modules() if module is attention.indexer)
    return f"{prefix}.{weight}"


def _shapes(indexer: nn.Module) -> dict[str, Any]:
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


def _describe(model: Any, family: Family) -> dict[str, Any]:
    config = model.config.get_text_config()
    attention = next(iter(family.attentions(model).values()))
    return {
        "name": str(getattr(model.config, "_name_or_path", "")),
        "model_type": config.model_type,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "fingerprint": [round(float(x), 8) for x in family.fingerprint(attention)],
    }


def _check_model(path: Path, description: dict[str, Any], model: nn.Module, family: Family) -> None:
    """Refuses indexers of another model."""
    theirs, ours = description["model"], _describe(model, family)
    whose = f"{path} holds indexers for {theirs['name'] or 'a model'!r} ({theirs['model_type']})"
    for key in ours:
        if key not in ("name", "fingerprint") and theirs[key] != ours[key]:
            raise ValueError(
                f"{whose} with {key} = {theirs[key]}, and this model has {ours[key]}: use its own indexers"
            )
    if not theirs["fingerprint"] or not ours["fingerprint"]:
        return
    alike = torch.nn.functional.cosine_similarity(*(torch.tensor(x["fingerprint"]) for x in (theirs, ours)), dim=0)
    if alike < ALIKE:
        raise ValueError(
            f"{whose}, whose weights are not those of this model (cosine {alike:.2f}): train indexers for this one"
        )
