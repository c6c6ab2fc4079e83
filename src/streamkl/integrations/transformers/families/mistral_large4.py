"""Mistral Large 4 (``mistral_large4``), and its text model."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from streamkl.indexer import Indexer, LightningIndexer
from streamkl.integrations.transformers.families.base import Attention, Inputs, few
from streamkl.integrations.transformers.families.dsa import SparseLatent
from streamkl.sparse import IndexTensors


class ScaledQueries(LightningIndexer):
    """Its queries are of normed hidden states, and grow with the logarithm of their position."""

    q_input_norm: nn.Module
    softmax_scaling: nn.Module
    """``(a ln(position + 1) + b) q`` with a scale and a bias per head."""

    def forward(
        self,
        hidden: Tensor,
        query: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> IndexTensors:
        """Projects hidden states; RoPE takes ``position_embeddings``, the scale ``positions``."""
        index = super().forward(
            hidden, self.q_input_norm(hidden), position_embeddings=position_embeddings, cu_seqlens=cu_seqlens
        )
        return index._replace(index_q=self.softmax_scaling(index.index_q, positions, head_dim_first=True))


class MistralLarge4(SparseLatent):
    """Its queries have no latent; some layers have no RoPE, and some share keys or the top-k of an earlier one."""

    name = "mistral_large4"
    model_types = ("mistral_large4", "mistral_large4_text")
    attention = "MistralLarge4TextAttention"
    rope_layout = "interleaved"
    kind = ScaledQueries
    maps = (*SparseLatent.maps, "q_input_norm", "softmax_scaling")

    def rotated(self, own: Any) -> int:
        """None in layers without RoPE."""
        return own.qk_rope_head_dim if own.use_rope else 0

    def tensors(self, indexer: Indexer, inputs: Inputs) -> IndexTensors:
        """From hidden states and positions."""
        return indexer(
            inputs.hidden.detach(), positions=inputs.positions, position_embeddings=inputs.position_embeddings
        )

    def fingerprint(self, attention: Attention) -> Tensor:
        """Of the query projection."""
        return few(attention.q_proj)
