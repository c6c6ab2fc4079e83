"""The Triton engine, for NVIDIA and AMD GPUs; with ``TRITON_INTERPRET=1`` its kernels run on CPU tensors, for tests.

``kernels/`` holds the kernels, ``plans/`` and ``launch.py`` the host side, ``configs/`` the tables of tile sizes.
Kernels and plans are divided alike: dense passes, gathered keys, selection and sparse attention. Triton is imported
when the engine first runs, not before.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
import os
import re
from importlib import metadata
from types import ModuleType

import torch
from torch import Tensor

from streamkl.problem import AttentionOutput, Gradients, Inputs, Problem, Side, Support
from streamkl.state import RowStats

name = "triton"
summary = "fused Triton kernels"

OLDEST = (3, 7)
"""The first Triton whose functions may return tuples with ``None`` in them, as kernels do."""


def unsupported(device: torch.device, problem: Problem | None = None) -> str | None:
    """Why this engine cannot run the problem there: no GPU that it knows, float64, or no Triton."""
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "runs on NVIDIA and AMD GPUs, and on a CPU only in Triton's interpreter (TRITON_INTERPRET=1)"
    if device.type not in ("cpu", "cuda"):
        return f"runs on NVIDIA and AMD GPUs, not on {device.type}"
    if problem is not None and problem.dtype == torch.float64:
        return "computes in float32, and float64 was given"
    if problem is not None and problem.deterministic and problem.support.topk is not None and device.type != "cpu":
        return "is not deterministic with topk_indices: queries add to their selected keys in any order"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install triton"
    return _too_old() or (_unknown_gpu(device) if device.type == "cuda" else None)


def reluctant(device: torch.device) -> str | None:
    """Why ``auto`` should not take this engine even if it can run: the interpreter is for tests."""
    return "would be interpreted: name it to test it" if device.type == "cpu" else None


@functools.cache
def _too_old() -> str | None:
    for distribution in ("triton", "pytorch-triton-rocm", "pytorch-triton"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found = metadata.version(distribution)  # without importing it
            version = tuple(int(part) for part in re.findall(r"\d+", found)[:2])
            return None if version >= OLDEST else f"needs Triton {OLDEST[0]}.{OLDEST[1]} or later, found {found}"
    return None


@functools.cache
def _unknown_gpu(device: torch.device) -> str | None:
    from streamkl.engines.triton.configs import architecture

    if not torch.cuda.is_available():
        return "no GPU was found by torch"
    if torch.version.hip is None:
        old = torch.cuda.get_device_capability(device) < (8, 0)
        return "needs an NVIDIA GPU of compute capability 8.0 or later" if old else None
    arch = architecture.of(device)
    return (
        None if architecture.has_table(arch) else f"has no table of configs for {arch}; STREAMKL_CONFIGS can name one"
    )


def _plans(support: Support) -> ModuleType:
    """The plans for a support: over all keys, or over selected ones."""
    from streamkl.engines.triton.plans import dense, gathered

    return dense if support.topk is None else gathered


def logsumexp(
    support: Support, side: Side, q: Tensor, k: Tensor, w: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """``(m, ln l)`` of the side's logits, each ``[B, distributions, Nq]``; ``(-inf, 0)`` where a row sees no key."""
    from streamkl.engines.triton import launch
    from streamkl.engines.triton.configs import architecture

    launches, rows = _plans(support).logsumexp(support, side, q, k, w, architecture.of(q.device))
    launch.run_all(launches, q.device)
    return rows


def paired_rows(problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor, RowStats]:
    """The divergence of each row, ``[B, R, Nq]``, head by head, its mean and its row stats."""
    from streamkl.engines.triton import launch
    from streamkl.engines.triton.configs import architecture

    device = inputs.b_q.device
    launches, rows = _plans(problem.support).paired_rows(problem, inputs, architecture.of(device))
    launch.run_all(launches, device)
    return rows


