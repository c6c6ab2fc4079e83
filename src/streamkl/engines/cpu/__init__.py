"""The CPU engine: fused C++ over the matrix products of PyTorch itself (oneDNN's brgemm).

``tile/`` has the primitives: sixteen floats and their arithmetic, a tile's products and packing, masks and row states.
``passes/`` has what all passes share, ``dense/`` the passes with the names of ``tiled.py``, ``gathered/`` the same for
selected keys, ``sparse/`` selection and sparse attention; ``kernels.cpp`` registers them. ``build.py`` compiles and
caches them. Products are bfloat16 where the inputs are and the CPU has them, and float32 elsewhere; everything after
them is float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from streamkl.engines.cpu import build
from streamkl.problem import AttentionOutput, Gradients, Inputs, Problem, Side, Support
from streamkl.state import RowStats

name = "cpu"
summary = "fused C++ on PyTorch's own matrix products"
checks_topk = True


def unsupported(device: torch.device, problem: Problem | None = None) -> str | None:
    """Why this engine cannot run the problem there: another device, float64, or no way to build it."""
    return _unsuited(device, problem) or _lacking() or _failure()


def broken(device: torch.device, problem: Problem | None = None) -> str | None:
    """Why this engine should run the problem there and does not: its build failed, or does not load."""
    return None if _unsuited(device, problem) or _lacking() else _failure()


def multiplies(dtype: torch.dtype) -> bool:
    """Whether this CPU has instructions for products of a dtype."""
    build.load()
    return torch.ops.streamkl_cpu.native(dtype)


def products() -> str:
    """How this CPU multiplies each dtype, for people to read."""
    dtypes = (
        f"{str(dtype)[6:]} {'as it is' if multiplies(dtype) else 'in float32'}"
        for dtype in (torch.bfloat16, torch.float16)
    )
    return f"{build.capability()}, products of {', of '.join(dtypes)}"


def _unsuited(device: torch.device, problem: Problem | None) -> str | None:
    if device.type != "cpu":
        return f"runs on CPUs, not on {device.type}"
    if problem is not None and problem.dtype == torch.float64:
        return "computes in float32, and float64 was given"
    return None


@functools.cache
def _lacking() -> str | None:
    """The missing requirement of a machine on which the engine is not expected, or ``None``."""
    missing = build.missing()
    return None if missing is None else f"cannot be built: {missing}"


@functools.cache
def _failure() -> str | None:
    """Why a machine that lacks nothing does not have the engine."""
    try:
        build.load()
    except (build.BuildError, OSError) as error:
        return str(error)
    return None


def logsumexp(
    support: Support, side: Side, q: Tensor, k: Tensor, w: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """``(m, ln l)`` of the side's logits, each ``[B, H, Nq]``; ``(-inf, 0)`` where a row sees no key."""
    return _operator("logsumexp", support)(
        q, k, _weights(side, q, w), *_keys(support), side.scale, side.relu, *_window(support), support.key_span
    )


def paired_rows(problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor, RowStats]:
    """The divergence of each row, ``[B, R, Nq]``, head by head, its mean and its row stats."""
    paired = _operator("paired_rows", problem.support)
    kl, mean, *stats = paired(*inputs[:4], *_keys(problem.support), *_numbers(problem))
    return kl, mean, RowStats(*stats)


