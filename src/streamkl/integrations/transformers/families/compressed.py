"""What models have in common whose indexers score keys that stand for several tokens."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from streamkl.indexer import Indexer
from streamkl.indexer.base import Activation
from streamkl.integrations.transformers.families.base import Attention, Family, Losses
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


def with_incomplete(selected: Tensor, span: int, tokens: int) -> Tensor:
    """The tokens of selected blocks of ``span`` tokens, and those of each query's own block, while it is incomplete.

    Args:
        selected: ``[B, Nq, K]``: the blocks, -1 for none.
        span: How many tokens a block has.
        tokens: How many tokens there are; the queries are the last of them.

    Returns:
        ``[B, Nq, K * span + span - 1]``, -1 for none.
    """
    queries, place = selected.shape[1], torch.arange(span, device=selected.device)
    keys = (selected[..., None] * span + place).masked_fill((selected < 0)[..., None], -1).flatten(-2)
    at = torch.arange(tokens - queries, tokens, device=selected.device)[:, None]
    tail = at // span * span + place[:-1]
    tail = tail.masked_fill((tail > at) | (at % span == span - 1), -1)
    return torch.cat((keys, tail.expand(len(keys), -1, -1).to(keys.dtype)), -1)


@torch.no_grad()
def incomplete_lse(q: Tensor, k: Tensor, span: int, scale: float | None) -> Tensor:
    """``[B, H, N]``: the log-sum-exp over the keys of each query's incomplete block; -inf where it is complete."""
    if not isinstance(k, Tensor):
        raise ValueError("ranks cannot share blocks of keys: leave context_parallel and tensor_parallel at 1")
    tokens, wide = q.shape[2], torch.promote_types(q.dtype, torch.float32)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1) if q.shape[1] > k.shape[1] else k
    blocks = [functional.pad(x, (0, 0, 0, -tokens % span)).unflatten(2, (-1, span)).to(wide) for x in (q, k)]
    logits = blocks[0] @ blocks[1].mT * (q.shape[3] ** -0.5 if scale is None else scale)  # [B, H, blocks, span, span]
    hidden = torch.ones(span, span, dtype=torch.bool, device=q.device).triu(1)
    hidden[-1] = True
    return logits.masked_fill(hidden, -torch.inf).logsumexp(-1).flatten(2, 3)[:, :, :tokens]


class SelectsBlocks(Family):
    """Models whose queries see selected blocks of ``key_span`` keys, and the keys of their own, incomplete block.

    The keys of the incomplete block are in the denominator of what a block learns.
    """

    target: Literal["block_sum", "block_max"]
    """What a block learns of the attention to its keys, as in `streamkl.indexer_kl`."""

    def select(self, indexer: Indexer, index: IndexTensors, topk: int) -> Tensor:
        """The best blocks, of ``topk`` keys together."""
        return select_compressed(index, indexer.key_span, max(1, topk // indexer.key_span), indexer.activation)

    def attended(self, attention: Attention, selected: Tensor, tokens: int) -> Tensor:
        """The keys of the selected blocks, and those of the incomplete one."""
        return with_incomplete(selected, self.key_span(attention), tokens)

    def divergence(
        self,
        losses: Losses,
        q: Tensor,
        k: Any,
        index: IndexTensors,
        *,
        activation: Activation,
        key_span: int = 1,
        teacher_lse: Tensor | None = None,
        teacher_rest: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """The KL from the attention to each complete block; its log-sum-exp is over those that a query sees."""
        rest = incomplete_lse(q, k, key_span, options.get("teacher_scale"))
        k = k[:, :, : index.index_k.shape[1] * key_span]
        return losses.indexer_kl(
            q, k, *index, activation=activation, key_span=key_span, target=self.target, teacher_rest=rest, **options
        )
