"""Recall and covered mass of every method's lists, layer by layer, on the queries and keys of the dense model."""

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
"""How many queries are looked at: the last of a text, which have the most keys to choose from."""


class Layers(NamedTuple):
    """A number for each layer that selects, by the number of the layer.

    Attributes:
        recall: The share of the oracle's keys of a query that are in its list.
        mass: The share of attention that falls on the keys of the list.
    """

    recall: dict[int, float]
    mass: dict[int, float]


@torch.no_grad()
def look(subject: Subject, ids: list[int], methods: list[Method]) -> dict[Method, Layers]:
    """What each method would choose while the model attends densely: one forward for all that share indexers."""
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
            for method in mine:
                lists = subject.selector(method).select(call)
                lists = lists.repeat_interleave(method.query_block, 1)[:, : call.q.shape[2]]
                asked = {"scale": call.scale, "lse": lse}
                found[method].recall[attended.layer] = float(streamkl.topk_recall(call.q, call.k, lists, **asked))
                found[method].mass[attended.layer] = float(streamkl.attention_mass(call.q, call.k, lists, **asked))

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

    return call._replace(q=call.q[:, :, rows], index=cut(call.index), lse=None)
