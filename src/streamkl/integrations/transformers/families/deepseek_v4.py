"""DeepSeek-V4 (``deepseek_v4``): attention to a window, to compressed keys, which indexers score, and to a sink."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from streamkl.indexer import Indexer, apply_rope
from streamkl.integrations.transformers.families.base import Attention, Inputs, OwnIndexers, few
from streamkl.integrations.transformers.families.compressed import select_compressed
from streamkl.sparse import IndexTensors


class CompressedIndexer(Indexer):
    """Relu heads over compressed keys, each of which stands for ``key_span`` tokens.

    A compressed key is a gated mean over its tokens and those of the key before it, for which every token has two
    vectors and two gates. RoPE rotates the last dims of a head; that of a key is its first token's.

    Args:
        own: The indexer of transformers, whose maps and norm it has, by their names.
    """

    kind = "compressed"

    def __init__(self, own: Any) -> None:
        rope_dim = 2 * len(own.rotary_emb.compress_inv_freq)
        super().__init__(own.head_dim, rope_dim, "interleaved", 10000.0, "relu")
        self.heads: int = own.num_heads
        self.key_span = own.compress_rate
        self.kv_proj: nn.Module = own.kv_proj
        self.gate_proj: nn.Module = own.gate_proj
        self.position_bias: nn.Parameter = own.position_bias
        self.kv_norm: nn.Module = own.kv_norm
        self.q_b_proj: nn.Module = own.q_b_proj
        self.scorer: nn.Module = own.scorer

    def forward(
        self,
        hidden: Tensor,
        query: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> IndexTensors:
        """Projects the hidden states and latents of whole sequences: ``index_k`` is ``[B, N // key_span, D]``.

        Args:
            hidden: ``[B, N, hidden_dim]``.
            query: ``[B, N, query_dim]``: the latent.
            positions: Not read.
            position_embeddings: ``(cos, sin)``, each ``[B or 1, N, rope_dim / 2]``.
            cu_seqlens: Not supported.
        """
        if cu_seqlens is not None or query is None or position_embeddings is None:
            raise ValueError("a CompressedIndexer takes whole sequences, with latents and position_embeddings")
        tables = [torch.cat((table, table), -1) for table in position_embeddings]
        q = self.q_b_proj(query).unflatten(-1, (self.heads, self.head_dim))  # [B, N, J, D]
        q = self._rotated(q, *(table[:, :, None] for table in tables))
        k = self._compressed(hidden).to(q.dtype)
        last = k.shape[1] * self.key_span
        k = self._rotated(k, *(table[:, : last : self.key_span] for table in tables))
        weights: Any = self.scorer.weights_proj
        w = weights(hidden.to(weights.weight.dtype))
        w = w.to(torch.promote_types(w.dtype, torch.float32)) * self.scorer.weights_scaling
        return IndexTensors(q.transpose(1, 2), k, w)

    def _compressed(self, hidden: Tensor) -> Tensor:
        """``[B, N // key_span, D]``: the compressed keys, before RoPE; tokens at the end that make no key are left."""
        count, span = hidden.shape[1] // self.key_span, self.key_span
        values, gates = (
            proj(hidden)[:, : count * span].unflatten(1, (count, span)) for proj in (self.kv_proj, self.gate_proj)
        )  # [B, count, span, 2 D]: the first half of a token is for the next key
        gates = gates + self.position_bias
        values, gates = (_with_next(x, fill) for x, fill in ((values, 0.0), (gates, -torch.inf)))
        share = gates.softmax(2, dtype=torch.promote_types(gates.dtype, torch.float32)).to(values.dtype)
        return self.kv_norm((values * share).sum(2))

    def _rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``x [..., D]`` with its last ``rope_dim`` dims rotated."""
        x = apply_rope(x.roll(self.rope_dim, -1), cos, sin, self.rope_layout)
        return x.roll(-self.rope_dim, -1)


class DeepseekV4(OwnIndexers):
    """One softmax over a window, over compressed keys and over a sink; some layers have an indexer for those keys."""

    name = "deepseek_v4"
    model_types = ("deepseek_v4",)
    attention = "DeepseekV4Attention"
    has_sinks = True
    windowed = True
    not_sparse = "a softmax of it covers a window and compressed keys, and sparse attention gathers keys of one kind"

    def is_global(self, attention: Attention) -> bool:
        """Where there is an indexer: every module has a window."""
        return self.own(attention) is not None

    def holder(self, attention: Attention) -> Any:
        """Its indexer is that of its compressor."""
        return attention.compressor

    def own_topk(self, config: Any) -> int:
        """That of the config, in compressed keys."""
        return config.get_text_config().index_topk

    def key_span(self, attention: Attention) -> int:
        """Of the compressor's keys."""
        return attention.compressor.compress_rate

    def indexer(self, attention: Attention) -> CompressedIndexer | None:
        """A `CompressedIndexer` over the module's own maps, so that training it trains the model's indexer."""
        own = self.own(attention)
        return None if own is None else CompressedIndexer(own)

    def own_inputs(self, own: Any, arguments: Mapping[str, Any]) -> Inputs:
        """It makes its tables of RoPE itself."""
        hidden, positions = arguments["hidden_states"], arguments["position_ids"]
        tables = own.rotary_emb(hidden, position_ids=positions, layer_type=own.rope_layer_type)
        return Inputs(hidden, tables, arguments["q_residual"], positions=positions)

    def project(self, indexer: Indexer, inputs: Inputs) -> IndexTensors:
        """From hidden states and latent."""
        assert inputs.latent is not None, "its queries have a latent"
        return indexer(inputs.hidden.detach(), inputs.latent.detach(), position_embeddings=inputs.position_embeddings)

    def select(self, indexer: Indexer, index: IndexTensors, topk: int) -> Tensor:
        """The compressed keys of the highest scores that a query sees."""
        return select_compressed(index, indexer.key_span, topk, indexer.activation)

    def fingerprint(self, attention: Attention) -> Tensor:
        """Of the latent's projection."""
        return few(attention.q_a_proj)


def _with_next(x: Tensor, fill: float) -> Tensor:
    """``[B, count, 2 span, D]`` of ``[B, count, span, 2 D]``: first halves of the tokens before, own second halves."""
    before, own = x.chunk(2, -1)
    return torch.cat((functional.pad(before[:, :-1], (0, 0, 0, 0, 1, 0), value=fill), own), 2)
