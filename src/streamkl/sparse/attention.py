"""Attention over selected keys, whose top-k a query block shares."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from streamkl import reference
from streamkl.api import Backend
from streamkl.dense_attention import with_rest
from streamkl.sparse import ops as _ops  # noqa: F401  # registers the operators
from streamkl.sparse.arguments import sink_rows, sparse_attention_arguments
from streamkl.sparse.head_groups import HeadGroups


@overload
def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    *,
    query_block: int = 1,
    scale: float | None = None,
    causal: bool = True,
    window: tuple[int, int] | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    page_table: Tensor | None = None,
    sink: Tensor | None = None,
    return_lse: Literal[False] = False,
    backend: Backend = "auto",
) -> Tensor: ...


@overload
def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    *,
    query_block: int = 1,
    scale: float | None = None,
    causal: bool = True,
    window: tuple[int, int] | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    page_table: Tensor | None = None,
    sink: Tensor | None = None,
    return_lse: Literal[True],
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]: ...


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    *,
    query_block: int = 1,
    scale: float | None = None,
    causal: bool = True,
    window: tuple[int, int] | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    page_table: Tensor | None = None,
    sink: Tensor | None = None,
    return_lse: bool = False,
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention over the selected keys that each query may see.

    It is the same as this code, where ``seen [B, 1, Nq, Nk]`` says which keys the query's block selected and its mask
    allows, but nothing of that size is allocated::

        k, v = (x.repeat_interleave(H // Hkv, dim=1) for x in (k, v))
        out = (q @ k.mT * scale).masked_fill(~seen, -inf).softmax(-1) @ v

    The output has gradients to ``q``, ``k`` and ``v`` at the selected keys, and to ``sink``, in O(N K) work and memory.
    They are deterministic: repeated backwards are bit-equal, on GPUs too. A selection is not differentiable:
    ``indices`` have no gradient, nor have keys that nobody selected. An indexer learns by `streamkl.indexer_kl`
    instead. In bfloat16 and float16 a backward keeps the output twice: rounded, and what rounding took from it; with a
    sink also in float32.

    Args:
        q: ``[B, H, Nq, D]``, or packed ``[Tq, H, D]``. Any strides; float64, float32, bfloat16 or float16.
        k: ``[B, Hkv, Nk, D]``, or packed ``[Tk, Hkv, D]``, where ``Hkv`` divides ``H``; with a page table
            ``[pages, page_size, Hkv, D]``.
        v: ``[B, Hkv, Nk, Dv]``, or packed ``[Tk, Hkv, Dv]``; ``Dv`` may differ from ``D``; with a page table
            ``[pages, page_size, Hkv, Dv]``.
        indices: ``[B, query_blocks, K]``, packed ``[query_blocks, K]``, int32 or int64: the selected keys, as
            `index_topk` and `oracle_topk` return them: in any order, no key twice, padded with -1, in a packed batch
            counted from the first key of the sequence. A key that a query may not see is hidden from that query only.
            With ``[B, G, query_blocks, K]``, packed ``[G, query_blocks, K]``, each of ``G`` groups of consecutive heads
            has a selection of its own; ``G`` divides ``Hkv``, and ``Hkv`` itself is one per KV head.
        query_block: How many consecutive queries of a sequence share their top-k. There are ``ceil(Nq / query_block)``
            query blocks, in a packed batch those of the sequences one after another.
        scale: Multiplies the products; ``1/sqrt(D)`` if not given.
        causal: Query ``i`` sees keys ``j <= i + Nk - Nq``.
        window: ``(left, right)`` keys around key ``i + Nk - Nq``; a negative side is unbounded.
        cu_seqlens_q: ``[sequences + 1]``: where each packed sequence's queries start, and the end.
        cu_seqlens_k: The same for the keys.
        page_table: ``[sequences, n]``, int32 or int64, of a packed batch: the pages of a KV cache that hold the keys
            and values of each sequence. Key ``j`` of a sequence is token ``j % page_size`` of page
            ``page_table[sequence, j // page_size]``, and ``cu_seqlens_k`` only says how many keys a sequence has. Pages
            past its last key are not read. There are no gradients with a page table.
        sink: ``[H]``: a logit per head that belongs to no key, in the softmax of each of its queries. It has gradients.
        return_lse: Whether to return the log-sum-exp of each query's logits, too.
        backend: ``"auto"`` takes the fastest engine that can run. A named one is used or raises, and never falls back.

    Returns:
        ``[B, H, Nq, Dv]``, packed ``[Tq, H, Dv]``, in the dtype of ``q``; exactly 0 for a query that sees none of its
        selected keys.
        With ``return_lse`` also the log-sum-exp ``[B, H, Nq]``, packed ``[H, Tq]``, in float32 (float64 for float64
        inputs), -inf for such a query. It is a constant, detached from the graph: the ``teacher_lse`` of a loss on the
        same keys. A sink is not part of it: it is the ``teacher_rest`` of such a loss.

    Raises:
        ValueError: An argument is wrong; the message says what was given and what was expected.
        RuntimeError: The named backend cannot run here.

    Examples:
        >>> import torch
        >>> from streamkl.sparse import oracle_topk, sparse_attention
        >>> _ = torch.manual_seed(0)
        >>> q, k, v = torch.randn(1, 4, 256, 32), torch.randn(1, 2, 256, 32), torch.randn(1, 2, 256, 32)
        >>> indices = oracle_topk(q, k, topk=128, query_block=64)
        >>> indices.shape
        torch.Size([1, 4, 128])
        >>> sparse_attention(q, k, v, indices, query_block=64).shape
        torch.Size([1, 4, 256, 32])
        >>> q = q.requires_grad_()
        >>> out, lse = sparse_attention(q, k, v, indices, query_block=64, return_lse=True)
        >>> out.sum().backward()
        >>> q.grad.shape, lse.shape, lse.requires_grad
        (torch.Size([1, 4, 256, 32]), torch.Size([1, 4, 256]), False)

        A chunk of a prompt, 64 tokens after the first 192, whose keys and values are in pages 3, 0, 6 and 5 of a cache:

        >>> k, v = torch.randn(2, 8, 64, 2, 32)  # eight pages of 64 tokens
        >>> page_table = torch.tensor([[3, 0, 6, 5]])
        >>> cu_seqlens = {"cu_seqlens_q": torch.tensor([0, 64]), "cu_seqlens_k": torch.tensor([0, 256])}
        >>> chunk, selected = torch.randn(64, 4, 32), indices[0, -1:]
        >>> sparse_attention(chunk, k, v, selected, query_block=64, **cu_seqlens, page_table=page_table).shape
        torch.Size([64, 4, 32])
    """
    packed = cu_seqlens_q is not None
    rest = None if sink is None else sink_rows(sink, q, packed)
    options = {"query_block": query_block, "scale": scale, "causal": causal, "window": window, "backend": backend}
    if isinstance(indices, Tensor) and indices.dim() == (3 if packed else 4):
        if page_table is not None:
            raise ValueError("with a page_table there is one selection for all heads: got indices of head groups")
        out, lse = _by_group(q, k, v, indices, cu_seqlens_q, cu_seqlens_k, rest, **options)
    else:
        out, lse = _attended(q, k, v, indices, cu_seqlens_q, cu_seqlens_k, page_table, rest, **options)
    return (out, lse) if return_lse else out


