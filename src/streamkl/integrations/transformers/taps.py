"""Attention functions and masks of transformers that also record, in the place of its own while something is captured.

A model keeps its attention implementation and the name of it. Under that name it finds a function that calls the one
that was there, with the same arguments, and hands q and k to the open captures of its thread. Models that are not
captured pass through.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from streamkl.autocasting import autocast
from streamkl.dense_attention import causal_attention
from streamkl.integrations.transformers.masks import Sequences
from streamkl.integrations.transformers.recording import Recorded, captures_of, open_captures, refuse

_LOCK, _USERS = threading.Lock(), Counter()
_TAPS: dict[tuple[str, Any], tuple[Callable, Callable]] = {}
"""The two functions in the place of an implementation and its mask. They are made once: ``torch.compile`` would compile
a model again for new ones."""
_BEFORE: dict[str, tuple[Callable | None, Callable]] = {}
_FLAGS: list[bool] = []
MASKED, SELECTED = ("eager", "sdpa"), ("indices", "block_indices")
"""Implementations that learn from the mask what an indexer of the model's own selects, and by which arguments others
do."""
CHECKPOINTED = "skip_fwd_side_effects_in_bwd_under_checkpoint"
"""Lets ``torch.compile`` hand q and k out of a checkpointed layer; its repetition in the backward records nothing."""


def check(name: str) -> None:
    """Refuses an implementation that models make no mask for, by which a capture tells sequences and windows.

    Raises:
        ValueError: There is no mask function of that name.
    """
    if AttentionMaskInterface._global_mapping.get(name) is None:
        raise ValueError(
            f"attention is not captured under {name!r}, which has no mask function: register one by "
            f"AttentionMaskInterface.register, such as that of 'sdpa'"
        )


def install(name: str) -> None:
    """Taps an attention implementation, for one more capture."""
    with _LOCK:
        _USERS[name] += 1
        if _USERS[name] > 1:
            return
        functions, masks = AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping
        before = functions.get(name), masks[name]
        if (name, before) not in _TAPS:
            _TAPS[name, before] = _attention(name, before[0]), _mask(before[1])
        if not _BEFORE:
            _FLAGS.append(_let_out(True))
        _BEFORE[name] = before
        functions[name], masks[name] = _TAPS[name, before]


def uninstall(name: str) -> None:
    """Restores the implementation after its last capture."""
    with _LOCK:
        _USERS[name] -= 1
        if _USERS[name]:
            return
        attention, mask = _BEFORE.pop(name)
        if not _BEFORE:
            _let_out(_FLAGS.pop())
        AttentionMaskInterface._global_mapping[name] = mask
        if attention is None:
            AttentionInterface._global_mapping.pop(name)
        else:
            AttentionInterface._global_mapping[name] = attention


def _let_out(allowed: bool) -> bool:
    """Sets the option of ``torch.compile``, where it has one, and returns what it was."""
    dynamo: Any = torch._dynamo.config
    before = getattr(dynamo, CHECKPOINTED, False)
    if hasattr(dynamo, CHECKPOINTED):
        setattr(dynamo, CHECKPOINTED, allowed)
    return before


def _attention(name: str, function: Callable | None) -> Callable:
    """An attention function that records.

    Args:
        name: Of the implementation.
        function: The function of that name; ``None`` for ``"eager"``, which each modeling file has for itself.
    """

    def tapped(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        attention = function if function is not None else eager_of(type(module))
        captures = [(c, layer) for c, layer in captures_of(module) if not c.skips(layer)]
        if not captures:
            return attention(module, query, key, value, attention_mask, *args, **kwargs)
        refuse(module, kwargs, "a capture")
        if name not in MASKED and any(kwargs.get(argument) is not None for argument in SELECTED):
            raise ValueError(
                f"layer {captures[0][1]} attends to the keys that its own indexer selects, and is captured only where "
                f"it attends to all"
            )
        window = kwargs.get("sliding_window", getattr(module, "sliding_window", None))
        found = [(c, layer, c.sequences_of(attention_mask, window, layer, query, key)) for c, layer in captures]
        if "flash" in name and attention_mask is None:
            found = [(c, layer, sequences.of_flash(kwargs)) for c, layer, sequences in found]
        scale, lse, output = kwargs.get("scaling"), None, None
        wanted = name == "sdpa" and any(c.lse for c, _ in captures) and not torch.is_grad_enabled()
        if wanted and not kwargs.get("dropout") and _plain(found[0][2], query, key):
            attended, lse = causal_attention(autocast(query), autocast(key), autocast(value), scale)
            output = attended.transpose(1, 2).contiguous(), None
        if output is None:
            output = attention(module, query, key, value, attention_mask, *args, **kwargs)
        for capture, layer, sequences in found:
            capture.record(Recorded(layer, query, key, scale, sequences, lse))
        return output

    return tapped


def _mask(function: Callable) -> Callable:
    """A mask function that notes the sequences of the mask for captures of the model."""

    def tapped(*args: Any, **kwargs: Any) -> Any:
        mask = function(*args, **kwargs)
        config, sequences = kwargs.get("config"), None
        for capture in open_captures():
            if config is capture.config:
                sequences = Sequences.of(**kwargs) if sequences is None else sequences
                capture.note(mask, sequences)
        return mask

    return tapped


def reaches(cls: type) -> bool:
    """Whether the file of an attention module's class, or of the class under it, looks up attention functions."""
    return any(hasattr(sys.modules.get(base.__module__), "ALL_ATTENTION_FUNCTIONS") for base in cls.__mro__)


def eager_of(cls: type) -> Callable:
    """The eager attention of the file that an attention module's class, or the class under it, is written in."""
    for base in cls.__mro__:
        found = getattr(sys.modules.get(base.__module__), "eager_attention_forward", None)
        if found is not None:
            return found
    raise ValueError(f"the file of {cls.__name__} has no eager attention: capture it with another attn_implementation")


def _plain(sequences: Sequences, query: Tensor, key: Tensor) -> bool:
    """Whether attention is causal over whole rows, and the log-sum-exp takes no pass of its own."""
    if torch.compiler.is_compiling() or sequences.window is not None or query.device.type != "cpu":
        return False
    if query.shape[2] != key.shape[2]:
        return False
    return not sequences.layout(query.device).packed
