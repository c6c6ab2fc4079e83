"""The operators of a loss on the shards of one sequence: local queries, gathered keys, one call per segment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from streamkl import validation, value_checks
from streamkl.distributed.gathering import Gathered, KeyGradient, total
from streamkl.distributed.layout import HeadTail, Segment, segments
from streamkl.loss import Operators, row_stats
from streamkl.ops import Options, Tensors
from streamkl.problem import Inputs, compute_dtype
from streamkl.state import RowStats


class ShardedOperators(Operators):
    """`streamkl.loss.Operators` for queries and keys that are sharded by tokens.

    Row vectors are those of this rank's queries. The gradient of keys is added over segments and ranks in the dtype of
    the rows, float32 or float64, before it is rounded.

    Args:
        group: The ranks.
        queries: The layout of queries.
        keys: The layout of keys.
        arguments: The checked arguments of the loss, with the tokens of this rank and ``cu_seqlens`` of all.
        teacher_k: The teacher's keys, if they are being gathered already.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        queries: HeadTail,
        keys: HeadTail,
        arguments: validation.KLArguments,
        teacher_k: Gathered | None,
    ) -> None:
        self.group, self.queries, self.keys, self.arguments = group, queries, keys, arguments
        allowed = arguments.keys
        value_checks.check_cu_seqlens(allowed.cu_seqlens_q, allowed.cu_seqlens_k, queries.tokens, keys.tokens)
        value_checks.check_topk(allowed.topk, keys.tokens)
        starts = None
        if allowed.cu_seqlens_q is not None and allowed.cu_seqlens_k is not None:
            starts = allowed.cu_seqlens_q.tolist(), allowed.cu_seqlens_k.tolist()
        self.segments = segments(queries, keys.tokens, allowed.left, allowed.right, starts, allowed.topk is None)
        # The student's first: its row max says which rows count, while the teacher's keys are on their way.
        self._student = Gathered(keys, group, arguments.student_k, 2)
        self._teacher = teacher_k or Gathered(keys, group, arguments.teacher_k, 2)

    def whole(self, tensors: Tensors) -> Tensors:
        """The tensors with all keys, without their graph."""
        a_k, b_k = (self._gathered(k) for k in (tensors.a_k, tensors.b_k))
        return Tensors(*(None if x is None else x.detach() for x in tensors._replace(a_k=a_k, b_k=b_k)))  # pyright: ignore

    def _gathered(self, local: Tensor) -> Tensor:
        if local is not self.arguments.teacher_k:
            return self._student.whole()
        whole = self._teacher.whole()
        if self.arguments.keys.packed and whole.dim() == 3:  # gathered by the caller, in the layout of packed tensors
            whole = whole.transpose(0, 1).unsqueeze(0)
        return whole.to(local.dtype)

    def calls(self, whole: Tensors, options: Options) -> Iterator[tuple[Segment, Tensors, Options]]:
        """Each segment, with its tensors and numbers."""
        for segment in self.segments:
            rows, keys = segment.rows, segment.keys
            topk = None if whole.topk is None else whole.topk[:, :, rows]
            if topk is not None:  # a key past the last one that a row may see is none
                topk = torch.where(topk < keys.stop - keys.start, topk, -1)
            starts = (
                None if starts is None else torch.tensor(starts, dtype=torch.int32, device=whole.a_q.device)
                for starts in (segment.starts_q, segment.starts_k)
            )
            tensors = Tensors(
                whole.a_q[:, :, rows], whole.a_k[:, :, keys], whole.b_q[:, :, rows], whole.b_k[:, :, keys],
                None if whole.b_w is None else whole.b_w[:, :, rows], topk, *starts,
            )  # fmt: skip
            yield segment, tensors, options._replace(left=segment.left, right=segment.right)

    def row_stats(
        self, side: str, tensors: Tensors, options: Options, dtype: torch.dtype, checked: bool
    ) -> tuple[Tensor, Tensor]:
        """``(m, ln l)`` of a side, for the queries of this rank."""
        # The keys of the other side may still be on their way: they are not waited for.
        local = tensors._replace(a_k=tensors.b_k) if side == "b" else tensors._replace(b_k=tensors.a_k)
        calls = self.calls(self.whole(local), options)
        stats = [row_stats(side, part, numbers, dtype, True) for _, part, numbers in calls]
        heads = (tensors.a_q if side == "a" else tensors.b_q).shape[1]
        return self._joined(stats, 1 if side == "b" and options.b_head_summed else heads, 2, tensors, dtype)

    def paired_rows(self, tensors: Tensors, options: Options) -> tuple[Tensor, ...]:
        """The outputs of ``paired_rows``, of which the first is differentiable."""
        return _Rows.apply(self, tensors, options, (), *tensors[:5])  # pyright: ignore[reportReturnType]

    def mixture_rows(
        self, tensors: Tensors, m_a: Tensor, ln_l_a: Tensor, checked: bool, options: Options
    ) -> tuple[Tensor, ...]:
        """The outputs of ``mixture_rows``, of which the first is differentiable."""
        return _Rows.apply(self, tensors, options, (m_a, ln_l_a), *tensors[:5])  # pyright: ignore[reportReturnType]

    def train(self, tensors: Tensors, stats: RowStats, weight: Tensor, options: Options) -> Tensor:
        """The weighted sum over all ranks; whatever gradients take is exchanged here, and the backward only scales."""
        _, _, b_q, b_k, b_w = tensors[:5]
        return _Train.apply(self, tensors, options, stats, weight, b_q, b_k, b_w)  # pyright: ignore[reportReturnType]

    def total(self, x: Tensor) -> Tensor:
        """The sum over all ranks."""
        return total(x, self.group)

    def _joined(
        self, parts: list[tuple[Tensor, ...]], heads: int, count: int, tensors: Tensors, dtype: torch.dtype
    ) -> Any:
        """Row vectors of all segments, one after another; ``count`` empty ones if this rank has no rows."""
        if parts:
            return tuple(torch.cat(rows, 2) for rows in zip(*parts, strict=True))
        shape = (tensors.b_q.shape[0], heads, 0)
        return tuple(torch.empty(shape, dtype=dtype, device=tensors.b_q.device) for _ in range(count))


