"""Captures q and k of a model's layers: ``capture_attention``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from streamkl.integrations.transformers import recording, taps
from streamkl.integrations.transformers.recording import Attended, Capture
from streamkl.integrations.transformers.selection import PREFIX


@contextlib.contextmanager
def capture_attention(
    model: nn.Module,
    layers: Iterable[int] | None = None,
    *,
    each: Callable[[Attended], None] | None = None,
    lse: bool = False,
    graph: bool = False,
) -> Iterator[Capture]:
    """Captures q and k after RoPE, the scale, the mask and the packing of a model's layers, in a ``with`` block.

    The model runs with the attention implementation that it has, and computes what it computes without a capture; with
    ``lse`` the output of attention comes from another kernel, and its last bits differ. No attention matrix is made.
    Tensors have their graph if gradients are enabled. It sees only calls of the thread, or task of ``asyncio``, that
    entered the block.

    Under non-reentrant checkpointing what is repeated in the backward is not captured again; under StreamKL's own
    implementations it is, if the backward runs inside of the block. Under reentrant checkpointing there is no graph. A
    compiled model may be captured, in one graph and with checkpointing, too.

    Args:
        model: A model of transformers, or a module that has one in it; of a model for images and text the decoder.
        layers: The numbers of the layers; all that attend, if not given.
        each: Is called with each `Attended` right after its attention, in place of keeping it: memory then holds one
            layer at a time. A compiled model has to be captured without it.
        lse: Takes ``call.lse`` from the attention where it is known: under ``"sdpa"`` on the CPU, without gradients,
            for rows without padding or packing.
        graph: Captures only calls with gradients enabled.

    Yields:
        The `Attended` of the last forward, by the number of the layer.

    Raises:
        ValueError: There is no model of transformers, or it has no such layer, or its attention implementation has no
            mask function. In a forward: the mask is not causal attention within sequences, or the softmax has a soft
            cap, sinks or a bias.

    Examples:
        >>> import torch
        >>> from streamkl import attention_lse
        >>> from streamkl.integrations.transformers import capture_attention
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        ...     num_attention_heads=4, num_key_value_heads=2)
        >>> model = LlamaForCausalLM(config)
        >>> with capture_attention(model) as captured:
        ...     logits = model(torch.arange(16)[None]).logits
        >>> call = captured[1].call
        >>> call.q.shape, call.k.shape, call.q.requires_grad
        (torch.Size([1, 4, 16, 8]), torch.Size([1, 2, 16, 8]), True)
        >>> attention_lse(call.q, call.k, scale=call.scale, causal=call.causal).shape
        torch.Size([1, 4, 16])
    """
    decoder = decoder_of(model)
    attentions = attentions_of(decoder)
    if isinstance(layers, str | int):
        raise ValueError(f"layers must be several numbers, such as [0, 3]: got {layers!r}")
    chosen = set(attentions) if layers is None else set(layers)
    if not chosen <= set(attentions):
        missing = sorted(chosen - set(attentions), key=str)
        raise ValueError(f"the model has no attention in layers {missing}: they are numbers, of {list(attentions)}")
    numbers = {id(module): layer for layer in chosen for module in attentions[layer]}
    names = {module.config._attn_implementation for layer in chosen for module in attentions[layer]}
    names = [name for name in names if not name.startswith(PREFIX)]  # whose functions record themselves
    capture = Capture(decoder.config, numbers, each, lse, graph)
    for name in names:
        taps.check(name)
    for name in names:
        taps.install(name)
    recording.opened(capture)
    try:
        yield capture
    finally:
        recording.closed(capture)
        capture.end()
        for name in names:
            taps.uninstall(name)


def decoder_of(model: nn.Module) -> Any:
    """The decoder of a model, or of the model in a wrapper of it.

    Raises:
        ValueError: There is none.
    """
    for module in model.modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, PreTrainedModel):
            return module.get_decoder()
    raise ValueError(f"attention is captured in models of transformers: got {type(model).__name__}")


def is_tensor_parallel(model: nn.Module) -> bool:
    """Whether attention sees some of the heads only, since other processes have the others."""
    return any((getattr(module, "tp_size", None) or 1) > 1 for module in model.modules())


def attentions_of(decoder: nn.Module) -> dict[int, list[Any]]:
    """The causal attention modules of a decoder, by the number of their layer.

    Raises:
        ValueError: There are none, or they do not call an attention function that could be captured.
    """
    name, found = type(decoder).__name__, dict[int, list[Any]]()
    for module in decoder.modules():
        number = getattr(module, "layer_idx", None)
        if isinstance(number, int) and getattr(module, "is_causal", False):
            found.setdefault(number, []).append(module)
    if not found:
        raise ValueError(f"attention is not captured in {name}: it has no causal attention with a number of its layer")
    if not all(taps.reaches(type(module)) for modules in found.values() for module in modules):
        raise ValueError(f"attention is not captured in {name}: it does not use transformers' attention interface")
    return dict(sorted(found.items()))
