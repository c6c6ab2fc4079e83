"""The implementations that run a cell: StreamKL and its baselines; what each can run, and the call that is timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import streamkl
from streamkl import engines
from streamkl.bench import baselines
from streamkl.bench.cells import Cell, Inputs, draw_inputs
from streamkl.bench.products import bare_products
from streamkl.engines import cpu
from streamkl.problem import Problem, Side, Support

Call = Callable[[], Any]

LOSS_BASELINES = {
    "eager": baselines.eager,
    "compiled": baselines.compiled,
    "chunked": baselines.chunked,
    "composed": baselines.composed,
}
"""The baselines that compute the loss."""

SUMMARIES = {
    "streamkl": "streamkl.attention_kl, or streamkl.indexer_kl with the teacher's LSE",
    "eager": "both matrices in memory: softmax, log_softmax and kl_div in float32",
    "compiled": "torch.compile of eager",
    "chunked": f"eager on {baselines.CHUNK} queries at a time",
    "composed": "from the outputs and LSEs of three stock attention calls",
    "sdpa": "scaled_dot_product_attention of the teacher",
    "products": "the forward's tile products alone, operands packed beforehand",
    "plain": "streamkl on keys that are tokens, and all that the teacher attends to",
    "student": "an indexer's tile products alone, twice of the five times that a step needs them",
}
"""Every implementation, and what it is."""

BASELINES = tuple(name for name in SUMMARIES if name != "streamkl")
"""Every implementation but StreamKL."""

MATRIX_BYTES = {"forward": 28, "training": 30, "training-both": 44}
"""Approximate bytes per pair of a query and a key, and head, that eager holds at its peak (it is measured after)."""

INDEXER_MATRIX_BYTES = 14
"""The same for the loss of an indexer, whose teacher is not differentiated."""


def refusal(name: str, cell: Cell, device: torch.device, available: int) -> str | None:
    """Why an implementation cannot run a cell with so many bytes available, or ``None``."""
    if name == "composed":
        if cell.wanted:
            return "stock attention does not differentiate its LSE"
        if cell.heads.teacher != cell.heads.student:
            return "the entropy of a mean of heads is no output of attention"
        if cell.dims[0] != cell.dims[1]:
            return "stock attention needs keys and values of one width"
    if cell.indexer and name in ("compiled", "chunked", "composed", "products"):
        return "not written for an indexer"
    if name == "plain":
        return "it is the cell itself" if cell == cell.plain else None
    if cell != cell.plain and name != "streamkl":
        return "not written for keys of several tokens, nor for a softmax that covers more"
    if name == "student":
        return cpu.unsupported(device) if cell.indexer else "there is no indexer"
    if name == "products":
        if device.type != "cpu":
            return "measured on CPUs"
        if cell.wanted:
            return "they are those of a forward"
        return cpu.unsupported(device)
    if name in ("eager", "compiled"):
        bytes_per_pair = INDEXER_MATRIX_BYTES if cell.indexer else MATRIX_BYTES[cell.direction]
        needed = bytes_per_pair * cell.batch * cell.heads.teacher * cell.tokens**2
        if needed > 0.8 * available:
            return f"would need about {needed / 1e9:.0f} GB, and {available / 1e9:.0f} GB are available"
    return None


def engine_name(cell: Cell, device: torch.device, backend: str) -> str:
    """The engine that StreamKL runs a cell on, which is loaded."""
    if backend == "reference":
        return backend
    teacher, student = (
        Side(heads, kv_heads, dim, getattr(torch, cell.dtype), dim**-0.5)
        for heads, kv_heads, dim in zip(cell.heads[::2], cell.heads[1::2], cell.dims, strict=True)
    )
    if cell.indexer:
        student = replace(student, relu=True, head_summed=True)
    support = Support(cell.batch, cell.tokens, cell.keys, None, 0 if cell.causal else None, key_span=cell.key_span)
    if cell.topk:
        support = replace(support, topk=torch.empty(cell.batch, 1, cell.tokens, cell.topk, device="meta"))
    return engines.choose(backend, device, Problem(teacher, student, support)).engine.name


def prepare(name: str, cell: Cell, inputs: Inputs, backend: str = "auto") -> Call:
    """The call to time: a forward, or a forward and backward, from the cell's inputs to a loss and their ``grad``."""
    if name == "products":
        return bare_products(*inputs.values(), causal=cell.causal)
    if name == "student":
        student = (inputs["student_q"].detach(), inputs["student_k"].detach())
        return bare_products(*student, *student, causal=cell.causal)
    if name == "sdpa":
        return _attention(cell, inputs)
    if name == "plain":
        return prepare("streamkl", cell.plain, draw_inputs(cell.plain, inputs["teacher_q"].device), backend)
    if name == "streamkl":
        engine_name(cell, inputs["teacher_q"].device, backend)

        ours = _indexer(cell, inputs, backend) if cell.indexer else _divergence(cell, inputs, backend)
        return _step(cell, inputs, lambda: iter([ours()]))
    if name == "compiled":
        torch._dynamo.reset()  # each cell is compiled for its own shape
    rows = cell.batch * cell.distributions * cell.tokens
    if cell.indexer:
        t = inputs
        parts = (t["teacher_q"], t["teacher_k"], t["student_q"], t["student_k"], t.get("student_w"))
        return _step(cell, inputs, lambda: (x.sum() / rows for x in baselines.eager_indexer(*parts, cell.causal)))
    return _step(cell, inputs, lambda: (x.sum() / rows for x in LOSS_BASELINES[name](**inputs, causal=cell.causal)))


