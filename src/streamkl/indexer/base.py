"""The base class of indexers: dense scores, the loss and a streaming top-k of the tensors that an indexer projects."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

import torch
from torch import Tensor, nn

from streamkl.api import Backend, indexer_kl
from streamkl.indexer.rope import LAYOUTS, Layout, apply_rope, rope_tables
from streamkl.sparse.arguments import IndexTensors, SelectionBackend
from streamkl.sparse.scores import index_scores
from streamkl.sparse.selection import index_topk

Activation = Literal["relu"] | None


class Indexer(nn.Module, ABC):
    """An indexer whose queries and keys come from the same hidden states.

    Hidden states are ``[B, N, hidden_dim]``, or packed (varlen) ``[T, hidden_dim]`` with ``cu_seqlens``. A subclass
    defines ``forward``. Where queries and keys have different tokens (a chunk against a cache), call ``forward`` for
    each, and pass the results to ``streamkl.indexer_kl`` or ``streamkl.sparse.index_topk``.
    """

    kind: str
    """Its name in saved folders."""
    key_span: int = 1
    """How many tokens one of its keys stands for."""

    def __init__(
        self,
        head_dim: int,
        rope_dim: int,
        rope_layout: Layout,
        rope_base: float,
        activation: Activation,
        temperature: bool = False,
    ) -> None:
        super().__init__()
        if not 0 <= rope_dim <= head_dim or rope_dim % 2:
            raise ValueError(f"rope_dim must be even and at most head_dim, {head_dim}: got {rope_dim}")
        if rope_layout not in LAYOUTS:
            raise ValueError(f"rope_layout must be one of {', '.join(map(repr, LAYOUTS))}: got {rope_layout!r}")
        if activation not in ("relu", None):
            raise ValueError(f"activation must be 'relu' or None: got {activation!r}")
        self.head_dim, self.rope_dim = head_dim, rope_dim
        self.rope_layout: Layout = rope_layout
        self.rope_base = rope_base
        self.activation: Activation = activation
        self.log_temperature = nn.Parameter(torch.zeros(())) if temperature else None

    @abstractmethod
    def forward(
        self,
        hidden: Tensor,
        query: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> IndexTensors:
        """Projects hidden states.

        Args:
            hidden: ``[B, N, hidden_dim]``, or packed ``[T, hidden_dim]``: input of the keys, and of the head weights
                if the indexer has them.
            query: ``[B, N, query_dim]``, packed ``[T, query_dim]``: input of the queries; ``hidden`` if not given.
            positions: ``[B, N]`` or ``[N]``, packed ``[T]``: from 0 on in each sequence if not given.
            position_embeddings: ``(cos, sin)`` in place of positions, each ``[B, N, rope_dim]``, ``[1, N, rope_dim]``
                or ``[N, rope_dim]``, as transformers' rotary embeddings return them.
            cu_seqlens: ``[sequences + 1]``: where each packed sequence starts, and the end.
        """

    def scores(
        self,
        hidden: Tensor,
        query: Tensor | None = None,
        *,
        causal: bool = True,
        window: tuple[int, int] | None = None,
        positions: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """All scores as a dense matrix: ``[B, N, N]``, packed ``[T, T]``, ``-inf`` where a query may not see a key.

        Differentiable. For inspection and tests with small inputs: ``loss`` and ``topk`` never build it.
        """
        q, k, w = self(
            hidden, query, positions=positions, position_embeddings=position_embeddings, cu_seqlens=cu_seqlens
        )
        return index_scores(
            q, k, w, activation=self.activation, causal=causal, window=window, cu_seqlens_q=cu_seqlens,
            cu_seqlens_k=cu_seqlens,
        )  # fmt: skip

    def loss(
        self,
        hidden: Tensor,
        teacher_q: Tensor,
        teacher_k: Tensor,
        query: Tensor | None = None,
        *,
        causal: bool = True,
        window: tuple[int, int] | None = None,
        positions: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        cu_seqlens: Tensor | None = None,
        topk_indices: Tensor | None = None,
        teacher_scale: float | None = None,
        teacher_lse: Tensor | None = None,
        teacher_rest: Tensor | None = None,
        row_weight: Tensor | None = None,
        reduction: Literal["mean", "sum", "none"] = "mean",
        deterministic: bool | None = None,
        backend: Backend = "auto",
    ) -> Tensor:
        """``streamkl.indexer_kl`` of this indexer against a teacher: the KL from the mean of the teacher's heads.

        ``hidden``, ``query`` and the teacher are constants: the loss trains only the indexer, as in DeepSeek-V3.2.
        Arguments that ``forward`` does not have are those of ``indexer_kl``.
        """
        q, k, w = self(
            hidden.detach(),
            None if query is None else query.detach(),
            positions=positions,
            position_embeddings=position_embeddings,
            cu_seqlens=cu_seqlens,
        )
        return indexer_kl(
            teacher_q, teacher_k, q, k, w, activation=self.activation, topk_indices=topk_indices,
            teacher_scale=teacher_scale, teacher_lse=teacher_lse, teacher_rest=teacher_rest, causal=causal,
            window=window, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, row_weight=row_weight,
            reduction=reduction, deterministic=deterministic, backend=backend,
        )  # fmt: skip

    @torch.no_grad()
    def topk(
        self,
        hidden: Tensor,
        topk: int,
        query: Tensor | None = None,
        *,
        query_block: int = 1,
        normalise: bool = False,
        sort: bool = True,
        index_scale: float | None = None,
        causal: bool = True,
        window: tuple[int, int] | None = None,
        positions: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        backend: SelectionBackend = "auto",
    ) -> Tensor:
        """The keys of the highest scores: `streamkl.sparse.index_topk` of this indexer.

        Args:
            hidden: ``[B, N, hidden_dim]``, or packed ``[T, hidden_dim]``.
            topk: How many keys are selected per query block, which is one query by default.
            query: ``[B, N, query_dim]``, packed ``[T, query_dim]``: input of the queries; ``hidden`` if not given.
            query_block: How many consecutive queries of a sequence share their top-k, as in `index_topk`.
            normalise: Whether the queries of a block compare log-probabilities instead of scores.
            sort: Whether a row's keys come best first; in any order they take less time.
            index_scale: Multiplies the products; ``1/sqrt(head_dim)`` if not given.
            causal: Query ``i`` sees keys ``j <= i``.
            window: ``(left, right)`` keys around key ``i``; a negative side is unbounded.
            positions: ``[B, N]`` or ``[N]``, packed ``[T]``: from 0 on in each sequence if not given.
            position_embeddings: ``(cos, sin)`` in place of positions, as ``forward`` takes them.
            cu_seqlens_q: ``[sequences + 1]``: where each packed sequence starts, and the end.
            cu_seqlens_k: The same for the keys, which are those of the same tokens: equal to ``cu_seqlens_q``, and
                ``cu_seqlens_q`` if not given.
            backend: ``"auto"`` takes the fastest engine that can run. A named one is used or raises.

        Returns:
            ``[B, query_blocks, topk]``, packed ``[query_blocks, topk]``; per query ``[B, N, topk]``, packed
            ``[T, topk]``. int32, best first with ``sort``, equal scores by lower index, padded with -1.

        Examples:
            >>> import torch
            >>> from streamkl.indexer import HeadIndexer
            >>> indexer, hidden = HeadIndexer(32, head_dim=16), torch.randn(10, 32)
            >>> starts = torch.tensor([0, 4, 10])
            >>> indexer.topk(hidden, topk=3, cu_seqlens_q=starts, cu_seqlens_k=starts).shape
            torch.Size([10, 3])
            >>> indexer.topk(hidden[None], topk=6, query_block=4).shape
            torch.Size([1, 3, 6])
        """
        cu_seqlens = _of_both(cu_seqlens_q, cu_seqlens_k)
        index_q, index_k, index_w = self(
            hidden, query, positions=positions, position_embeddings=position_embeddings, cu_seqlens=cu_seqlens
        )
        return index_topk(
            index_q, index_k, index_w, topk=topk, query_block=query_block, normalise=normalise, sort=sort,
            activation=self.activation, index_scale=index_scale, causal=causal, window=window, cu_seqlens_q=cu_seqlens,
            cu_seqlens_k=cu_seqlens, backend=backend,
        )  # fmt: skip

    def _tempered(self, q: Tensor) -> Tensor:
        """Queries divided by the learned temperature, if there is one."""
        return q if self.log_temperature is None else q * (-self.log_temperature).exp().to(q.dtype)

    def _rotate(
        self,
        q: Tensor,
        k: Tensor,
        positions: Tensor | None,
        position_embeddings: tuple[Tensor, Tensor] | None,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Rotates ``q [B, N, J, D]`` and ``k [B, N, D]`` (packed ``[T, J, D]`` and ``[T, D]``)."""
        if self.rope_dim == 0:
            return q, k
        if position_embeddings is None:
            if positions is None:
                positions = _positions(k.shape[-2], cu_seqlens, k.device)
            position_embeddings = rope_tables(positions, self.rope_dim, self.rope_base)
        elif positions is not None:
            raise ValueError("positions and position_embeddings exclude each other: got both")
        cos, sin = (_for_tokens(name, x, k) for name, x in zip(("cos", "sin"), position_embeddings, strict=True))
        if cos.shape[-1] != self.rope_dim:
            raise ValueError(f"position_embeddings must have rope_dim = {self.rope_dim} dims: got {cos.shape[-1]}")
        q = apply_rope(q, cos.unsqueeze(-2), sin.unsqueeze(-2), self.rope_layout)
        return q, apply_rope(k, cos, sin, self.rope_layout)


