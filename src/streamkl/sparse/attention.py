"""Attention over selected keys, whose top-k a query block shares."""

from __future__ import annotations

import torch
from torch import Tensor

from streamkl import reference, validation
from streamkl.api import Backend
from streamkl.sparse import ops as _ops  # noqa: F401  # registers the operators


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
    backend: Backend = "auto",
) -> Tensor:
    """Softmax attention over the selected keys that each query may see.

    It is the same as this code, where ``seen [B, 1, Nq, Nk]`` says which keys the query's block selected and its mask
    allows, but nothing of that size is allocated::

        k, v = (x.repeat_interleave(H // Hkv, dim=1) for x in (k, v))
        out = (q @ k.mT * scale).masked_fill(~seen, -inf).softmax(-1) @ v

    Not differentiated: a backward through it raises. Run it under ``torch.no_grad()``.

    Args:
        q: ``[B, H, Nq, D]``, or packed ``[Tq, H, D]``. Any strides; float64, float32, bfloat16 or float16.
        k: ``[B, Hkv, Nk, D]``, or packed ``[Tk, Hkv, D]``, where ``Hkv`` divides ``H``.
        v: ``[B, Hkv, Nk, Dv]``, or packed ``[Tk, Hkv, Dv]``; ``Dv`` may differ from ``D``.
        indices: ``[B, query_blocks, K]``, packed ``[query_blocks, K]``, int32 or int64: the selected keys, as
            `index_topk` and `oracle_topk` return them: in any order, no key twice, padded with -1, in a packed batch
            counted from the first key of the sequence. A key that a query may not see is hidden from that query only.
        query_block: How many consecutive queries of a sequence share their top-k. There are ``ceil(Nq / query_block)``
            query blocks, in a packed batch those of the sequences one after another.
        scale: Multiplies the products; ``1/sqrt(D)`` if not given.
        causal: Query ``i`` sees keys ``j <= i + Nk - Nq``.
        window: ``(left, right)`` keys around key ``i + Nk - Nq``; a negative side is unbounded.
        cu_seqlens_q: ``[sequences + 1]``: where each packed sequence's queries start, and the end.
        cu_seqlens_k: The same for the keys.
        backend: ``"auto"`` takes the fastest engine that can run. A named one is used or raises, and never falls back.

    Returns:
        ``[B, H, Nq, Dv]``, packed ``[Tq, H, Dv]``, in the dtype of ``q``; exactly 0 for a query that sees none of its
        selected keys.

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
    """
    arguments = validation.sparse_attention_arguments(
        q, k, v, indices, query_block, scale, causal, window, cu_seqlens_q, cu_seqlens_k, backend
    )
    if backend == "reference":
        return reference.sparse_attention(
            q, k, v, indices, query_block=query_block, scale=scale, causal=causal, window=window,
            cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        )  # fmt: skip
    keys = arguments.keys
    out = torch.ops.streamkl.sparse_attention(
        *arguments[:4], scale, keys.cu_seqlens_q, keys.cu_seqlens_k, keys.left, keys.right, query_block, backend
    )
    return out[0].transpose(0, 1) if keys.packed else out
