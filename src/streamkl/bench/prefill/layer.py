"""One layer's selection and sparse attention beside dense attention, on random tensors, without a model."""

from __future__ import annotations

import statistics
from typing import NamedTuple

import torch
from torch.nn import functional

from streamkl.bench import measure
from streamkl.bench.gate import RedGateError
from streamkl.bench.models import Layout
from streamkl.sparse import index_topk, sparse_attention

GATE_TOKENS = 512


class Layer(NamedTuple):
    """The measured layer: ``tokens`` of a layout of heads, ``topk`` keys per query block, a one-head indexer."""

    layout: Layout
    tokens: int
    topk: int = 2048
    query_block: int = 64
    index_dim: int = 128
    dtype: torch.dtype = torch.bfloat16


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
            "sdpa": lambda: functional.scaled_dot_product_attention(q, keys, values, is_causal=True),
            "selection": lambda: index_topk(index_q, index_k, topk=layer.topk, query_block=layer.query_block),
            "attention": lambda: sparse_attention(q, k, v, indices, query_block=layer.query_block),
        },
        budget,
    )
    return Seconds(*(statistics.median(times[name]) for name in Seconds._fields))


def check(layer: Layer) -> None:
    """Raises `RedGateError` if with all keys selected the output differs from dense attention by more than rounding."""
    small = layer._replace(tokens=min(layer.tokens, GATE_TOKENS))
    q, k, v, index_q, index_k = _drawn(small)
    indices = index_topk(index_q, index_k, topk=small.tokens, query_block=small.query_block)
    ours = sparse_attention(q, k, v, indices, query_block=small.query_block).double()
    group = small.layout.heads // small.layout.kv_heads
    keys, values = (x.repeat_interleave(group, 1) for x in (k, v))
    dense = functional.scaled_dot_product_attention(q, keys, values, is_causal=True).double()
    exact = functional.scaled_dot_product_attention(q.double(), keys.double(), values.double(), is_causal=True)
    error, allowed = (ours - exact).abs().max(), 2 * (dense - exact).abs().max()
    if not error <= allowed + torch.finfo(layer.dtype).eps * exact.abs().max():
        raise RedGateError(
            f"with all keys selected, attention errs by {error:.1e}, and dense attention by {allowed / 2:.1e}"
        )


def _drawn(layer: Layer) -> tuple[torch.Tensor, ...]:
    rng, (heads, kv_heads, dim) = torch.Generator().manual_seed(0), layer.layout
    shapes = ((1, heads, layer.tokens, dim), *[(1, kv_heads, layer.tokens, dim)] * 2,
              (1, 1, layer.tokens, layer.index_dim), (1, layer.tokens, layer.index_dim))  # fmt: skip
    return tuple(torch.randn(shape, generator=rng).to(layer.dtype) for shape in shapes)