class _Train(torch.autograd.Function):
    """Loss and gradients in one pass per segment."""

    @staticmethod
    def forward(
        ctx: Any, operators: ShardedOperators, tensors: Tensors, options: Options, stats: RowStats, weight: Tensor,
        b_q: Tensor, b_k: Tensor, b_w: Tensor | None,
    ) -> Tensor:  # fmt: skip
        whole, dtype = operators.whole(tensors), compute_dtype(tensors.a_q.dtype, b_q.dtype)
        loss = torch.zeros((), dtype=dtype, device=b_q.device)
        dq = torch.zeros(b_q.shape, dtype=dtype, device=b_q.device)
        dw = None if b_w is None else torch.zeros(b_w.shape, dtype=dtype, device=b_q.device)
        dk = KeyGradient(operators.keys, b_k, dtype)
        for segment, part, numbers in operators.calls(whole, options):
            rows = (x[:, :, segment.rows] for x in (*stats, weight))
            of_rows, d_b_q, d_b_k, d_b_w = torch.ops.streamkl.train(*part, *rows, *numbers)
            loss += of_rows
            dq[:, :, segment.rows] = d_b_q
            dk.add(d_b_k, segment.keys.start)
            if dw is not None:
                dw[:, :, segment.rows] = d_b_w
        ctx.dtypes = [None if x is None else x.dtype for x in (b_q, b_k, b_w)]
        ctx.save_for_backward(dq, dk.reduce(operators.group), dw)
        dist.all_reduce(loss, group=operators.group)
        return loss

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        scaled = (
            torch.ops.streamkl.scale_gradient(gradient, upstream[0], dtype) if need else None
            for gradient, dtype, need in zip(ctx.saved_tensors, ctx.dtypes, ctx.needs_input_grad[5:], strict=True)
        )
        return None, None, None, None, None, *scaled


class _Rows(torch.autograd.Function):
    """The divergence of each row; the backward passes over the tiles again, and exchanges the gradients of keys."""

    @staticmethod
    def forward(
        ctx: Any, operators: ShardedOperators, tensors: Tensors, options: Options, stats_a: tuple[Tensor, ...],
        *inputs: Tensor | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        whole, dtype, made = operators.whole(tensors), compute_dtype(tensors.a_q.dtype, tensors.b_q.dtype), []
        for segment, part, numbers in operators.calls(whole, options):
            if stats_a:
                rows = (x[:, :, segment.rows] for x in stats_a)
                made.append(torch.ops.streamkl.mixture_rows(*part, *rows, True, *numbers))
            else:
                made.append(torch.ops.streamkl.paired_rows(*part, *numbers))
        heads = 1 if options.b_head_summed else tensors.b_q.shape[1]
        outputs = operators._joined(made, heads, 4 if stats_a else 6, tensors, dtype)
        if stats_a:
            (_, m_b, ln_l_b, _), mean = outputs, None
            stats = (*stats_a, m_b, ln_l_b)
        else:
            _, mean, *stats = outputs
        ctx.operators, ctx.options = operators, options
        ctx.dtypes = Inputs(*(None if x is None else x.dtype for x in inputs))  # pyright: ignore[reportArgumentType]
        ctx.save_for_backward(mean, *stats, *whole)
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        operators, needs, row_grad = ctx.operators, Inputs(*ctx.needs_input_grad[4:]), upstream[0]
        mean, *saved = ctx.saved_tensors
        stats, whole = saved[:4], Tensors(*saved[4:])
        want_a, want_b = needs.a_q or needs.a_k, needs.b_q or needs.b_k or needs.b_w
        dtype = compute_dtype(whole.a_q.dtype, whole.b_q.dtype)
        of_rows = {
            name: torch.zeros_like(x)
            for name, want in (("a_q", want_a), ("b_q", want_b), ("b_w", want_b))
            if want and (x := getattr(whole, name)) is not None
        }
        of_keys = {
            name: KeyGradient(operators.keys, getattr(whole, name), dtype)
            for name, want in (("a_k", want_a), ("b_k", want_b))
            if want
        }
        for segment, part, numbers in operators.calls(whole, ctx.options):
            rows = [None if x is None else x[:, :, segment.rows] for x in (row_grad, mean, *stats)]
            made = torch.ops.streamkl.rows_backward(*rows, *part, *numbers, want_a, want_b, False)
            gradients = dict(zip(Inputs._fields, made, strict=True))
            for name, gradient in of_keys.items():
                gradient.add(gradients[name], segment.keys.start)
            for name, gradient in of_rows.items():
                gradient[:, :, segment.rows] = gradients[name]
        every = of_rows | {name: gradient.reduce(operators.group) for name, gradient in of_keys.items()}
        given = (
            every[name].to(dtype) if need else None
            for name, need, dtype in zip(Inputs._fields, needs, ctx.dtypes, strict=True)
        )
        return None, None, None, None, *given