def mixture_rows(
    problem: Problem, inputs: Inputs, m_a: Tensor, ln_l_a: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``(kl, m_b, ln l_b, s)`` of each row against the mean of its heads of ``a``, whose row stats are known."""
    from streamkl.engines.triton import launch
    from streamkl.engines.triton.configs import architecture

    device = inputs.b_q.device
    launches, rows = _plans(problem.support).mixture_rows(problem, inputs, m_a, ln_l_a, architecture.of(device))
    launch.run_all(launches, device)
    return rows


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
    """Gradients of ``sum(row_grad * kl)`` in the inputs' dtypes: one pass, or two where it must be deterministic.

    Without ``round_keys``, dK is in float32.
    """
    from streamkl.engines.triton import launch
    from streamkl.engines.triton.configs import architecture

    device = inputs.b_q.device
    launches, gradients = _plans(problem.support).backward(
        problem, inputs, stats, mean, row_grad, want_a, want_b, architecture.of(device), round_keys
    )  # fmt: skip
    launch.run_all(launches, device)
    rounded = (True, round_keys, True, round_keys, True)
    return Gradients(
        *(
            None if grad is None or x is None else _sum_splits(grad, x).to(x.dtype if cast else torch.float32)
            for grad, x, cast in zip(gradients, inputs, rounded, strict=True)
        )
    )


def train(problem: Problem, inputs: Inputs, stats: RowStats, weight: Tensor) -> tuple[Tensor, Gradients, Tensor]:
    """``sum(weight * kl)``, its gradients to side ``b``, unrounded, and the mass, in one pass over ``a``."""
    from streamkl.engines.triton import launch
    from streamkl.engines.triton.configs import architecture

    device = inputs.b_q.device
    launches, made = _plans(problem.support).train(problem, inputs, stats, weight, architecture.of(device))
    launch.run_all(launches, device)
    s, acc = (_sum_splits(x, weight) for x in (made.sum_p, made.sum_acc))
    ln2 = math.log(2)
    rounding = (stats.ln_l_b.double() - ln2 * made.b.log2_l.double()).float()  # of log2 l_b, which the pass read
    kl = (ln2 * acc / s + rounding) - torch.log(s)
    loss = torch.where(weight != 0, weight * torch.where(s != 0, kl, acc), 0.0).sum()
    dw = None if made.dw is None or inputs.b_w is None else _sum_splits(made.dw, inputs.b_w)
    gradients = Gradients(None, None, _sum_splits(made.dq, inputs.b_q), made.dk, dw)
    return loss, gradients, torch.where(weight == 0, 1.0, s)


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
    """The keys of an indexer's highest scores, ``[B, query_blocks, topk]``, always best first; ``w [B, J, Nq]``."""
    from streamkl.engines.triton import launch
    from streamkl.engines.triton.configs import architecture
    from streamkl.engines.triton.plans import selection

    lse = None
    if normalise:
        m, ln_l = logsumexp(support, side, q, k, w, torch.float32)
        lse = m + ln_l
    launches, out = selection.index_topk(
        support, side, q, k, w, lse, topk, query_block, support.query_block_count(query_block),
        architecture.of(q.device),
    )  # fmt: skip
    launch.run_all(launches, q.device)
    return out


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
    """Output and row stats of attention over the selected keys ``indices [B, query_blocks, K]``."""
    from streamkl.engines.triton import launch
    from streamkl.engines.triton.configs import architecture
    from streamkl.engines.triton.plans import attention

    launches, out = attention.sparse_attention(
        support, side, q, k, v, indices, query_block, for_backward, architecture.of(q.device), page_table
    )  # fmt: skip
    launch.run_all(launches, q.device)
    return out


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
    """Gradients to ``q``, ``k`` and ``v``, in their dtypes: a pass over queries, and one over keys, without atomics."""
    from streamkl.engines.triton import launch
    from streamkl.engines.triton.configs import architecture
    from streamkl.engines.triton.plans import attention

    launches, gradients = attention.sparse_attention_backward(
        support, side, q, k, v, indices, query_block, output, d_out, architecture.of(q.device), d_lse
    )  # fmt: skip
    launch.run_all(launches, q.device)
    return gradients


def _sum_splits(x: Tensor, like: Tensor) -> Tensor:
    """The sum over the splits of the keys, if there are several."""
    return x.sum(0) if x.dim() > like.dim() else x
