"""One layer's selection and sparse attention beside dense attention, on random tensors, without a model."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from streamkl.bench import measure
from streamkl.bench.gate import RedGateError
from streamkl.bench.models import Layout
from streamkl.sparse import index_topk, sparse_attention

GATE_TOKENS = 512

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Layer(NamedTuple):
    """The measured layer: ``tokens`` of a layout of heads, ``topk`` keys per query block, a one-head indexer.

    With ``training`` attention is a forward and a backward, with gradients to queries, keys and values.
    """

    layout: Layout
    tokens: int
    topk: int = 2048
    query_block: int = 64
    index_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    training: bool = False


class Seconds(NamedTuple):
    """Medians."""

    sdpa: float
    selection: float
    attention: float

    @property
    def ratio(self) -> float:
        """Selection and attention over dense attention."""
        return (self.selection + self.attention) / self.sdpa


def run(layer: Layer, budget: float) -> Seconds:
    """Measures dense attention, selection and sparse attention, in alternation.

    Args:
        layer: The layer.
        budget: Seconds for each, on average.
    """
    check(layer)
    q, k, v, index_q, index_k = _drawn(layer)
    # As transformers does: key heads are repeated, since this kernel needs as many as query heads.
    keys, values = (x.repeat_interleave(layer.layout.heads // layer.layout.kv_heads, 1) for x in (k, v))
    indices = index_topk(index_q, index_k, topk=layer.topk, query_block=layer.query_block)
    times = measure.alternate(
        {
            "sdpa": _step(layer, _dense, q, keys, values),
            "selection": lambda: index_topk(index_q, index_k, topk=layer.topk, query_block=layer.query_block),
            "attention": _step(layer, _sparse(layer, indices), q, k, v),
        },
        budget,
    )
    return Seconds(*(statistics.median(times[name]) for name in Seconds._fields))


def check(layer: Layer) -> None:
    """Raises `RedGateError` if with all keys selected outputs or gradients differ from dense attention's.

    By more than rounding, that is, at the gate's size.
    """
    small = layer._replace(tokens=min(layer.tokens, GATE_TOKENS))
    q, k, v, index_q, index_k = _drawn(small)
    indices = index_topk(index_q, index_k, topk=small.tokens, query_block=small.query_block)
    group = small.layout.heads // small.layout.kv_heads

    def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _dense(q, *(x.repeat_interleave(group, 1) for x in (k, v)))

    found = _step(small, _sparse(small, indices), q, k, v)()
    theirs, exact = _step(small, dense, q, k, v)(), _step(small, dense, q.double(), k.double(), v.double())()
    for what, ours, rounded, right in zip(("outputs", "dq", "dk", "dv"), found, theirs, exact, strict=False):
        error, allowed = (ours.double() - right).abs().max(), 2 * (rounded.double() - right).abs().max()
        if not error <= allowed + torch.finfo(layer.dtype).eps * right.abs().max():
            raise RedGateError(
                f"with all keys selected, attention errs by {error:.1e} in its {what}, and dense attention by "
                f"{allowed / 2:.1e}"
            )


def _dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def _sparse(layer: Layer, indices: Tensor) -> Attention:
    return lambda q, k, v: sparse_attention(q, k, v, indices, query_block=layer.query_block)


def _step(layer: Layer, attention: Attention, *tensors: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    """A call of the output, and in training of the gradients to all three tensors."""
    leaves = [x.detach().requires_grad_(layer.training) for x in tensors]
    upstream = torch.randn(leaves[0].shape, generator=torch.Generator().manual_seed(1)).to(leaves[0].dtype)

    def step() -> tuple[Tensor, ...]:
        output = attention(*leaves)
        return (output.detach(), *torch.autograd.grad(output, leaves, upstream)) if layer.training else (output,)

    return step


def _drawn(layer: Layer) -> tuple[torch.Tensor, ...]:
    rng, (heads, kv_heads, dim) = torch.Generator().manual_seed(0), layer.layout
    shapes = ((1, heads, layer.tokens, dim), *[(1, kv_heads, layer.tokens, dim)] * 2,
              (1, 1, layer.tokens, layer.index_dim), (1, layer.tokens, layer.index_dim))  # fmt: skip
    return tuple(torch.randn(shape, generator=rng).to(layer.dtype) for shape in shapes)
