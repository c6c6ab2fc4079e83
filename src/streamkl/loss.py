"""How a loss is composed of the operators: which side is which, which path to take, weights and reduction.

Everything computed here is plain PyTorch on row vectors, so that autograd, ``torch.compile`` and DTensor see it. The
operators are those of this process (`Operators`), or run on the shards of one sequence (``distributed.operators``).
"""

from __future__ import annotations

import math
import sys
from typing import NamedTuple

import torch
from torch import Tensor

from streamkl import validation
from streamkl.ops import Options, Tensors
from streamkl.problem import compute_dtype
from streamkl.state import RowStats


class Operators:
    """The operators that a loss is composed of. Row vectors and queries are those of this process."""

    def row_stats(
        self, side: str, tensors: Tensors, options: Options, dtype: torch.dtype, checked: bool
    ) -> tuple[Tensor, Tensor]:
        """``(m, ln l)`` of a side, by a pass over it; ``checked`` if ``topk`` needs no further check."""
        return row_stats(side, tensors, options, dtype, checked)

    def paired_rows(self, tensors: Tensors, options: Options) -> tuple[Tensor, ...]:
        """The outputs of ``paired_rows``."""
        return torch.ops.streamkl.paired_rows(*tensors, *options)

    def mixture_rows(
        self, tensors: Tensors, m_a: Tensor, ln_l_a: Tensor, checked: bool, options: Options
    ) -> tuple[Tensor, ...]:
        """The outputs of ``mixture_rows``."""
        return torch.ops.streamkl.mixture_rows(*tensors, m_a, ln_l_a, checked, *options)

    def train(self, tensors: Tensors, stats: RowStats, weight: Tensor, options: Options) -> Tensor:
        """The weighted sum of all rows' losses, whose backward scales the gradients that came with it."""
        return torch.ops.streamkl.train(*tensors, *stats, weight, *options)[0]

    def total(self, x: Tensor) -> Tensor:
        """The sum over all rows, from that of the rows of this process."""
        return x


class BlockHeads(NamedTuple):
    """Heads ``[groups, block, heads]`` that each read one key of every block, in place of ``groups * heads`` heads.

    A block's probability is then the sum over ``block`` of its heads, and the mean over all of them is that of blocks.
    The heads of a group that read the same key of a block are consecutive: a run of them has that key's mean.
    """

    groups: int
    block: int
    heads: int

    def queries(self, x: Tensor) -> Tensor:
        """``[B, groups * block * heads, ...]`` of ``[B, groups * heads, ...]``, copied."""
        x = x.unflatten(1, (self.groups, self.heads)).unsqueeze(2)
        return x.expand(-1, -1, self.block, *x.shape[3:]).flatten(1, 3)

    def keys(self, k: Tensor) -> Tensor:
        """``[B, groups * block * key heads, blocks, D]`` of ``[B, Hkv, blocks * block, D]``.

        Key heads that several groups read are repeated for each of them.
        """
        times = math.lcm(k.shape[1], self.groups) // k.shape[1]
        k = k if times == 1 else k.repeat_interleave(times, 1)
        k = k.unflatten(2, (-1, self.block)).unflatten(1, (self.groups, -1))  # [B, groups, heads, blocks, block, D]
        return k.permute(0, 1, 4, 2, 3, 5).flatten(1, 3)

    def stats(self, m: Tensor, ln_l: Tensor) -> tuple[Tensor, Tensor]:
        """``(m, ln l)`` ``[B, groups * heads, Nq]`` over all keys, from those of each key of a block."""
        m, ln_l = (x.unflatten(1, self) for x in (m, ln_l))
        top = m.amax(2)
        more = ((m - top.unsqueeze(2)) + ln_l).logsumexp(2)
        return top.flatten(1, 2), torch.where(top == -torch.inf, 0.0, more).flatten(1, 2)


