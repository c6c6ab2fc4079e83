"""An indexer of one head, to convert a GQA checkpoint without an indexer to sparse attention."""

from __future__ import annotations

from torch import Tensor, nn

from streamkl.indexer.base import Activation, Indexer, IndexTensors, check_hidden
from streamkl.indexer.rope import Layout


class HeadIndexer(Indexer):
    """Scores ``relu(<q[i], k[j]> / sqrt(head_dim))``: ``q = W_q hidden``, ``k = LayerNorm(W_k hidden)``, both rotated.

    Args:
        hidden_dim: Width of the hidden states.
        head_dim: Width of the head.
        query_dim: Width of the input of the queries; ``hidden_dim`` if not given.
        rope_dim: How many dims are rotated, the first ones; all if not given.
        rope_layout: ``"half"`` or ``"interleaved"``.
        rope_base: Base of the frequencies where positions, not cosines and sines, are given.
        activation: ``"relu"``, or ``None`` for none.
        eps: Of the LayerNorm.
        temperature: Learn a temperature that divides the scores; it starts at 1.

    Examples:
        >>> import torch
        >>> from streamkl.indexer import HeadIndexer
        >>> _ = torch.manual_seed(0)
        >>> indexer = HeadIndexer(hidden_dim=64, head_dim=32)
        >>> hidden = torch.randn(1, 100, 64)
        >>> teacher_q, teacher_k = torch.randn(1, 9, 100, 64), torch.randn(1, 3, 100, 64)
        >>> indexer.loss(hidden, teacher_q, teacher_k).backward()
        >>> (indexer.topk(hidden, 10)[0, 2] >= 0).sum()  # the third query sees three keys
        tensor(3)
    """

    kind = "head"

    def __init__(
        self,
        hidden_dim: int,
        *,
        head_dim: int = 128,
        query_dim: int | None = None,
        rope_dim: int | None = None,
        rope_layout: Layout = "half",
        rope_base: float = 10000.0,
        activation: Activation = "relu",
        eps: float = 1e-6,
        temperature: bool = False,
    ) -> None:
        super().__init__(
            head_dim, head_dim if rope_dim is None else rope_dim, rope_layout, rope_base, activation, temperature
        )
        self.wq = nn.Linear(hidden_dim if query_dim is None else query_dim, head_dim, bias=False)
        self.wk = nn.Linear(hidden_dim, head_dim, bias=False)
        self.k_norm = nn.LayerNorm(head_dim, eps=eps)

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
        q = self._tempered(self.wq(query)).unsqueeze(-2)
        k = self.k_norm(self.wk(hidden)).to(q.dtype)  # autocast leaves norms in float32
        q, k = self._rotate(q, k, positions, position_embeddings, cu_seqlens)
        return IndexTensors(q if cu_seqlens is not None else q.transpose(1, 2), k, None)
