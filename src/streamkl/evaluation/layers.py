"""Recall and attention mass of every method, layer by layer, on the queries and keys of the dense model."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

import streamkl
from streamkl.evaluation.methods import DENSE, Method
from streamkl.evaluation.subject import Subject
from streamkl.integrations.transformers import Attended
from streamkl.sparse import AttentionCall, IndexTensors

ROWS = 256
"""How many queries are measured: the last of a text, which see the most keys."""


class Layers(NamedTuple):
    """A value per layer that selects, by the number of the layer.

    Attributes:
        recall: The share of the oracle's keys of a query that are selected.
        mass: The share of attention on the selected keys.
    """

    recall: dict[int, float]
    mass: dict[int, float]


@torch.no_grad()
def look(subject: Subject, ids: list[int], methods: list[Method]) -> dict[Method, Layers]:
    """The selection of each method while the model attends densely: one forward for all methods of one folder."""
    found = {method: Layers({}, {}) for method in methods if method != DENSE}
    folders = {m.selector if m.selector in subject.indexers else "" for m in found}
    for folder in sorted(folders):
        mine = [m for m in found if (m.selector if m.selector in subject.indexers else "") == folder]
        subject.use(mine[0])
        subject.model.set_attn_implementation("streamkl_dense")

        def watcher(attended: Attended, mine: list[Method] = mine) -> None:
            call = last_rows(attended.call, ROWS)
            lse = streamkl.attention_lse(call.q, call.k, scale=call.scale, causal=True)
            call = call._replace(lse=lse)
            lse = lse if call.rest is None else torch.logaddexp(lse, call.rest.to(lse))
            for method in mine:
                indices = subject.selector(method).select(call)
                indices = indices.repeat_interleave(method.query_block, 1)[:, : call.q.shape[2]]
                options = {"scale": call.scale, "lse": lse}
                found[method].recall[attended.layer] = float(streamkl.topk_recall(call.q, call.k, indices, **options))
                found[method].mass[attended.layer] = float(streamkl.attention_mass(call.q, call.k, indices, **options))

        with subject.model.streamkl.watch(watcher):
            subject.model.base_model(torch.tensor([ids], device=subject.model.device), use_cache=False)
    return found


def last_rows(call: AttentionCall, count: int) -> AttentionCall:
    """The call of the last ``count`` queries of ``[B, H, Nq, D]``, over all keys."""
    rows = slice(-count, None)

    def cut(index: IndexTensors | None) -> IndexTensors | None:
        if index is None:
            return None
        w: Tensor | None = index.index_w
        return index._replace(index_q=index.index_q[:, :, rows], index_w=None if w is None else w[:, rows])

    rest = None if call.rest is None else call.rest[:, :, rows]
    return call._replace(q=call.q[:, :, rows], index=cut(call.index), lse=None, rest=rest)
