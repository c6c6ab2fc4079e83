"""Who takes part in a cell: ours, the baselines, and the yardsticks; what each can run, and the call that is timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import streamkl
from streamkl import engines
from streamkl.bench import baselines
from streamkl.bench.cells import Cell, Inputs
from streamkl.bench.products import bare_products
from streamkl.engines import cpu
from streamkl.problem import Problem, Side, Support

Call = Callable[[], Any]

BASELINES = {
    "eager": baselines.eager,
    "compiled": baselines.compiled,
    "chunked": baselines.chunked,
    "composed": baselines.composed,
}
SUMMARIES = {
    "streamkl": "streamkl.attention_kl",
    "eager": "both matrices in memory: softmax, log_softmax and kl_div in float32",
    "compiled": "torch.compile of eager",
    "chunked": f"eager on {baselines.CHUNK} queries at a time",
    "composed": "from the outputs and LSEs of three stock attention calls",
    "sdpa": "scaled_dot_product_attention of the teacher: the yardstick",
    "products": "the forward's tile products alone, operands packed beforehand",
}
"""Every contestant, and what it is."""

MATRIX_BYTES = {"forward": 28, "training": 30, "training-both": 44}
"""Bytes for each pair of a query and a key of each head that eager holds at its peak, about (it is measured after)."""


def refusal(name: str, cell: Cell, device: torch.device, available: int) -> str | None:
    """Why a contestant cannot run a cell with so many bytes at hand, or ``None``."""
    if name == "composed":
        if cell.wanted:
            return "stock attention does not differentiate its LSE"
        if cell.heads.teacher != cell.heads.student:
            return "the entropy of a mean of heads is no output of attention"
        if cell.dims[0] != cell.dims[1]:
            return "stock attention wants keys and values of one width"
    if name == "products":
        if device.type != "cpu":
            return "measured on CPUs"
        if cell.wanted:
            return "they are those of a forward"
        return cpu.unsupported(device)
    if name in ("eager", "compiled"):
        needed = MATRIX_BYTES[cell.direction] * cell.batch * cell.heads.teacher * cell.tokens**2
        if needed > 0.8 * available:
            return f"would need about {needed / 1e9:.0f} GB, and {available / 1e9:.0f} GB are available"
    return None


def engine_name(cell: Cell, device: torch.device, backend: str) -> str:
    """The engine that ours runs a cell on; it is loaded then."""
    if backend == "reference":
        return backend
    teacher, student = (
        Side(heads, kv_heads, dim, getattr(torch, cell.dtype), dim**-0.5)
        for heads, kv_heads, dim in zip(cell.heads[::2], cell.heads[1::2], cell.dims, strict=True)
    )
    support = Support(cell.batch, cell.tokens, cell.tokens, None, 0 if cell.causal else None)
    return engines.choose(backend, device, Problem(teacher, student, support)).engine.name


def prepare(name: str, cell: Cell, inputs: Inputs, backend: str = "auto") -> Call:
    """The call to time: a forward, or a forward and backward, from the cell's inputs to a loss and their ``grad``."""
    if name == "products":
        return bare_products(*inputs.values(), causal=cell.causal)
    if name == "sdpa":
        return _attention(cell, inputs)
    if name == "streamkl":
        engine_name(cell, inputs["teacher_q"].device, backend)

        def ours() -> Tensor:
            return streamkl.attention_kl(**inputs, causal=cell.causal, backend=backend)  # type: ignore[arg-type]

        return _step(cell, inputs, lambda: iter([ours()]))
    if name == "compiled":
        torch._dynamo.reset()  # each cell is compiled for its own shape
    rows = cell.batch * cell.heads.student * cell.tokens
    return _step(cell, inputs, lambda: (x.sum() / rows for x in BASELINES[name](**inputs, causal=cell.causal)))


def row_losses(name: str, cell: Cell, inputs: Inputs, backend: str = "auto") -> Tensor | None:
    """The loss of every row, ``[B, R, N]``, or ``None`` for what computes no loss."""
    tensors = {key: x.detach() for key, x in inputs.items()}
    if name == "streamkl":
        return streamkl.attention_kl(**tensors, causal=cell.causal, reduction="none", backend=backend)  # type: ignore[arg-type]
    if name in BASELINES:
        return torch.cat(list(BASELINES[name](**tensors, causal=cell.causal)), dim=2)
    return None


def _step(cell: Cell, inputs: Inputs, parts: Callable[[], Any]) -> Call:
    """One step over the parts of a loss; each part's backward runs before the next part, as its memory wants it."""
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
    """Attention of the teacher's q and k with values of their width; gradients to all three where there are any."""
    tensors = (inputs["teacher_q"], inputs["teacher_k"], torch.randn_like(inputs["teacher_k"]))
    q, k, v = (x.detach().requires_grad_(bool(cell.wanted)) for x in tensors)
    upstream = torch.randn_like(q) if cell.wanted else None
    grouped = cell.heads.teacher != cell.heads.teacher_kv

    def step() -> Tensor:
        q.grad = k.grad = v.grad = None
        with torch.set_grad_enabled(upstream is not None):
            output = functional.scaled_dot_product_attention(q, k, v, is_causal=cell.causal, enable_gqa=grouped)
            if upstream is not None:
                output.backward(upstream)
        return output.detach()

    return step
