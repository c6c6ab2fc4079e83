"""The lightning indexer of DeepSeek-V3.2 and GLM-5: several relu heads over one key, weighted by the hidden state."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from streamkl.indexer.base import Activation, Indexer, IndexTensors, check_hidden
from streamkl.indexer.rope import Layout


class LightningIndexer(Indexer):
    """Scores ``sum_m w[i, m] * relu(<q[m, i], k[j]> / sqrt(head_dim))`` over ``heads`` index heads and one key.

    ``q = W_q query`` (from a low-rank latent of width ``query_dim`` in DeepSeek-V3.2), ``k = LayerNorm(W_k hidden)``,
    ``w = W_w hidden / sqrt(heads)`` in float32, and RoPE on the first ``rope_dim`` dims of q and k. Parameters have the
    names of transformers' DSA indexers, so that their weights load.

    Args:
        hidden_dim: Width of the hidden states.
        query_dim: Width of the input of the queries; ``hidden_dim`` if not given.
        heads: Index heads.
        head_dim: Width of a head.
        rope_dim: How many dims of a head are rotated, the first ones; half of them if not given, as in DeepSeek-V3.2.
        rope_layout: ``"half"`` as DeepSeek-V3.2's indexer, ``"interleaved"`` as GLM-5's.
        rope_base: Base of the frequencies where positions, not cosines and sines, are given.
        activation: ``"relu"``, or ``None`` for none.
        eps: Of the LayerNorm.
        temperature: Learn a temperature that divides the scores; it starts at 1.

    Examples:
        >>> import torch
        >>> from streamkl.indexer import LightningIndexer
        >>> _ = torch.manual_seed(0)
        >>> indexer = LightningIndexer(hidden_dim=64, query_dim=24, heads=4, head_dim=32, rope_dim=16)
        >>> hidden, latent = torch.randn(1, 100, 64), torch.randn(1, 100, 24)
        >>> teacher_q, teacher_k = torch.randn(1, 8, 100, 48), torch.randn(1, 8, 100, 48)
        >>> indexer.loss(hidden, teacher_q, teacher_k, query=latent).backward()
        >>> indexer.topk(hidden, 10, query=latent).shape
        torch.Size([1, 100, 10])
    """

    kind = "lightning"

    def __init__(
        self,
        hidden_dim: int,
        *,
        query_dim: int | None = None,
        heads: int = 64,
        head_dim: int = 128,
        rope_dim: int | None = None,
        rope_layout: Layout = "half",
        rope_base: float = 10000.0,
        activation: Activation = "relu",
        eps: float = 1e-6,
        temperature: bool = False,
    ) -> None:
        rope_dim = head_dim // 4 * 2 if rope_dim is None else rope_dim
        super().__init__(head_dim, rope_dim, rope_layout, rope_base, activation, temperature)
        self.heads = heads
        self.wq_b = nn.Linear(hidden_dim if query_dim is None else query_dim, heads * head_dim, bias=False)
        self.wk = nn.Linear(hidden_dim, head_dim, bias=False)
        self.k_norm = nn.LayerNorm(head_dim, eps=eps)
        self.weights_proj = nn.Linear(hidden_dim, heads, bias=False)

    def forward(
        self,
        hidden: Tensor,
        query: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> IndexTensors:
        """Projects hidden states, and ``query`` where it is given; see `Indexer.forward`."""
        query = hidden if query is None else query
        check_hidden(hidden, query, cu_seqlens)
        q = self._tempered(self.wq_b(query)).unflatten(-1, (self.heads, self.head_dim))
        # Autocast leaves norms in float32, and so do models that keep the weights of this one in it.
        k = self.k_norm(self.wk(hidden).to(self.k_norm.weight.dtype)).to(q.dtype)
        q, k = self._rotate(q, k, positions, position_embeddings, cu_seqlens)
        w = self.weights_proj(hidden.to(self.weights_proj.weight.dtype))
        w = w.to(torch.promote_types(w.dtype, torch.float32)) * self.heads**-0.5
        return IndexTensors(q if cu_seqlens is not None else q.transpose(1, 2), k, w)