def attention_kl(
    arguments: validation.KLArguments,
    teacher_scale: float | None,
    student_scale: float | None,
    student_activation: str | None,
    divergence: str,
    reduction: str,
    backend: str,
    operators: Operators | None = None,
) -> Tensor:
    """The loss of ``api.attention_kl`` or ``api.indexer_kl``; row losses come back ``[B, R, Nq]``.

    An indexer always takes the path of a mixture, even if its teacher has one head. ``operators`` are those
    of this process unless others are given.
    """
    _load_sharding_rules()
    operators = Operators() if operators is None else operators
    keys = arguments.keys
    rest = None if arguments.teacher_rest is None else arguments.teacher_rest.detach()
    lse = given = None if arguments.teacher_lse is None else arguments.teacher_lse.detach()
    relu = student_activation == "relu"
    runs = arguments.block if arguments.block_max else 1
    numbers = (arguments.head_summed, keys.left, keys.right, keys.key_span, runs, arguments.deterministic, backend)
    if divergence == "forward":
        a_q, a_k, b_q, b_k = arguments.teacher_q, arguments.teacher_k, arguments.student_q, arguments.student_k
        options = Options(teacher_scale, student_scale, False, relu, *numbers)
    else:
        a_q, a_k, b_q, b_k = arguments.student_q, arguments.student_k, arguments.teacher_q, arguments.teacher_k
        options = Options(student_scale, teacher_scale, relu, False, *numbers)
        lse = None  # that of side b, which is computed anyway, and checked with it
    b_w = arguments.student_w
    blocks = None
    if arguments.block > 1:  # without gradients to side a
        groups = 1 if arguments.head_summed else b_q.shape[1]
        blocks = BlockHeads(groups, arguments.block, a_q.shape[1] // groups)
        a_q, a_k = blocks.queries(a_q), blocks.keys(a_k)
    tensors = Tensors(a_q, a_k, b_q, b_k, b_w, keys.topk, keys.cu_seqlens_q, keys.cu_seqlens_k)
    dtype = compute_dtype(a_q.dtype, b_q.dtype)
    row_weight = arguments.row_weight
    if row_weight is not None:
        row_weight = torch.ops.streamkl.checked_weight(row_weight, dtype)

    mixture = arguments.head_summed or a_q.shape[1] != b_q.shape[1]
    want_a, want_b = (
        torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in side)
        for side in ((a_q, a_k), (b_q, b_k, b_w))
    )
    rest = rest if mixture else None  # heads that are compared one by one have a mean of one
    if want_b and not want_a and reduction != "none" and (mixture or lse is not None):
        # The weight of every row is known before the pass: it computes loss and gradients together.
        m_a, ln_l_a = _teacher_row_stats(lse, rest, tensors, options, dtype, operators, blocks)
        m_b, ln_l_b = operators.row_stats("b", tensors, options, dtype, lse is None)
        weight = _counted(m_b, row_weight)
        if lse is not None:  # the sums are checked with the pass that makes them
            weight = torch.ops.streamkl.checked_mass(weight, torch.ones_like(weight), lse)
        if reduction == "mean":
            weight = weight / _nonzero(operators.total(weight.sum()))
        return operators.train(tensors, RowStats(m_a, ln_l_a, m_b, ln_l_b), weight, options)
    if mixture:
        m_a, ln_l_a = _teacher_row_stats(lse, rest, tensors, options, dtype, operators, blocks)
        kl, m_b, _, mass = operators.mixture_rows(tensors, m_a, ln_l_a, lse is None, options)
    else:
        kl, _, m_a, ln_l_a, m_b, ln_l_b = operators.paired_rows(tensors, options)
        m, ln_l = (m_a, ln_l_a) if divergence == "forward" else (m_b, ln_l_b)
        # Computed even if it is given: the mass says by how much the two differ.
        mass = m if given is None else torch.exp((m.detach() - given) + ln_l.detach())
    weight = _counted(m_b.detach(), row_weight)
    if given is not None:
        weight = torch.ops.streamkl.checked_mass(weight, mass.detach(), given)
    rows = torch.where(weight != 0, weight * kl, 0.0)
    if reduction == "none":
        return rows
    total = operators.total(rows.sum())
    return total if reduction == "sum" else total / _nonzero(operators.total(weight.sum()))


def attention_lse(arguments: validation.LSEArguments, scale: float | None, backend: str) -> Tensor:
    """The log-sum-exp of each row's logits, ``[B, H, Nq]``."""
    _load_sharding_rules()
    q, k, keys = arguments.q, arguments.k, arguments.keys
    m, ln_l = torch.ops.streamkl.logsumexp(
        q, k, None, keys.topk, keys.cu_seqlens_q, keys.cu_seqlens_k, scale, False, False, keys.left, keys.right,
        keys.key_span, False, compute_dtype(q.dtype), backend,
    )  # fmt: skip
    return m + ln_l