def mixture_rows(
    problem: Problem, inputs: Inputs, m_a: Tensor, ln_l_a: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``(kl, m_b, ln l_b, s)`` of each row against the mean of its heads of ``a``, whose row stats are known."""
    rows = (m_a.contiguous(), ln_l_a.contiguous())
    return _operator("mixture_rows", problem.support)(
        *_tensors(problem, inputs), *rows, *_numbers(problem), problem.runs
    )


def backward(
    problem: Problem,
    inputs: Inputs,
    stats: RowStats,
    mean: Tensor | None,
    row_grad: Tensor,
    want_a: bool,
    want_b: bool,
    round_keys: bool = True,
) -> Gradients:
    """Gradients of ``sum(row_grad * kl)`` in the inputs' dtypes, one pass for dQ and dK; dK float32 if not rounded."""
    unread = stats.m_b if mean is None else mean
    rows = (x.contiguous() for x in (*stats, unread, row_grad.float()))
    operator = _operator("backward", problem.support)
    gradients = operator(*_tensors(problem, inputs), *rows, *_numbers(problem), problem.runs, want_a, want_b)
    wanted = (want_a, want_a, want_b, want_b, want_b and inputs.b_w is not None)
    rounded = (True, round_keys, True, round_keys, True)
    return Gradients(
        *(
            gradient.to(x.dtype if cast else torch.float32).contiguous() if x is not None and want else None
            for gradient, x, want, cast in zip(gradients, inputs, wanted, rounded, strict=True)
        )
    )


def train(problem: Problem, inputs: Inputs, stats: RowStats, weight: Tensor) -> tuple[Tensor, Gradients, Tensor]:
    """``sum(weight * kl)``, its gradients to ``b_q`` and ``b_k``, unrounded, and the mass, in one pass over ``a``."""
    rows = (x.contiguous() for x in (*stats, weight))
    operator = _operator("train", problem.support)
    loss, dq, dk, dw, mass = operator(*_tensors(problem, inputs), *rows, *_numbers(problem), problem.runs)
    return loss, Gradients(None, None, dq, dk.contiguous(), None if inputs.b_w is None else dw), mass


def index_topk(
    support: Support,
    side: Side,
    q: Tensor,
    k: Tensor,
    w: Tensor | None,
    normalise: bool,
    sort: bool,
    topk: int,
    query_block: int,
) -> Tensor:
    """The keys of an indexer's highest scores, ``[B, query_blocks, topk]``; ``w [B, J, Nq]``."""
    weights = _weights(side, q, w)
    if weights is None and side.scale <= 0:  # scores do not rise with the products: compute each of them
        weights = q.new_ones(q.shape[:3], dtype=torch.float32)
    return torch.ops.streamkl_cpu.index_topk(
        q, k, weights, _block_table(support, query_block), side.scale, side.relu, normalise, sort, topk,
        support.query_block_count(query_block), query_block, *_window(support),
    )  # fmt: skip


def attention_topk(
    support: Support, side: Side, q: Tensor, k: Tensor, lse: Tensor, topk: int, query_block: int
) -> Tensor:
    """The keys of the highest head-mean attention, ``[B, query_blocks, topk]``; ``lse [B, H, Nq]``."""
    m = lse.float().contiguous()
    rest = (lse - m).float()
    ln_l = torch.where(rest.isfinite(), rest, 0.0).contiguous()
    return torch.ops.streamkl_cpu.attention_topk(
        q, k, m, ln_l, _block_table(support, query_block), side.scale, topk, support.query_block_count(query_block),
        query_block, *_window(support),
    )  # fmt: skip


def first_wrong_row(topk: Tensor, nk: int) -> int:
    """The first row of ``topk [B, topk_heads, Nq, K]`` that ``value_checks.check_topk`` refuses, or -1."""
    return torch.ops.streamkl_cpu.first_wrong_row(topk, nk)


def sparse_attention(
    support: Support,
    side: Side,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    query_block: int,
    for_backward: bool,
    page_table: Tensor | None = None,
) -> AttentionOutput:
    """Attention over the selected keys ``indices [B, query_blocks, K]``, whose keys and values may lie in pages."""
    selected, table, *rest = _selected(support, side, indices, query_block)
    if page_table is not None:
        page_table = page_table.to(torch.int32).contiguous()
        table[:, 3] = (
            torch.arange(len(table), device="cpu") * page_table.shape[1] * k.shape[2]
        )  # k_start, counted over the page table
    made = torch.ops.streamkl_cpu.sparse_attention(
        q, k, v, selected, table, *rest, *_window(support), for_backward, page_table
    )
    return AttentionOutput(*made)


def sparse_attention_backward(
    support: Support,
    side: Side,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    query_block: int,
    output: AttentionOutput,
    d_out: Tensor,
    d_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients to ``q``, ``k`` and ``v``, in their dtypes, in one pass."""
    out, rest, m, ln_l = output
    dq, dk, dv = torch.ops.streamkl_cpu.sparse_attention_backward(
        q, k, v, *_selected(support, side, indices, query_block), *_window(support), out, rest,
        m.contiguous(), ln_l.contiguous(), d_out, None if d_lse is None else d_lse.float().contiguous(),
    )  # fmt: skip
    return dq, dk.to(k.dtype).contiguous(), dv.to(v.dtype).contiguous()


def _selected(support: Support, side: Side, indices: Tensor, query_block: int) -> tuple[Tensor, Tensor, int, float]:
    """Selected keys, sequences, query block and scale, as sparse attention takes them."""
    return indices.to(torch.int32).contiguous(), _block_table(support, query_block), query_block, side.scale


def _tensors(problem: Problem, inputs: Inputs) -> tuple[Tensor | None, ...]:
    """The tensors of a mixture as its operators take them."""
    return *inputs[:4], _weights(problem.b, inputs.b_q, inputs.b_w), *_keys(problem.support)


def _weights(side: Side, q: Tensor, w: Tensor | None) -> Tensor | None:
    """The weights ``[B, J, Nq]`` of a head-summed side, in float32; ``None`` for one head of weight 1."""
    if w is not None:
        return w.float().contiguous()
    return q.new_ones(q.shape[:3], dtype=torch.float32) if side.head_summed and side.heads > 1 else None


def _operator(name: str, support: Support) -> Callable[..., Any]:
    """The operator of a name, or the one over selected keys."""
    return getattr(torch.ops.streamkl_cpu, name if support.topk is None else f"gathered_{name}")


def _keys(support: Support) -> tuple[Tensor, ...]:
    """The sequences as ``[sequences, 6]``, in the order of their fields, and the top-k indices if there are any."""
    table = torch.tensor(list(support.sequences()), dtype=torch.int64, device="cpu").reshape(-1, 6)
    return (table,) if support.topk is None else (table, support.topk)


def _block_table(support: Support, query_block: int) -> Tensor:
    """The sequences as ``[sequences, 7]``, each with the number of its first query block."""
    rows = [(*seq, first) for seq, first in support.query_blocks(query_block)]
    return torch.tensor(rows, dtype=torch.int64, device="cpu").reshape(-1, 7)


def _window(support: Support) -> tuple[int, int]:
    return -1 if support.left is None else support.left, -1 if support.right is None else support.right


def _numbers(problem: Problem) -> tuple[float, float, bool, bool, int, int, int]:
    scales, relus = (problem.a.scale, problem.b.scale), (problem.a.relu, problem.b.relu)
    return (*scales, *relus, *_window(problem.support), problem.support.key_span)
