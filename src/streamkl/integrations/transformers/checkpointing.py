"""Activation checkpointing by the name that the installed transformers has for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def checkpoint_activations(model: PreTrainedModel, *, use_reentrant: bool = False) -> None:
    """Has the backward of each layer repeat its forward instead of keeping its activations.

    transformers 5.23 calls it ``activation_checkpointing_enable``, and warns about the name that 5.20 to 5.22 have.
    """
    known: Any = model
    enable = getattr(known, "activation_checkpointing_enable", None) or known.gradient_checkpointing_enable
    enable({"use_reentrant": use_reentrant})
