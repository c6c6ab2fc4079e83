"""The public functions: signature, documentation, and the path to the operators.

Tensors are dense, ``[B, heads, N, D]``, or packed (varlen), ``[tokens, heads, D]`` with ``cu_seqlens_q`` and
``cu_seqlens_k``.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from streamkl import loss as compose
from streamkl import padding, reference, validation

Backend = Literal["auto", "reference", "triton", "cpu", "tiled"]


def attention_kl(
    teacher_q: Tensor,
    teacher_k: Tensor,
    student_q: Tensor,
    student_k: Tensor,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    key_span: int = 1,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    topk_indices: Tensor | None = None,
    teacher_scale: float | None = None,
    student_scale: float | None = None,
    student_activation: Literal["relu"] | None = None,
    teacher_lse: Tensor | None = None,
    teacher_rest: Tensor | None = None,
    row_weight: Tensor | None = None,
    divergence: Literal["forward", "reverse"] = "forward",
    target: Literal["token", "block_sum", "block_max"] = "token",
    reduction: Literal["mean", "sum", "none"] = "mean",
    deterministic: bool | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """KL divergence between two attention distributions, without either of their matrices.

    For every query it compares the student's attention over the keys with the teacher's. With as many student as
    teacher heads they are compared head by head; with fewer, each student head is compared with the mean of its head
    group, ``H/R`` consecutive teacher heads (``R = 1``: the mean of all). It is the same as this code (without a
    mask), but neither the two ``[B, heads, Nq, Nk]`` tensors nor anything else that grows with ``Nq * Nk`` is ever
    allocated::

        teacher_k = teacher_k.repeat_interleave(H // Hkv, dim=1)
        student_k = student_k.repeat_interleave(R // Rkv, dim=1)
        p = (teacher_q @ teacher_k.mT * teacher_scale).softmax(-1).unflatten(1, (R, H // R)).mean(2)
        q = (student_q @ student_k.mT * student_scale).softmax(-1)
        loss = (p * (p.log() - q.log())).sum(-1).mean()

    Differentiable once, in the student, and in the teacher where ``R == H``: detach a teacher that is frozen. Where
    only the student wants gradients, ``teacher_lse`` is given (or ``R < H``) and the reduction is ``mean`` or ``sum``,
    the forward computes loss and gradients in one pass over the teacher, and the backward only scales them.

    Args:
        teacher_q: ``[B, H, Nq, Dt]``, or packed ``[Tq, H, Dt]``. Any strides; float64, float32, bfloat16 or float16.
        teacher_k: ``[B, Hkv, Nk, Dt]``, or packed ``[Tk, Hkv, Dt]``, where ``Hkv`` divides ``H``; dtype of
            ``teacher_q``.
        student_q: ``[B, R, Nq, Ds]``, or packed ``[Tq, R, Ds]``, where ``R`` divides ``H``; its dtype and width may
            differ from the teacher's.
        student_k: ``[B, Rkv, Nk, Ds]``, or packed ``[Tk, Rkv, Ds]``, where ``Rkv`` divides ``R``; dtype of
            ``student_q``.
        causal: Query ``i`` sees keys ``j <= i + Nk - Nq``: aligned bottom-right, so that the last query sees all, as in
            FlashAttention. (The ``is_causal`` of ``scaled_dot_product_attention`` is aligned top-left.)
        window: ``(left, right)``: query ``i`` sees ``left`` keys before and ``right`` keys after its own, key
            ``i + Nk - Nq``; a negative side is unbounded. Intersects with ``causal``.
        key_span: How many tokens a key stands for, 1 unless keys are compressed. With ``m`` it is for ``causal=True``
            without a window: query ``i`` sees key ``j`` where ``(j + 1) m <= i + 1``, so once it has seen all tokens of
            the key. Queries start at a multiple of ``m`` and the last one sees all keys: in general query ``i`` sees
            keys ``j < (i + 1) // m + Nk - Nq // m``, of each sequence if they are packed.
        cu_seqlens_q: ``[sequences + 1]``, int32 or int64: where each packed sequence's queries start, and the end.
        cu_seqlens_k: The same for the keys. Queries see the keys of their own sequence.
        key_padding_mask: ``[B, N]`` of bool, for dense tensors with as many queries as keys: true for real tokens, a
            tokenizer's ``attention_mask.bool()``. Padding is on the left, on the right or on both sides. Padded keys
            are seen by no query, and padded queries see no key. A mask with holes is refused; on GPUs this is checked
            only under ``STREAMKL_CHECK=1``.
        topk_indices: ``[B, Nq, K]`` or ``[B, R, Nq, K]``, packed ``[Tq, K]`` or ``[R, Tq, K]``, int32 or int64: the
            selected keys of each query. It sees no others: both softmaxes run over them. Padded with -1, no key twice;
            a selected key that the mask hides stays hidden. In a packed batch they count from the first key of the
            query's own sequence. Work is linear in ``Nq * K``. On GPUs ``deterministic=True`` is refused with it.
        teacher_scale: Multiplies the teacher's products; ``1/sqrt(Dt)`` if not given.
        student_scale: Multiplies the student's products; ``1/sqrt(Ds)`` if not given.
        student_activation: ``"relu"`` applies a relu to the student's scaled products.
        teacher_lse: ``[B, H, Nq]``, packed ``[H, Tq]``, float32 or float64: the natural log-sum-exp of the teacher's
            scaled logits over exactly the keys allowed here, as fused attention returns it. Saves a pass over the
            teacher where gradients are wanted or ``R < H``. A constant. One that does not normalise the teacher is
            refused; on GPUs this is checked only under ``STREAMKL_CHECK=1``, since it synchronises.
        teacher_rest: ``[B, H, Nq]``, packed ``[H, Tq]``, float32 or float64: the log-sum-exp of what else each head's
            softmax covers outside the keys allowed here, such as a sink, a local window or a tail. A head then counts
            in the mean by the share of its attention on the allowed keys. ``-inf`` is nothing else. A constant,
            without effect where ``R == H``.
        row_weight: ``[B, Nq]`` or ``[B, R, Nq]``, packed ``[Tq]`` or ``[R, Tq]``: not negative, a constant.
        divergence: ``"forward"`` is KL(teacher || student), ``"reverse"`` KL(student || teacher), the latter for
            ``R == H``.
        target: ``"token"``, or ``"block_sum"`` or ``"block_max"``: ``teacher_k`` then has ``r`` keys for each of the
            student's, ``Nk * r`` in all. ``"block_sum"``: the target of a key is the sum of the mean attention to its
            ``r`` keys. ``"block_max"``: it is the largest of them, divided by the sum of all targets. Masks,
            ``cu_seqlens_k`` and ``topk_indices`` are those of the student's keys, and ``teacher_lse`` is over all keys
            of those that they allow; ``"block_max"`` takes none. Where blocks are runs of a causal sequence, give
            ``key_span=r`` too: without it a key is masked as if it were one token.
        reduction: ``"mean"`` is ``sum(w * kl) / sum(w)`` over the rows that see a key and have a weight, 0 if there is
            none; ``"sum"`` is ``sum(w * kl)``; ``"none"`` is ``w * kl``, ``[B, R, Nq]``, packed ``[R, Tq]``.
        deterministic: Bit-equal results on repeated calls; by default what ``torch.use_deterministic_algorithms`` says.
        backend: ``"auto"`` takes the best engine that can run. A named one (``"reference"``, ``"triton"``, ``"cpu"``,
            ``"tiled"``) is used or raises, and never falls back.

    Returns:
        The loss, float32 (float64 if an input is). A row that sees no key, or has weight 0, has a loss of exactly 0 and
        leaves gradients of exactly 0. Gradients have their input's dtype. A logit of ``-inf`` of the teacher (of the
        student, if ``"reverse"``) is a probability of 0 and adds 0; a row with any other logit that is not finite is
        nan.

    Raises:
        ValueError: An argument is wrong; the message says what was given and what was expected.

    Examples:
        A student with one head of width 32 learns the mean attention of a teacher with 8 query and 2 key heads:

        >>> import torch
        >>> from streamkl import attention_kl
        >>> _ = torch.manual_seed(0)
        >>> teacher_q, teacher_k = torch.randn(1, 8, 256, 64), torch.randn(1, 2, 256, 64)
        >>> student_q = torch.randn(1, 1, 256, 32, requires_grad=True)
        >>> student_k = torch.randn(1, 1, 256, 32, requires_grad=True)
        >>> loss = attention_kl(teacher_q, teacher_k, student_q, student_k, causal=True)
        >>> loss.backward()
        >>> loss.dtype, student_q.grad.shape
        (torch.float32, torch.Size([1, 1, 256, 32]))
    """
    arguments = validation.attention_kl_arguments(
        teacher_q, teacher_k, student_q, student_k, causal, window, cu_seqlens_q, cu_seqlens_k, topk_indices,
        teacher_scale, student_scale, student_activation, teacher_lse, teacher_rest, row_weight, divergence,
        reduction, deterministic, backend, key_span, target,
    )  # fmt: skip
    if key_padding_mask is not None:
        validation.check_padding_mask(key_padding_mask, arguments.teacher_q, arguments.student_k, arguments.keys)
        return padding.packed_call(
            attention_kl,
            key_padding_mask,
            {"teacher_q": teacher_q, "teacher_k": teacher_k, "student_q": student_q, "student_k": student_k},
            {
                "causal": causal, "window": window, "topk_indices": topk_indices, "teacher_scale": teacher_scale,
                "student_scale": student_scale, "student_activation": student_activation, "teacher_lse": teacher_lse,
                "teacher_rest": teacher_rest, "row_weight": row_weight, "divergence": divergence,
                "target": target, "reduction": reduction, "deterministic": deterministic, "backend": backend,
            },
        )  # fmt: skip
    if backend == "reference":
        validation.check_values(arguments)
        if teacher_lse is not None and target == "token":
            lse = attention_lse(
                teacher_q, teacher_k, scale=teacher_scale, causal=causal, window=window, key_span=key_span,
                cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, topk_indices=topk_indices, backend="reference",
            )  # fmt: skip
            validation.check_teacher_lse(arguments, lse)
        return reference.attention_kl(
            teacher_q, teacher_k, student_q, student_k, causal=causal, window=window, key_span=key_span,
            cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, topk_indices=topk_indices,
            teacher_scale=teacher_scale, student_scale=student_scale, student_activation=student_activation,
            teacher_rest=teacher_rest, row_weight=row_weight, divergence=divergence, target=target,
            reduction=reduction,
        )  # fmt: skip
    loss = compose.attention_kl(
        arguments, teacher_scale, student_scale, student_activation, divergence, reduction, backend
    )
    return loss.squeeze(0) if arguments.keys.packed and reduction == "none" else loss


def indexer_kl(
    teacher_q: Tensor,
    teacher_k: Tensor,
    index_q: Tensor,
    index_k: Tensor,
    index_w: Tensor | None = None,
    *,
    activation: Literal["relu"] | None = "relu",
    index_scale: float | None = None,
    topk_indices: Tensor | None = None,
    teacher_scale: float | None = None,
    teacher_lse: Tensor | None = None,
    teacher_rest: Tensor | None = None,
    causal: bool = True,
    window: tuple[int, int] | None = None,
    key_span: int = 1,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    row_weight: Tensor | None = None,
    target: Literal["token", "block_sum", "block_max"] = "token",
    reduction: Literal["mean", "sum", "none"] = "mean",
    deterministic: bool | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """KL divergence from the mean of all teacher heads to an indexer: the loss that trains key selection.

    The indexer of DeepSeek-V3.2 scores a key with ``J`` small query heads over one shared key, each through a relu,
    and sums the scores with per-query weights. For every query its softmax is compared with the head mean of the
    teacher's attention. It is the same as this code (without a mask), but neither the teacher's ``[B, H, Nq, Nk]``,
    nor the indexer's ``[B, J, Nq, Nk]``, nor anything else that grows with ``Nq * Nk`` is ever allocated::

        teacher_k = teacher_k.repeat_interleave(H // Hkv, dim=1)
        p = (teacher_q @ teacher_k.mT * teacher_scale).softmax(-1).mean(1)
        scores = (index_q @ index_k[:, None].mT * index_scale).relu()
        q = (scores * index_w.transpose(1, 2)[..., None]).sum(1).softmax(-1)
        loss = (p * (p.log() - q.log())).sum(-1).mean()

    No logarithm is clipped and no epsilon added. Differentiable once, in ``index_q``, ``index_k`` and ``index_w``; the
    teacher is a constant, whether it asks for gradients or not. With ``mean`` or ``sum`` the forward computes loss and
    gradients, and the backward only scales them. The forward takes one pass over the teacher, which is where the time
    goes, if ``teacher_lse`` is given, and two if it is not.

    Args:
        teacher_q: ``[B, H, Nq, Dt]``, or packed ``[Tq, H, Dt]``. Any strides; float64, float32, bfloat16 or float16.
        teacher_k: ``[B, Hkv, Nk, Dt]``, or packed ``[Tk, Hkv, Dt]``, where ``Hkv`` divides ``H`` (``Hkv = 1`` for the
            latent key of MLA); dtype of ``teacher_q``.
        index_q: ``[B, J, Nq, Di]``, or packed ``[Tq, J, Di]``: the index heads; dtype and width may differ from the
            teacher's.
        index_k: ``[B, Nk, Di]``, or packed ``[Tk, Di]``: one key for all of them; dtype of ``index_q``.
        index_w: ``[B, Nq, J]``, or packed ``[Tq, J]``: the weight of each index head, of any sign; 1 if not given. Its
            dtype may differ from that of ``index_q``, as float32 beside bfloat16.
        activation: ``"relu"`` on the scaled products of each index head, or ``None``.
        index_scale: Multiplies the indexer's products, before the relu; ``1/sqrt(Di)`` if not given.
        topk_indices: ``[B, Nq, K]``, packed ``[Tq, K]``, int32 or int64: the selected keys of each query. It sees no
            others: both softmaxes run over them. Padded with -1, no key twice; a selected key that the mask hides
            stays hidden. In a packed batch they count from the first key of the query's own sequence. Work is linear
            in ``Nq * K``. On GPUs ``deterministic=True`` is refused with it.
        teacher_scale: Multiplies the teacher's products; ``1/sqrt(Dt)`` if not given.
        teacher_lse: ``[B, H, Nq]``, packed ``[H, Tq]``, float32 or float64: the natural log-sum-exp of the teacher's
            scaled logits over exactly the keys allowed here, top-k included, as fused attention returns it and
            `attention_lse` computes it. A constant. One that does not normalise the teacher is refused; on GPUs this
            is checked only under ``STREAMKL_CHECK=1``, since it synchronises.
        teacher_rest: ``[B, H, Nq]``, packed ``[H, Tq]``, float32 or float64: the log-sum-exp of what else each head's
            softmax covers outside the keys allowed here, such as a sink, a local window or a tail. A head then counts
            in the mean by the share of its attention on the allowed keys. ``-inf`` is nothing else. A constant.
        causal: Query ``i`` sees keys ``j <= i + Nk - Nq``: aligned bottom-right, so that the last query sees all.
        window: ``(left, right)``: query ``i`` sees ``left`` keys before and ``right`` keys after its own, key
            ``i + Nk - Nq``; a negative side is unbounded. Intersects with ``causal``.
        key_span: How many tokens a key stands for, 1 unless keys are compressed. With ``m`` it is for ``causal=True``
            without a window: query ``i`` sees key ``j`` where ``(j + 1) m <= i + 1``, so once it has seen all tokens of
            the key. Queries start at a multiple of ``m`` and the last one sees all keys: in general query ``i`` sees
            keys ``j < (i + 1) // m + Nk - Nq // m``, of each sequence if they are packed.
        cu_seqlens_q: ``[sequences + 1]``, int32 or int64: where each packed sequence's queries start, and the end.
        cu_seqlens_k: The same for the keys. Queries see the keys of their own sequence.
        key_padding_mask: ``[B, N]`` of bool, for dense tensors with as many queries as keys: true for real tokens, a
            tokenizer's ``attention_mask.bool()``. Padding is on the left, on the right or on both sides. Padded keys
            are seen by no query, and padded queries see no key. A mask with holes is refused; on GPUs this is checked
            only under ``STREAMKL_CHECK=1``.
        row_weight: ``[B, Nq]`` or ``[B, 1, Nq]``, packed ``[Tq]`` or ``[1, Tq]``: not negative, a constant.
        target: ``"token"``, or ``"block_sum"`` or ``"block_max"``: ``teacher_k`` then has ``r`` keys for each of the
            indexer's, ``Nk * r`` in all. ``"block_sum"``: the target of a key is the sum of the mean attention to its
            ``r`` keys. ``"block_max"``: it is the largest of them, divided by the sum of all targets. Masks,
            ``cu_seqlens_k`` and ``topk_indices`` are those of the indexer's keys, and ``teacher_lse`` is over all keys
            of those that they allow; ``"block_max"`` takes none. Where blocks are runs of a causal sequence, give
            ``key_span=r`` too: without it a key is masked as if it were one token.
        reduction: ``"mean"`` is ``sum(w * kl) / sum(w)`` over the rows that see a key and have a weight, 0 if there is
            none; ``"sum"`` is ``sum(w * kl)``; ``"none"`` is ``w * kl``, ``[B, 1, Nq]``, packed ``[1, Tq]``.
        deterministic: Bit-equal results on repeated calls; by default what ``torch.use_deterministic_algorithms`` says.
        backend: ``"auto"`` takes the best engine that can run. A named one (``"reference"``, ``"triton"``, ``"cpu"``,
            ``"tiled"``) is used or raises, and never falls back.

    Returns:
        The loss, float32 (float64 if an input is). A row that sees no key, or has weight 0, has a loss of exactly 0 and
        leaves gradients of exactly 0. Gradients have their input's dtype.

    Raises:
        ValueError: An argument is wrong; the message says what was given and what was expected.

    Examples:
        Four index heads of width 32 learn where a teacher with 8 query and 2 key heads looks:

        >>> import torch
        >>> from streamkl import attention_lse, indexer_kl
        >>> _ = torch.manual_seed(0)
        >>> teacher_q, teacher_k = torch.randn(1, 8, 256, 64), torch.randn(1, 2, 256, 64)
        >>> index_q = torch.randn(1, 4, 256, 32, requires_grad=True)
        >>> index_k = torch.randn(1, 256, 32, requires_grad=True)
        >>> index_w = torch.randn(1, 256, 4, requires_grad=True)
        >>> lse = attention_lse(teacher_q, teacher_k, causal=True)
        >>> loss = indexer_kl(teacher_q, teacher_k, index_q, index_k, index_w, teacher_lse=lse)
        >>> loss.backward()
        >>> loss.dtype, index_k.grad.shape, index_w.grad.shape
        (torch.float32, torch.Size([1, 256, 32]), torch.Size([1, 256, 4]))

        Then, on the 64 keys that each query chose:

        >>> scores = torch.einsum("bjqd,bkd->bjqk", index_q, index_k).relu().mul(index_w.mT[..., None]).sum(1)
        >>> topk = scores.detach().masked_fill(torch.ones(256, 256).triu(1) > 0, -torch.inf).topk(64).indices
        >>> indexer_kl(teacher_q, teacher_k, index_q, index_k, index_w, topk_indices=topk).isfinite()
        tensor(True)

        Keys that stand for 4 tokens each; the first 3 queries see none, and the next 4 see one:

        >>> entries, index_entries = (k.unflatten(-2, (64, 4)).mean(-2) for k in (teacher_k, index_k))
        >>> rows = indexer_kl(teacher_q, entries, index_q, index_entries, index_w, key_span=4, reduction="none")
        >>> (rows[0, 0] != 0).int().argmax()
        tensor(7)
    """
    arguments = validation.indexer_kl_arguments(
        teacher_q, teacher_k, index_q, index_k, index_w, activation, index_scale, topk_indices, teacher_scale,
        teacher_lse, teacher_rest, causal, window, cu_seqlens_q, cu_seqlens_k, row_weight, reduction, deterministic,
        backend, key_span, target,
    )  # fmt: skip
    if key_padding_mask is not None:
        validation.check_padding_mask(key_padding_mask, arguments.teacher_q, arguments.student_k, arguments.keys)
        return padding.packed_call(
            indexer_kl,
            key_padding_mask,
            {
                "teacher_q": teacher_q, "teacher_k": teacher_k, "index_q": index_q, "index_k": index_k,
                "index_w": index_w,
            },
            {
                "activation": activation, "index_scale": index_scale, "topk_indices": topk_indices,
                "teacher_scale": teacher_scale, "teacher_lse": teacher_lse, "teacher_rest": teacher_rest,
                "causal": causal, "window": window, "row_weight": row_weight, "target": target, "reduction": reduction,
                "deterministic": deterministic, "backend": backend,
            },
        )  # fmt: skip
    if backend == "reference":
        validation.check_values(arguments)
        if teacher_lse is not None and target == "token":
            lse = attention_lse(
                teacher_q, teacher_k, scale=teacher_scale, causal=causal, window=window, key_span=key_span,
                cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, topk_indices=topk_indices, backend="reference",
            )  # fmt: skip
            validation.check_teacher_lse(arguments, lse)
        return reference.indexer_kl(
            teacher_q, teacher_k, index_q, index_k, index_w, activation=activation, index_scale=index_scale,
            topk_indices=topk_indices, teacher_scale=teacher_scale, teacher_rest=teacher_rest, causal=causal,
            window=window, key_span=key_span, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
            row_weight=row_weight, target=target, reduction=reduction,
        )  # fmt: skip
    loss = compose.attention_kl(arguments, teacher_scale, index_scale, activation, "forward", reduction, backend)
    return loss.squeeze(0) if arguments.keys.packed and reduction == "none" else loss


def attention_lse(
    q: Tensor,
    k: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    key_span: int = 1,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    topk_indices: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Log-sum-exp of attention logits, streaming: what `attention_kl` takes as ``teacher_lse``.

    It is ``torch.logsumexp(q @ k.mT * scale, -1)`` over the allowed keys, without the matrix. Compute it once where
    several losses have the same teacher, or take the one that fused attention already returns.

    Args:
        q: ``[B, H, Nq, D]``, or packed ``[Tq, H, D]``. Any strides; float64, float32, bfloat16 or float16.
        k: ``[B, Hkv, Nk, D]``, or packed ``[Tk, Hkv, D]``, where ``Hkv`` divides ``H``; dtype of ``q``.
        scale: Multiplies the products; ``1/sqrt(D)`` if not given.
        causal: Query ``i`` sees keys ``j <= i + Nk - Nq``.
        window: ``(left, right)`` keys around key ``i + Nk - Nq``; a negative side is unbounded.
        key_span: As in `attention_kl`: how many tokens a key stands for.
        cu_seqlens_q: ``[sequences + 1]``, int32 or int64: where each packed sequence's queries start, and the end.
        cu_seqlens_k: The same for the keys.
        key_padding_mask: As in `attention_kl`: ``[B, N]`` of bool, true for real tokens.
        topk_indices: As in `attention_kl`: ``[B, Nq, K]``, or ``[B, topk_heads, Nq, K]`` with a selection per run of
            ``H / topk_heads`` consecutive heads, packed ``[Tq, K]`` or ``[topk_heads, Tq, K]``.
        backend: ``"auto"``, or the name of an engine, which is then used or raises.

    Returns:
        ``[B, H, Nq]``, packed ``[H, Tq]``, float32 (float64 if the inputs are); ``-inf`` for a row that sees no key,
        nan for one that sees some and whose logits are all ``-inf``. It is not differentiated: its backward raises.

    Raises:
        ValueError: An argument is wrong; the message says what was given and what was expected.

    Examples:
        >>> import torch
        >>> from streamkl import attention_lse
        >>> q, k = torch.zeros(1, 4, 3, 16), torch.zeros(1, 2, 8, 16)
        >>> attention_lse(q, k).exp().round().unique()
        tensor([8.])
    """
    arguments = validation.attention_lse_arguments(
        q, k, scale, causal, window, cu_seqlens_q, cu_seqlens_k, topk_indices, backend, key_span
    )
    if key_padding_mask is not None:
        validation.check_padding_mask(key_padding_mask, arguments.q, arguments.k, arguments.keys)
        options = {"scale": scale, "causal": causal, "window": window, "topk_indices": topk_indices, "backend": backend}
        return padding.packed_call(attention_lse, key_padding_mask, {"q": q, "k": k}, options)
    if backend == "reference":
        validation.check_values(arguments)
        return reference.attention_lse(
            q, k, scale=scale, causal=causal, window=window, key_span=key_span, cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k, topk_indices=topk_indices,
        )  # fmt: skip
    lse = compose.attention_lse(arguments, scale, backend)
    return lse.squeeze(0) if arguments.keys.packed else lse