def check_hidden(hidden: Tensor, query: Tensor, cu_seqlens: Tensor | None) -> None:
    """Checks the rank of hidden states, and that queries are as many as keys."""
    wanted = "[batch, tokens, dim]" if cu_seqlens is None else "[tokens, dim] with cu_seqlens"
    if hidden.dim() != (3 if cu_seqlens is None else 2):
        raise ValueError(f"hidden must be of shape {wanted}: got {list(hidden.shape)}")
    if query.shape[:-1] != hidden.shape[:-1]:
        raise ValueError(f"query must have the tokens of hidden, {list(hidden.shape[:-1])}: got {list(query.shape)}")


def _of_both(cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None) -> Tensor | None:
    """The starts of sequences whose queries and keys are the same tokens."""
    if cu_seqlens_k is None or cu_seqlens_k is cu_seqlens_q:
        return cu_seqlens_q
    if cu_seqlens_q is None:
        raise ValueError("cu_seqlens_q and cu_seqlens_k go together: got cu_seqlens_k alone")
    on_cpu = cu_seqlens_q.device.type == cu_seqlens_k.device.type == "cpu"  # elsewhere a look at them would synchronise
    if cu_seqlens_q.shape != cu_seqlens_k.shape or (on_cpu and not torch.equal(cu_seqlens_q, cu_seqlens_k)):
        raise ValueError(
            "cu_seqlens_k must be equal to cu_seqlens_q, for queries and keys are the same tokens: got another one; "
            "for other keys call the indexer on both, and streamkl.sparse.index_topk"
        )
    return cu_seqlens_q


def _positions(tokens: int, cu_seqlens: Tensor | None, device: torch.device) -> Tensor:
    """``[tokens]``: positions from 0 on, starting again in each packed sequence."""
    positions = torch.arange(tokens, device=device)
    if cu_seqlens is None:
        return positions
    sequence = torch.searchsorted(cu_seqlens, positions.to(cu_seqlens.dtype), right=True) - 1
    return positions - cu_seqlens[sequence]


def _for_tokens(name: str, table: Tensor, k: Tensor) -> Tensor:
    """A table ``[B or 1, N, dim]`` or ``[N, dim]`` in a shape that broadcasts with ``k [B, N, D]`` or ``[T, D]``."""
    if k.dim() == 2 and table.dim() == 3 and table.shape[0] == 1:  # transformers keeps a batch of 1 where it packs
        table = table[0]
    if table.dim() > k.dim() or table.shape[-2] != k.shape[-2] or table.shape[:-2] not in ((), (1,), k.shape[:-2]):
        raise ValueError(f"{name} must be of shape {[*k.shape[:-1], 'rope_dim']}: got {list(table.shape)}")
    return table
