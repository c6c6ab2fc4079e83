"""MiniMax-M3 (``minimax_m3_vl``), and its text model: each group of heads selects blocks of keys for itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from streamkl.indexer import Indexer
from streamkl.indexer.base import Activation
from streamkl.integrations.transformers.families.base import Attention, Inputs, Losses, OwnIndexers, few
from streamkl.sparse import AttentionCall, IndexerSelector, IndexTensors, Selector

ROWS = 256
"""Queries whose scores of all keys are held at a time."""


class GroupIndexer(Indexer):
    """An index query head per head group over one key, without a relu: as many distributions as there are groups.

    Args:
        own: The indexer of transformers, whose maps and norms it has.
        rope_dim: How many dims of a head are rotated, the first ones.
    """

    kind = "group"

    def __init__(self, own: Any, rope_dim: int) -> None:
        super().__init__(own.head_dim, rope_dim, "half", 10000.0, None)
        self.heads: int = own.num_heads
        self.block_size: int = own.block_size
        self.local_blocks: int = own.local_blocks
        self.q_proj: nn.Module = own.q_proj
        self.k_proj: nn.Module = own.k_proj
        self.q_norm: nn.Module = own.q_norm
        self.k_norm: nn.Module = own.k_norm

    def forward(
        self,
        hidden: Tensor,
        query: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> IndexTensors:
        """Projects hidden states; see `Indexer.forward`."""
        q = self.q_norm(self.q_proj(hidden if query is None else query).unflatten(-1, (self.heads, self.head_dim)))
        k = self.k_norm(self.k_proj(hidden))
        q, k = self._rotate(q, k, positions, position_embeddings, cu_seqlens)
        return IndexTensors(q if cu_seqlens is not None else q.transpose(1, 2), k, None)


class MiniMaxM3(OwnIndexers):
    """Grouped-query attention; some layers see all keys and have no indexer."""

    name = "minimax_m3_vl"
    model_types = ("minimax_m3_vl", "minimax_m3_vl_text")
    attention = "MiniMaxM3VLAttention"
    selects_late = True

    def selector(self, config: Any) -> IndexerSelector:
        """A per-query top-k with the model's own number of keys."""
        return IndexerSelector(topk=self.own_topk(config), query_block=1, activation=None)

    def own_topk(self, config: Any) -> int:
        """The keys of as many blocks as the config says."""
        config = config.get_text_config()
        return config.index_topk_blocks * config.index_block_size

    def indexer(self, attention: Attention) -> GroupIndexer | None:
        """A `GroupIndexer` over the module's own maps, so that training it trains the model's indexer."""
        if attention.indexer is None:
            return None
        factor = attention.config.rope_parameters.get("partial_rotary_factor", 1.0)
        return GroupIndexer(attention.indexer, int(attention.head_dim * factor))

    def project(self, indexer: Indexer, inputs: Inputs) -> IndexTensors:
        """From hidden states."""
        return indexer(inputs.hidden.detach(), position_embeddings=inputs.position_embeddings)

    @torch.no_grad()
    def select(self, indexer: Indexer, index: IndexTensors, topk: int) -> Tensor:
        """The keys of each head group's best blocks, by their best key, and of the newest blocks.

        Scores of a few queries are held at a time, and of each block of keys only the best.
        """
        assert isinstance(indexer, GroupIndexer)
        q, k, size = index.index_q, index.index_k, indexer.block_size
        keys, first = k.shape[1], k.shape[1] - q.shape[2]
        blocks = -(-keys // size)
        count = min(max(1, topk // size), blocks)
        place = torch.arange(blocks * size, device=q.device)
        found = []
        for start in range(0, q.shape[2], ROWS):
            rows = q[:, :, start : start + ROWS]
            at = torch.arange(first + start, first + start + rows.shape[2], device=q.device)[:, None]  # [rows, 1]
            scores = rows.to(_wide(rows)) @ k.to(_wide(k))[:, None].mT  # [B, R, rows, keys]
            scores = nn.functional.pad(scores, (0, blocks * size - keys))
            scores = scores.masked_fill(place > at, -torch.inf).unflatten(-1, (blocks, size)).amax(-1)
            newest = at // size - torch.arange(indexer.local_blocks, device=q.device)
            newest = newest.clamp(min=0).expand(*scores.shape[:3], -1)
            best, chosen = scores.scatter(-1, newest, torch.inf).topk(count, -1)
            chosen = (chosen[..., None] * size + place[:size]).flatten(-2)  # [B, R, rows, count * size]
            hidden = (best == -torch.inf).repeat_interleave(size, -1) | (chosen > at)
            found.append(chosen.masked_fill(hidden, -1).int())
        return torch.cat(found, 2) if found else q.new_empty((*q.shape[:3], 0), dtype=torch.int32)

    def check_selector(self, selector: Selector) -> None:
        """Refuses what its indexers do not do: they select for each query, by scores."""
        if isinstance(selector, IndexerSelector) and (selector.query_block != 1 or selector.normalise):
            raise ValueError(
                f"the indexers of {self.name} select for each query, by scores: got a query_block of "
                f"{selector.query_block} and normalise={bool(selector.normalise)}"
            )

    def select_late(self, indexer: Indexer, call: AttentionCall, selector: Selector) -> Tensor:
        """The keys of blocks that are counted from the first token of each sequence."""
        index = call.index
        assert index is not None, "the module's indexer hands its tensors over"
        if call.cu_seqlens_q is None or call.cu_seqlens_k is None:
            return self.select(indexer, index, selector.topk)
        counts = (starts.diff().tolist() for starts in (call.cu_seqlens_q, call.cu_seqlens_k))
        parts = zip(*(x.split(count) for x, count in zip(index[:2], counts, strict=True)), strict=True)
        found = [
            self.select(indexer, IndexTensors(q.transpose(0, 1)[None], k[None], None), selector.topk)[0]
            for q, k in parts
        ]
        most = max(keys.shape[-1] for keys in found)
        return torch.cat([nn.functional.pad(keys, (0, most - keys.shape[-1]), value=-1) for keys in found], 1)

    def cached(self, cache: Any, layer: int, index_k: Tensor) -> Tensor:
        """In a cache layer of the model's own."""
        return cache.layers[layer].update_index(index_k[:, None])[:, 0]

    def divergence(
        self, losses: Losses, q: Tensor, k: Any, index: IndexTensors, *, activation: Activation, **options: Any
    ) -> Tensor:
        """The mean over the head groups of the KL from the mean of a group's heads to its index head."""
        return losses.attention_kl(
            q, k, index.index_q, index.index_k[:, None], causal=True, student_activation=activation, **options
        )

    def fingerprint(self, attention: Attention) -> Tensor:
        """Of the query projection."""
        return few(attention.q_proj)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
