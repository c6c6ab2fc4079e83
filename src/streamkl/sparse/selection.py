"""Top-k: the best keys of each query, or of each query block, by an indexer's scores or a teacher's attention.

Memory is ``O(Nq * topk / query_block)`` for the result, and ``O(Nk)`` per thread beside it. Equal scores go to the
lower index. Tensors are dense or packed (varlen).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from streamkl.sparse import ops as _ops  # noqa: F401  # registers the operators
from streamkl.sparse.arguments import (
    SelectionBackend,
    attention_arguments,
    check_selection,
    index_arguments,
)
from streamkl.sparse.head_groups import HeadGroups


@torch.no_grad()
def index_topk(
    index_q: Tensor,
    index_k: Tensor,
    index_w: Tensor | None = None,
    *,
    topk: int,
    query_block: int = 1,
    normalise: bool = False,
    sort: bool = True,
    activation: Literal["relu"] | None = "relu",
    index_scale: float | None = None,
    causal: bool = True,
    window: tuple[int, int] | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    backend: SelectionBackend = "auto",
) -> Tensor:
    """The keys of the highest scores of an indexer, ``sum_m w[i, m] * relu(scale * <q[m, i], k[j]>)``, streaming.

    Args:
        index_q: ``[B, J, Nq, D]``, or packed ``[Tq, J, D]``.
        index_k: ``[B, Nk, D]``, or packed ``[Tk, D]``: one key for all ``J`` heads.
        index_w: ``[B, Nq, J]``, or packed ``[Tq, J]``: the heads' weights; 1 if not given.
        topk: How many keys are selected per query block, which is one query by default.
        query_block: How many consecutive queries of a sequence share their top-k, counted from its first query. The
            score of a key for a block is its highest score for any query of the block that may see it, so a later query
            can select keys for an earlier one. The keys on the block's own diagonal (``i + Nk - Nq``) have the first
            places, by rising index, whatever their scores. With ``topk >= query_block`` every query keeps the key on
            its diagonal. With a smaller ``topk`` only the first ``topk`` queries of a block do. Without a window the
            others still see some of those keys; with one, the last ``query_block - topk - left`` queries of a full
            block see no key.
        normalise: Whether the queries of a block compare log-probabilities (scores less their log-sum-exp) instead of
            scores. Then a query whose scores are all high does not crowd out the others. It takes a pass over the
            scores before they are compared, and changes nothing with a per-query top-k.
        sort: Whether a row's keys come best first, as ``sorted`` of ``torch.topk``. In any order, which is all that
            attention needs, they take less time on the ``cpu`` engine.
        activation: ``"relu"``, or ``None`` for none.
        index_scale: Multiplies the products; ``1/sqrt(D)`` if not given.
        causal: Query ``i`` sees keys ``j <= i + Nk - Nq``.
        window: ``(left, right)`` keys around key ``i + Nk - Nq``; a negative side is unbounded.
        cu_seqlens_q: ``[sequences + 1]``: where each packed sequence's queries start, and the end.
        cu_seqlens_k: The same for the keys.
        backend: ``"auto"`` takes the fastest engine that can run. A named one is used or raises, and never falls back.

    Returns:
        ``[B, query_blocks, topk]``, packed ``[query_blocks, topk]``, int32. There are ``ceil(Nq / query_block)`` query
        blocks, in a packed batch those of the sequences one after another. With ``query_block = 1`` it is
        ``[B, Nq, topk]``, as ``indexer_kl`` takes ``topk_indices``. Keys of a packed batch are counted from the first
        of their sequence. Best first with ``sort``, so that the first columns are a smaller top-k. Equal scores go by
        lower index: a relu scores many keys 0. Padded with -1 where fewer than ``topk`` keys are seen. A score of nan
        or ``-inf`` is never selected. How many blocks a packed batch has depends on its lengths: with
        ``query_block > 1`` set ``torch._dynamo.config.capture_dynamic_output_shape_ops`` to compile it whole.

    Examples:
        >>> import torch
        >>> from streamkl.sparse import index_topk
        >>> index_q, index_k = torch.ones(1, 1, 4, 1), torch.tensor([[[1.0], [3.0], [-2.0], [3.0]]])
        >>> index_topk(index_q, index_k, topk=2)[0]
        tensor([[ 0, -1],
                [ 1,  0],
                [ 1,  0],
                [ 1,  3]], dtype=torch.int32)
    """
    check_selection(topk, query_block, backend)
    arguments = index_arguments(
        index_q, index_k, index_w, index_scale, activation, causal, window, cu_seqlens_q, cu_seqlens_k
    )
    support = arguments.support
    w = None if arguments.w is None else arguments.w.transpose(1, 2)
    indices = torch.ops.streamkl.index_topk(
        arguments.q, arguments.k.unsqueeze(1), w, arguments.scale, arguments.relu, normalise and query_block > 1, sort,
        topk, support.cu_seqlens_q, support.cu_seqlens_k, support.left, support.right, query_block, backend,
    )  # fmt: skip
    return indices[0] if arguments.packed else indices


@torch.no_grad()
def oracle_topk(
    q: Tensor,
    k: Tensor,
    *,
    topk: int,
    query_block: int = 1,
    scale: float | None = None,
    causal: bool = True,
    window: tuple[int, int] | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    lse: Tensor | None = None,
    groups: int = 1,
    backend: SelectionBackend = "auto",
) -> Tensor:
    """The keys that attention attends to most, by the head mean of its softmax, streaming: the oracle.

    No selection of ``topk`` keys for all heads covers more of the attention.

    Args:
        q: ``[B, H, Nq, D]``, or packed ``[Tq, H, D]``.
        k: ``[B, Hkv, Nk, D]``, or packed ``[Tk, Hkv, D]``, where ``Hkv`` divides ``H``.
        topk: How many keys are selected per query block, which is one query by default.
        query_block: How many consecutive queries of a sequence share their top-k, counted from its first query. The
            score of a key for a block is its highest score for any query of the block that may see it, so a later
            query can select keys for an earlier one. The keys on the block's own diagonal (``i + Nk - Nq``) have the
            first places, by rising index, whatever their scores. With ``topk >= query_block`` every query keeps the key
            on its diagonal. With a smaller ``topk`` only the first ``topk`` queries of a block do. Without a window the
            others still see some of those keys; with one, the last ``query_block - topk - left`` queries of a full
            block see no key.
        scale: Multiplies the products; ``1/sqrt(D)`` if not given.
        causal: Query ``i`` sees keys ``j <= i + Nk - Nq``.
        window: ``(left, right)`` keys around key ``i + Nk - Nq``; a negative side is unbounded.
        cu_seqlens_q: ``[sequences + 1]``: where each packed sequence's queries start, and the end.
        cu_seqlens_k: The same for the keys.
        lse: ``[B, H, Nq]``, packed ``[H, Tq]``: what `streamkl.attention_lse` returns; computed if not given.
        groups: With more than one, each of as many groups of consecutive heads selects keys by the mean of its own
            heads; it divides ``Hkv``, and ``Hkv`` itself is one selection per KV head.
        backend: ``"auto"`` takes the fastest engine that can run. A named one is used or raises, and never falls back.

    Returns:
        ``[B, query_blocks, topk]``, packed ``[query_blocks, topk]``, int32, in the order of `index_topk`; with several
        groups ``[B, groups, query_blocks, topk]``, packed ``[groups, query_blocks, topk]``.

    Examples:
        >>> import torch
        >>> from streamkl.sparse import oracle_topk
        >>> q, k = torch.ones(1, 2, 3, 1), torch.tensor([[[[0.0], [2.0], [1.0]]]])
        >>> oracle_topk(q, k, topk=2)[0]
        tensor([[ 0, -1],
                [ 1,  0],
                [ 1,  2]], dtype=torch.int32)
    """
    check_selection(topk, query_block, backend)
    if groups != 1:
        return _oracle_by_group(
            q, k, HeadGroups(groups, cu_seqlens_q is not None), lse, cu_seqlens_q, cu_seqlens_k, topk=topk,
            query_block=query_block, scale=scale, causal=causal, window=window, backend=backend,
        )  # fmt: skip
    arguments = attention_arguments(q, k, scale, causal, window, cu_seqlens_q, cu_seqlens_k, lse)
    support = arguments.support
    indices = torch.ops.streamkl.attention_topk(
        arguments.q, arguments.k, arguments.lse, arguments.scale, topk, support.cu_seqlens_q, support.cu_seqlens_k,
        support.left, support.right, query_block, backend,
    )  # fmt: skip
    return indices[0] if arguments.packed else indices


def _oracle_by_group(
    q: Tensor,
    k: Tensor,
    groups: HeadGroups,
    lse: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    **options: Any,
) -> Tensor:
    """`oracle_topk` of head groups."""
    groups.check(q=q, k=k)
    cu_seqlens_q, cu_seqlens_k = groups.sequences(cu_seqlens_q, cu_seqlens_k, len(q), len(k))
    found = oracle_topk(
        groups.split(q), groups.split(k), lse=None if lse is None else groups.split_rows(lse),
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, **options,
    )  # fmt: skip
    return groups.join_indices(found)