def _load_sharding_rules() -> None:
    """Registers the DTensor rules once there can be a DTensor: importing it costs most of a second."""
    if "torch.distributed.tensor" in sys.modules:
        from streamkl import sharding

        sharding.register()


_load_sharding_rules._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compile runs it, untraced


def row_stats(
    side: str, tensors: Tensors, options: Options, dtype: torch.dtype, checked: bool = False
) -> tuple[Tensor, Tensor]:
    """``(m, ln l)`` of a side, by a pass over it; ``checked`` if ``topk`` needs no further check."""
    if side == "a":
        q, k, w, numbers = tensors.a_q, tensors.a_k, None, (options.a_scale, options.a_relu, False)
    else:
        q, k, w, numbers = (
            tensors.b_q,
            tensors.b_k,
            tensors.b_w,
            (options.b_scale, options.b_relu, options.b_head_summed),
        )
    return torch.ops.streamkl.logsumexp(
        q.detach(), k.detach(), None if w is None else w.detach(), tensors.topk, tensors.cu_seqlens_q,
        tensors.cu_seqlens_k, *numbers, options.left, options.right, options.key_span, checked, dtype,
        options.backend,
    )  # fmt: skip


def _teacher_row_stats(
    lse: Tensor | None,
    rest: Tensor | None,
    tensors: Tensors,
    options: Options,
    dtype: torch.dtype,
    operators: Operators,
    blocks: BlockHeads | None,
) -> tuple[Tensor, Tensor]:
    """``(m, ln l)`` of side ``a``, by a pass or from the caller's log-sum-exp, for its heads or those of ``blocks``.

    A float64 log-sum-exp beside float32 inputs keeps in ``ln l`` what ``m`` has no digits for.
    """
    if lse is None:
        m, ln_l = operators.row_stats("a", tensors, options, dtype, False)
        m, ln_l = (m, ln_l) if blocks is None else blocks.stats(m, ln_l)
    else:
        m = lse.to(dtype)
        m = torch.where(m == -torch.inf, torch.nan, m)  # wrong for a row that sees a key; unused in a dead row
        ln_l = (lse - m).to(dtype)
        ln_l = torch.where(ln_l.isfinite(), ln_l, 0.0)
    if rest is not None:
        m, ln_l = _weighed_by_share(m, ln_l, rest, 1 if options.b_head_summed else tensors.b_q.shape[1])
    if blocks is None:
        return m, ln_l
    if options.runs == 1:  # the mean is a sum over a block's keys
        return blocks.queries(m), blocks.queries(ln_l - math.log(blocks.block))
    m, ln_l = blocks.queries(m), blocks.queries(ln_l)
    *_, mass = operators.mixture_rows(tensors.detached(), m, ln_l, True, options)
    mass = torch.where(mass > 0, mass, 1.0).repeat_interleave(blocks.block * blocks.heads, 1)  # 0 for a dead row
    return m, ln_l + mass.log()  # the largest of each block's keys sum to 1


def _weighed_by_share(m: Tensor, ln_l: Tensor, rest: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """``(m, ln l)`` ``[B, H, Nq]`` with which the mean of a head group weighs each head by its share of the softmax.

    ``rest [B, H, Nq]`` is the log-sum-exp of the keys outside. A head's share of attention on the keys inside is
    ``sigmoid(m + ln l - rest)``; its probabilities inside sum to the share over the group's mean of shares, so that
    those of the group's mean sum to 1.
    """
    ln_share = torch.nn.functional.logsigmoid((m - rest) + ln_l)
    grouped = ln_share.unflatten(1, (groups, -1))
    ln_mean = grouped.logsumexp(2, keepdim=True) - math.log(grouped.shape[2])
    more = (ln_mean - grouped).flatten(1, 2).to(m.dtype)
    more = torch.where(m == -torch.inf, 0.0, more)  # a row that sees no key
    return torch.where(more.isfinite(), m, torch.nan), torch.where(more.isfinite(), ln_l + more, 0.0)


def _counted(m: Tensor, row_weight: Tensor | None) -> Tensor:
    """The weight of each row, 0 where it sees no key (and so has a row max of ``-inf``)."""
    counted = m != -torch.inf
    return counted.to(m.dtype) if row_weight is None else torch.where(counted, row_weight, 0.0)


def _nonzero(total: Tensor) -> Tensor:
    return torch.where(total == 0, 1.0, total)
