"""The figures of an indexer beside its loss: recall of the oracle's keys, and attention mass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from streamkl.api import attention_lse
from streamkl.distributed import ContextParallel, Gathered
from streamkl.integrations.transformers.recording import Attended
from streamkl.sparse import IndexTensors, attention_mass, topk_recall
from streamkl.sparse.head_groups import HeadGroups

ROWS = 64
"""Figures are those of the last queries of a sequence, which see the most keys."""


@torch.no_grad()
def measure(
    select: Callable[[IndexTensors], Tensor],
    attended: Attended,
    key: Tensor | Gathered,
    index: IndexTensors,
    context: ContextParallel | None,
    key_span: int = 1,
) -> dict[str, float]:
    """Recall of the oracle's keys and attention mass on the selected keys, of the last queries.

    Ranks that share a sequence measure those of the last queries that they hold, and have the same means. Of keys that
    stand for several tokens, the queries are those that lie on a key's last token.

    Args:
        select: Selects keys by an indexer's tensors, of all keys and the last queries.
        attended: The attention.
        key: Its keys, those of all ranks.
        index: The indexer's tensors.
        context: The share of this rank where several have one sequence.
        key_span: How many tokens a key of the indexer's stands for.
    """
    call, span = attended.call, attended.call.key_span
    key = key.whole() if isinstance(key, Gathered) else key
    index_k = index.index_k if context is None else context.unshard(index.index_k, 1)
    tokens, first = key.shape[2] * span, 0
    measured = max(0, tokens - ROWS) // key_span * key_span
    recall = mass = torch.zeros((), device=key.device)
    for start, end in ((0, tokens),) if context is None else context.queries.spans:
        rows = slice(first + max(0, measured - start), first + end - start)
        first += end - start
        if rows.start >= rows.stop:
            continue
        w = None if index.index_w is None else index.index_w[:, rows]
        selected = select(IndexTensors(index.index_q[:, :, rows], index_k[:, : end // key_span], w))
        selected, rows = selected[..., span - 1 :: span, :], slice(rows.start + span - 1, rows.stop, span)
        q, k = call.q[:, :, rows], key[:, :, : end // span]
        if call.lse is None or attended.indices is not None:  # it is that of the selected keys
            lse = attention_lse(q, k, scale=call.scale, causal=True)
        else:
            lse = call.lse[:, :, rows]
        if call.rest is not None:
            lse = torch.logaddexp(lse, call.rest[:, :, rows])
        groups = HeadGroups(selected.shape[1] if selected.dim() == 4 else 1, packed=False)
        selected = groups.split_indices(selected) if selected.dim() == 4 else selected
        q, k, lse = (groups.split(x) for x in (q, k, lse))
        options: dict[str, Any] = {"scale": call.scale, "lse": lse, "reduction": "none"}
        recall = recall + topk_recall(q, k, selected, **options).sum() / groups.count
        mass = mass + attention_mass(q, k, selected, **options).sum() / groups.count
    if context is not None:  # in one dtype: a rank may hold none of these queries
        recall, mass = context.total(recall.float()), context.total(mass.float())
    count = key.shape[0] * (tokens - measured) // span
    return {"recall": float(recall / count), "mass": float(mass / count)}