def _attended(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    page_table: Tensor | None,
    rest: Tensor | None,
    *,
    query_block: int,
    scale: float | None,
    causal: bool,
    window: tuple[int, int] | None,
    backend: Backend,
) -> tuple[Tensor, Tensor]:
    """`sparse_attention` with one selection for all heads, and its log-sum-exp, which leaves out ``rest``.

    ``rest [B, H, Nq]``, packed ``[H, Tq]``, is the log-sum-exp of what else the softmax covers.
    """
    arguments = sparse_attention_arguments(
        q, k, v, indices, query_block, scale, causal, window, cu_seqlens_q, cu_seqlens_k, page_table, backend
    )
    if backend == "reference":
        return reference.sparse_attention(
            q, k, v, indices, query_block=query_block, scale=scale, causal=causal, window=window,
            cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, page_table=page_table, rest=rest,
        )  # fmt: skip
    keys = arguments.keys
    learning = [*arguments[:3], *(() if rest is None else (rest,))]
    for_backward = torch.is_grad_enabled() and any(x.requires_grad for x in learning)
    out, unrounded, m, ln_l = torch.ops.streamkl.sparse_attention(
        *arguments[:4], scale, keys.cu_seqlens_q, keys.cu_seqlens_k, keys.left, keys.right, query_block, backend,
        for_backward, page_table,
    )  # fmt: skip
    lse = m.detach() + ln_l
    if rest is not None:
        rest, dead = rest[None] if keys.packed else rest, lse == -torch.inf
        finite = torch.where(dead, 0.0, lse)  # the output of dead rows is 0
        if for_backward:
            dtype, exact = out.dtype, out.to(lse.dtype)
            if unrounded.numel():  # what rounding took from the output: the gradient of a sink needs it
                exact = exact + unrounded.detach()
            scaled = with_rest(exact, finite, rest)
            out = torch.where(dead[..., None], 0.0, scaled).to(dtype)  # no gradient, whatever dead rows are given
        else:
            out = with_rest(out, finite, rest)
    lse = lse.detach()
    return (out[0].transpose(0, 1), lse[0]) if keys.packed else (out, lse)


def _by_group(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    rest: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """The same for head groups that have a selection each."""
    packed = cu_seqlens_q is not None
    groups = HeadGroups(indices.shape[0 if packed else 1], packed)
    groups.check(q=q, k=k, v=v)
    cu_seqlens_q, cu_seqlens_k = groups.sequences(cu_seqlens_q, cu_seqlens_k, len(q), len(k))
    out, lse = _attended(
        groups.split(q), groups.split(k), groups.split(v), groups.split_indices(indices), cu_seqlens_q, cu_seqlens_k,
        None, None if rest is None else groups.split_rows(rest), **options,
    )  # fmt: skip
    return groups.join(out), groups.join_rows(lse)