def _divergence(cell: Cell, inputs: Inputs, backend: str) -> Call:
    return lambda: streamkl.attention_kl(**inputs, causal=cell.causal, backend=backend)  # type: ignore[arg-type]


def _indexer(cell: Cell, inputs: Inputs, backend: str) -> Call:
    t = inputs
    keys = t.get("topk_indices")
    mask: dict[str, Any] = {"causal": cell.causal, "topk_indices": keys, "key_span": cell.key_span}
    lse = streamkl.attention_lse(t["teacher_q"], t["teacher_k"], **mask)
    return lambda: streamkl.indexer_kl(
        t["teacher_q"], t["teacher_k"], t["student_q"], t["student_k"].squeeze(1), t.get("student_w"),
        teacher_lse=lse, teacher_rest=t.get("teacher_rest"), backend=backend, **mask,  # type: ignore[arg-type]
    )  # fmt: skip


def row_losses(name: str, cell: Cell, inputs: Inputs, backend: str = "auto") -> Tensor | None:
    """The loss of every row, ``[B, R, N]``, or ``None`` for an implementation that computes no loss."""
    tensors = {key: x.detach() for key, x in inputs.items()}
    if name == "streamkl":
        return streamkl.attention_kl(**tensors, causal=cell.causal, reduction="none", backend=backend)  # type: ignore[arg-type]
    if name in LOSS_BASELINES:
        return torch.cat(list(LOSS_BASELINES[name](**tensors, causal=cell.causal)), dim=2)
    return None


def _step(cell: Cell, inputs: Inputs, parts: Callable[[], Any]) -> Call:
    """One step over the parts of a loss; the backward of a part runs before the next part, to save memory."""
    leaves = [inputs[name] for name in cell.wanted]

    def step() -> Tensor:
        for x in leaves:
            x.grad = None
        total = torch.zeros(())
        with torch.set_grad_enabled(bool(leaves)):
            for part in parts():
                if leaves:
                    part.backward()
                total = total + part.detach()
        return total

    return step


def _attention(cell: Cell, inputs: Inputs) -> Call:
    """Attention of the teacher's q and k with values of their width; gradients to all three where there are any.

    Beside an indexer it is a forward: the model that the indexer learns from is frozen.
    """
    tensors = (inputs["teacher_q"], inputs["teacher_k"], torch.randn_like(inputs["teacher_k"]))
    differentiated = bool(cell.wanted) and not cell.indexer
    q, k, v = (x.detach().requires_grad_(differentiated) for x in tensors)
    upstream = torch.randn_like(q) if differentiated else None
    grouped = cell.heads.teacher != cell.heads.teacher_kv

    def step() -> Tensor:
        q.grad = k.grad = v.grad = None
        with torch.set_grad_enabled(upstream is not None):
            output = functional.scaled_dot_product_attention(q, k, v, is_causal=cell.causal, enable_gqa=grouped)
            if upstream is not None:
                output.backward(upstream)
        return output.detach()

    return step
