"""One layer's selection and sparse attention beside dense attention, on random tensors, without a model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

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

    All of ``query_blocks`` are measured beside the same dense attention. With ``training`` attention is a forward and a
    backward, with gradients to queries, keys and values.
    """

    layout: Layout
    tokens: int
    topk: int = 2048
    query_blocks: tuple[int, ...] = (64,)
    index_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    training: bool = False


class Times(NamedTuple):
    """Seconds of each round: of dense attention, and per query block of selection and of sparse attention."""

    sdpa: list[float]
    selection: dict[int, list[float]]
    attention: dict[int, list[float]]

    def ratios(self, query_block: int) -> list[float]:
        """Selection and attention over dense attention, per round."""
        rounds = zip(self.selection[query_block], self.attention[query_block], self.sdpa, strict=True)
        return [(selection + attention) / dense for selection, attention, dense in rounds]


def run(layer: Layer, budget: float, rounds: int = measure.LEAST_ROUNDS) -> Times:
    """Measures dense attention, selection and sparse attention, in alternation.

    Args:
        layer: The layer.
        budget: Seconds for each, on average.
        rounds: The least number of rounds.
    """
    check(layer)
    q, k, v, index_q, index_k = _drawn(layer)
    # As transformers does: key heads are repeated, since this kernel needs as many as query heads.
    keys, values = (x.repeat_interleave(layer.layout.heads // layer.layout.kv_heads, 1) for x in (k, v))
    calls: dict[tuple[str, int], Callable[[], Any]] = {("sdpa", 0): _step(layer, _dense, q, keys, values)}
    for block in layer.query_blocks:
        select = partial(index_topk, index_q, index_k, topk=layer.topk, query_block=block, sort=block > 1)
        calls["selection", block] = select
        calls["attention", block] = _step(layer, _sparse(select(), block), q, k, v)
    times = measure.alternate(calls, budget, rounds=rounds)
    selection, attention = (
        {block: times[name, block] for block in layer.query_blocks} for name in ("selection", "attention")
    )
    return Times(times["sdpa", 0], selection, attention)


def check(layer: Layer) -> None:
    """Raises `RedGateError` if with all keys selected outputs or gradients differ from dense attention's.

    By more than rounding, that is, at the gate's size.
    """
    small = layer._replace(tokens=min(layer.tokens, GATE_TOKENS))
    q, k, v, index_q, index_k = _drawn(small)
    group = small.layout.heads // small.layout.kv_heads

    def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _dense(q, *(x.repeat_interleave(group, 1) for x in (k, v)))

    theirs, exact = _step(small, dense, q, k, v)(), _step(small, dense, q.double(), k.double(), v.double())()
    for block in small.query_blocks:
        indices = index_topk(index_q, index_k, topk=small.tokens, query_block=block)
        found = _step(small, _sparse(indices, block), q, k, v)()
        for what, ours, rounded, right in zip(("outputs", "dq", "dk", "dv"), found, theirs, exact, strict=False):
            error, allowed = (ours.double() - right).abs().max(), 2 * (rounded.double() - right).abs().max()
            if not error <= allowed + torch.finfo(layer.dtype).eps * right.abs().max():
                raise RedGateError(
                    f"with all keys selected, attention errs by {error:.1e} in its {what}, and dense attention by "
                    f"{allowed / 2:.1e}"
                )


def _dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def _sparse(indices: Tensor, query_block: int) -> Attention:
    return lambda q, k, v: sparse_attention(q, k, v, indices, query_block=query_block)


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
