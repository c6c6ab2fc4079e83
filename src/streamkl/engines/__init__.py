"""The engines, and the choice between them.

An engine is a module with the functions of `Engine`. It imports ``problem`` and ``state`` and no other engine;
``ops`` is the only one who calls it.
"""

from __future__ import annotations

import functools
import warnings
from importlib import import_module
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from streamkl.problem import AttentionOutput, Gradients, Inputs, Problem, Side, Support
from streamkl.state import RowStats

PREFERENCE = ("triton", "cpu", "tiled")
"""Engines by name, the one that ``auto`` tries first in front."""


class Engine(Protocol):
    """The functions of an engine. Row vectors are ``[B, heads, Nq]``, in float32 (float64 for float64 inputs).

    Row vectors of side ``b`` have ``problem.distributions`` heads, those of side ``a`` its heads. An indexer is a side
    ``b`` that is ``head_summed``; keys are selected where there is a ``support.topk``; the target is a maximum where
    ``problem.runs > 1``. An engine that lacks one of these says so in ``unsupported``. Three functions are optional:
    ``reluctant(device)`` says why ``auto`` should not take an engine that can run; ``broken(device, problem)`` says why
    an engine that should run does not, such as after a failed build, and ``auto`` then warns; ``first_wrong_row(topk,
    nk)`` checks top-k indices faster than ``value_checks.check_topk``.
    """

    name: str
    summary: str

    def unsupported(self, device: torch.device, problem: Problem | None = None) -> str | None:
        """Why the engine cannot run the problem (or any, if none is named) on the device, or ``None`` if it can.

        A log-sum-exp is asked for as the problem of a side against itself.
        """
        ...

    def logsumexp(
        self, support: Support, side: Side, q: Tensor, k: Tensor, w: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """``(m, ln l)`` of one side's logits, computed in ``dtype``; ``(-inf, 0)`` for a row that sees no key.

        Each is ``[B, side.distributions, Nq]``; ``w [B, J, Nq]`` are the weights of a head-summed side, if it has any.
        """
        ...

    def paired_rows(self, problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor, RowStats]:
        """The divergence of each row where both sides have as many heads, its mean (`PairedState`) and row stats."""
        ...

    def mixture_rows(
        self, problem: Problem, inputs: Inputs, m_a: Tensor, ln_l_a: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """``(kl, m_b, ln l_b, s)`` against a head mean of ``a``, whose LSE is known up to a shift per head group.

        ``s`` is the sum of the mean over a row's keys. Where ``b`` is head-summed, the head group may have one head.
        """
        ...

    def backward(
        self,
        problem: Problem,
        inputs: Inputs,
        stats: RowStats,
        mean: Tensor | None,
        row_grad: Tensor,
        want_a: bool,
        want_b: bool,
        round_keys: bool = True,
    ) -> Gradients:
        """Gradients of ``sum(row_grad * kl)``, in the inputs' dtypes; rows of ``row_grad = 0`` contribute exactly 0.

        Where side ``a`` wants gradients, ``mean`` is that of `paired_rows`. Where ``b`` does and has weights, they
        have a gradient too. Without ``round_keys``, dK is in the dtype of the rows.
        """
        ...

    def train(
        self, problem: Problem, inputs: Inputs, stats: RowStats, weight: Tensor
    ) -> tuple[Tensor, Gradients, Tensor]:
        """``sum(weight * kl)``, its gradients to side ``b`` before rounding, contiguous, and the mass, in one pass.

        The mass is the sum of each row's probabilities of ``a``, which reveals a wrong LSE; 1 for a row of weight 0.
        """
        ...


class SparseEngine(Protocol):
    """The functions of an engine that selects keys and attends to them; not every engine does.

    ``query_block`` consecutive rows of a sequence share their top-k (`Support.query_blocks`). Keys are counted from the
    first of their sequence; -1 stands for none. ``unsupported`` is asked about the problem of the side against itself.
    An engine with ``checks_topk = True`` refuses wrong int32 indices itself, as ``value_checks.check_topk`` does where
    all rows belong to a sequence.
    """

    def index_topk(
        self,
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
        """The keys of an indexer's highest scores: ``[B, query_blocks, topk]``, int32, if ``sort`` best first.

        The score of a key for a query block is the highest of its rows' scores, less the row's log-sum-exp if they are
        normalised; equal scores go by lower key. If ``query_block > 1``, the keys on the block's diagonal are among
        them, with ``sort`` first.
        """
        ...

    def attention_topk(
        self, support: Support, side: Side, q: Tensor, k: Tensor, lse: Tensor, topk: int, query_block: int
    ) -> Tensor:
        """The same by the head mean of the attention, whose log-sum-exp is ``lse [B, H, Nq]``."""
        ...

    def sparse_attention(
        self,
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
        """Attention over the selected keys ``indices [B, query_blocks, K]``; with ``rest`` if it is ``for_backward``.

        With a ``page_table [sequences, n]`` of a packed batch, ``k`` and ``v`` are ``[pages, Hkv, page_size, D]``: key
        ``j`` of a sequence is token ``j % page_size`` of the page in column ``j // page_size`` of its row.

        Tokens lie outermost in the memory of its output: it is the transposed view of ``[B, Nq, H, Dv]``.
        """
        ...

    def sparse_attention_backward(
        self,
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
        """Gradients of ``sum(d_out * out) + sum(d_lse * lse)`` to ``q``, ``k`` and ``v``, contiguous, in their dtypes.

        ``d_lse [B, H, Nq]`` is 0 if not given. Repeated calls are bit-equal: what query blocks add to a key they add in
        a fixed order. Dead rows add exactly 0, whatever they and their ``d_out`` hold, and so do logits that are the
        only one of their row, unless there is a ``d_lse``.
        """
        ...


class Choice(NamedTuple):
    """The engine that a call gets, and why."""

    engine: Engine
    reason: str


def choose(backend: str, device: torch.device, problem: Problem | None = None, function: str | None = None) -> Choice:
    """The engine for a problem on a device, or for problems there in general; ``function`` is one of `SparseEngine`.

    A named engine is taken or refused, never replaced: ``RuntimeError`` says what is missing. ``auto`` takes the first
    that can run, and warns once if one before it should have run and does not.
    """
    refusals, failed = [], {}
    for name in PREFERENCE if backend == "auto" else (backend,):
        engine = _engine(name)
        refusal = engine.unsupported(device, problem)
        if refusal is None and function is not None and not hasattr(engine, function):
            refusal = f"has no {function}"
        if refusal is None and backend == "auto" and hasattr(engine, "reluctant"):
            refusal = engine.reluctant(device)  # pyright: ignore[reportAttributeAccessIssue]
        if refusal is None:
            for other, reason in failed.items():
                _warn(other, name, reason)
            taken = f"{name}: {engine.summary}" if backend == "auto" else "named by the caller"
            return Choice(engine, "; ".join([*refusals, taken]))
        refusals.append(f"{name}: {refusal}")
        if backend == "auto" and (reason := _broken(engine, device, problem)) is not None:
            failed[name] = reason
    raise RuntimeError(f"backend={backend!r} cannot run on {device}: {'; '.join(refusals)}")


def broken(device: torch.device) -> dict[str, str]:
    """The engines that should run on a device and do not, by name, and why."""
    reasons = {name: _broken(_engine(name), device, None) for name in PREFERENCE}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _engine(name: str) -> Engine:
    return import_module(f"{__name__}.{name}")  # pyright: ignore[reportReturnType]


def _broken(engine: Engine, device: torch.device, problem: Problem | None) -> str | None:
    return engine.broken(device, problem) if hasattr(engine, "broken") else None  # pyright: ignore


@functools.cache
def _warn(name: str, taken: str, reason: str) -> None:
    """Warns of an engine that should run and does not, once."""
    warnings.warn(
        f"the {name} engine should run here and does not, so {taken} runs instead, which is slower: "
        f"{reason.splitlines()[0]} (`streamkl doctor` says more; backend={taken!r} takes it without this warning)",
        RuntimeWarning,
        stacklevel=3,
    )
