"""The indexers of a model's layers: created, saved and loaded."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor, nn

from streamkl.indexer import Indexer
from streamkl.indexer.base import Activation
from streamkl.integrations.saved import folder
from streamkl.integrations.saved.description import check_description, check_model, describe_model
from streamkl.integrations.saved.selectors import from_json
from streamkl.integrations.transformers import description as descriptions
from streamkl.integrations.transformers.families import Family, family_of
from streamkl.sparse import Selector


class Indexers(nn.ModuleDict):
    """An indexer per global attention layer, by its number.

    They are not modules of the model: ``model.state_dict()`` does not change, and an optimizer takes
    ``indexers.parameters()``. For a model that has indexers of its own, they share its parameters.
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
        heads: Heads of an indexer; several are summed with per-query weights.
        temperature: Whether an indexer learns a temperature of its scores.

    Returns:
        A `HeadIndexer`, or for several heads a `LightningIndexer`, per layer that sees all keys, on its device, in
        float32.

    Raises:
        ValueError: The model's family is not known, or it has indexers of its own.
    """
    made = _make(model, head_dim, activation, heads, temperature)
    for layer, device in _devices(model).items():
        if layer in made:
            made[layer].to(device)
    return made


def own_indexers(model: nn.Module, family: Family) -> Indexers:
    """The indexers that a model has itself, over its own parameters; empty for most models."""
    found = {layer: family.indexer(attention) for layer, attention in family.attentions(model).items()}
    return Indexers({str(layer): indexer for layer, indexer in found.items() if indexer is not None})


def save_indexers(path: str | os.PathLike[str], model: nn.Module, indexers: Indexers, selector: Selector) -> Path:
    """Writes a folder of indexers, which `load_indexers` reads.

    Args:
        path: The folder, new, empty, or one of indexers, whose files are replaced. Everything else in it stays.
        model: The model that they belong to.
        indexers: Its indexers.
        selector: The selector to save with them.

    Raises:
        ValueError: There is something else at that place, or the folder could not be read again.
    """
    family = family_of(model.config)
    weights = {_name(model, family, int(layer), name): weight for layer, name, weight in _weights(indexers)}
    return folder.write(path, weights, descriptions.describe(model, family, indexers, selector))


def load_indexers(path: str | os.PathLike[str], model: nn.Module) -> tuple[Indexers, Selector]:
    """Reads a folder of indexers for a model.

    Args:
        path: The folder.
        model: The model.

    Returns:
        The indexers, on the model's devices, and the selector that they were saved with. If the model has indexers of
        its own, those get the folder's weights.

    Raises:
        ValueError: The folder is not whole, or its indexers belong to another model, whose own are offloaded.
    """
    shapes, description = folder.read(path)
    check_description(description, str(Path(path) / folder.DESCRIPTION))
    family = family_of(model.config)
    check_model(Path(path), description, describe_model(model.config, descriptions.fingerprint(model, family)))
    indexers = own_indexers(model, family)
    if any(parameter.is_meta for parameter in indexers.parameters()):
        raise ValueError(
            f"accelerate has offloaded the model's own indexers, and would not keep the weights of {path}: load the "
            f"model onto its devices, or give them to its checkpoint"
        )
    if not indexers:
        of = description["indexer"]
        with torch.device("meta"):  # nothing is allocated before all shapes have been compared
            indexers = _make(model, of["head_dim"], of["activation"], of.get("heads", 1), of.get("temperature", False))
    descriptions.check_indexers(Path(path), description, indexers)
    wanted = {_name(model, family, int(layer), name): weight for layer, name, weight in _weights(indexers)}
    folder.check_shapes(path, wanted, shapes)
    _fill(indexers, model, family, folder.read_weights(path))
    return indexers, from_json(description["selector"])


def _make(model: nn.Module, head_dim: int, activation: Activation, heads: int, temperature: bool) -> Indexers:
    """New indexers, on the default device."""
    family = family_of(model.config)
    attentions = {layer: each for layer, each in family.attentions(model).items() if family.is_global(each)}
    return Indexers(
        {
            str(layer): family.new_indexer(attention, head_dim, activation, heads, temperature)
            for layer, attention in attentions.items()
        }
    )


def _devices(model: nn.Module) -> dict[str, torch.device]:
    """The device of each layer's attention; the CPU, where accelerate has offloaded it."""
    devices = {}
    for layer, attention in family_of(model.config).attentions(model).items():
        device = next(attention.parameters()).device
        devices[str(layer)] = torch.device("cpu") if device.type == "meta" else device
    return devices


@torch.no_grad()
def _fill(indexers: Indexers, model: nn.Module, family: Family, weights: dict[str, Tensor]) -> None:
    """Gives indexers their weights, and their device to those that have none yet."""
    devices = _devices(model)
    for layer, indexer in indexers.items():
        if any(parameter.is_meta for parameter in indexer.parameters()):
            indexer.to_empty(device=devices[layer])
    for layer, name, weight in _weights(indexers):
        weight.copy_(weights[_name(model, family, int(layer), name)])


def _weights(indexers: Indexers) -> list[tuple[str, str, Tensor]]:
    return [
        (layer, *entry) for layer, indexer in indexers.items() for entry in indexer.state_dict(keep_vars=True).items()
    ]


def _name(model: nn.Module, family: Family, layer: int, weight: str) -> str:
    """The name of a weight in a folder: its name in the checkpoint, if it is there."""
    attention = family.attentions(model)[layer]
    own = family.own(attention)
    if own is None:
        return f"layers.{layer}.{weight}"
    prefix = next(name for name, module in model.named_modules() if module is own)
    return f"{prefix}.{weight}"
