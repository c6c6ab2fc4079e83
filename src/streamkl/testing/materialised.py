"""Attention distillation as people write it with ``output_attentions=True``: every matrix in memory."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor


def materialised_losses(
    student: Any,
    teacher: Any,
    batch: Mapping[str, Tensor],
    pairs: Mapping[int, int],
    *,
    divergence: str = "forward",
    temperature: float = 1.0,
    teacher_heads: Sequence[int] | None = None,
) -> tuple[dict[int, Tensor], Any]:
    """The mean KL of each student's layer, from the matrices of eager attention, and the student's output.

    Args:
        student: A model of transformers.
        teacher: Another; its heads are a multiple of the student's.
        batch: ``input_ids``, ``attention_mask`` and ``position_ids`` of packed rows, and labels.
        pairs: The teacher's layer of each student's.
        divergence: ``"forward"`` or ``"reverse"``.
        temperature: Divides the logits.
        teacher_heads: The teacher's heads in the order in which the student's learn them; all of them if not given.
    """
    with eager(student), eager(teacher):
        outputs = student(**batch, output_attentions=True, use_cache=False)
        with torch.no_grad():
            inputs = {name: x for name, x in batch.items() if name != "labels"}
            taught = teacher(**inputs, output_attentions=True, use_cache=False).attentions
    seen = allowed(**{name: x for name, x in batch.items() if name != "labels"})[:, None]
    losses = {}
    for layer, other in pairs.items():
        log_q, log_p = (_log(x, seen, temperature) for x in (outputs.attentions[layer], taught[other]))
        log_p = log_p if teacher_heads is None else log_p[:, list(teacher_heads)]
        p = log_p.exp().unflatten(1, (log_q.shape[1], -1)).mean(2)
        log_p = torch.where(p > 0, p, 1).log()
        kl = p * (log_p - log_q) if divergence == "forward" else log_q.exp() * (log_q - log_p)
        rows = torch.where(seen & (p > 0), kl, 0).sum(-1)
        losses[layer] = rows.sum() / (seen.any(-1).sum() * log_q.shape[1])
    return losses, outputs


@contextlib.contextmanager
def eager(model: Any) -> Iterator[None]:
    """Runs a model with eager attention whose softmax has the dtype of its inputs; that of transformers has float32."""
    module = next(m for m in model.modules() if hasattr(m, "layer_idx"))
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with mock.patch.object(sys.modules[type(module).__module__], "eager_attention_forward", _eager):
            yield
    finally:
        model.set_attn_implementation(before)


def allowed(input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None) -> Tensor:
    """``[B, N, N]`` of bool: the keys that each query sees; none for padding."""
    rows = torch.arange(input_ids.shape[1])
    seen = (rows[None, :, None] >= rows[None, None, :]).expand(len(input_ids), -1, -1)
    if attention_mask is not None:
        real = attention_mask.bool()
        return seen & real[:, None, :] & real[:, :, None]
    if position_ids is not None:
        sequence = (position_ids == 0).cumsum(-1)
        return seen & (sequence[:, :, None] == sequence[:, None, :])
    return seen


def _log(weights: Tensor, seen: Tensor, temperature: float) -> Tensor:
    """Logarithms of attention at a temperature; 0 for keys that are not seen."""
    logits = torch.where(seen & (weights > 0), torch.where(weights > 0, weights, 1).log() / temperature, -torch.inf)
    logits = torch.where(seen.any(-1, keepdim=True), logits, 0)
    return torch.where(seen, logits.log_softmax(-1), 0)


def _eager(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scaling: float, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    weights = (query @ key.mT * scaling + attention_mask).softmax(-1)
    return (weights @ value).transpose(1, 2).contiguous(), weights
