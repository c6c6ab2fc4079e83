"""The top-k of indexers whose keys stand for several tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from streamkl.indexer.base import Activation
from streamkl.sparse import IndexTensors, index_topk


@torch.no_grad()
def select_compressed(index: IndexTensors, key_span: int, topk: int, activation: Activation) -> Tensor:
    """The keys of the highest scores that each query sees, by `streamkl.sparse.index_topk`.

    Of ``key_span`` consecutive queries each sees as many keys as the one as far in the next run, but for one: a call
    for each.

    Args:
        index: An indexer's tensors, of all keys and of the last queries, from a multiple of ``key_span`` on, or all.
        key_span: How many tokens a key stands for.
        topk: How many keys a query selects.
        activation: The indexer's.

    Returns:
        ``[B, Nq, topk]``, padded with -1.
    """
    q, k, w = index
    queries, keys = q.shape[2], k.shape[1]
    selected = torch.full((q.shape[0], queries, topk), -1, dtype=torch.int32, device=q.device)
    for first in range(min(key_span, queries)):
        rows = slice(first, None, key_span)
        last = first + (queries - 1 - first) // key_span * key_span
        seen = (last + 1) // key_span + keys - queries // key_span  # by the last of the rows
        if seen > 0:
            weights = None if w is None else w[:, rows]
            found = index_topk(q[:, :, rows], k[:, :seen], weights, topk=topk, activation=activation)
            selected[:, rows] = found.to(selected.dtype)
    return selected
