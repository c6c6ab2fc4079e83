"""HY-V4 (``hy_v4``)."""

from __future__ import annotations

from torch import Tensor

from streamkl.indexer import LightningIndexer
from streamkl.integrations.transformers.families.dsa import SparseLatent


class LastRotated(LightningIndexer):
    """A `LightningIndexer` that rotates the last dims of a head in place of the first."""

    def _rotate(
        self,
        q: Tensor,
        k: Tensor,
        positions: Tensor | None,
        position_embeddings: tuple[Tensor, Tensor] | None,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        q, k = (x.roll(self.rope_dim, -1) for x in (q, k))
        q, k = super()._rotate(q, k, positions, position_embeddings, cu_seqlens)
        return q.roll(-self.rope_dim, -1), k.roll(-self.rope_dim, -1)


class HYV4(SparseLatent):
    """Its heads have attention sinks; some layers share the top-k of the one before."""

    name = "hy_v4"
    model_types = ("hy_v4",)
    attention = "HYV4Attention"
    rope_layout = "half"
    kind = LastRotated
    has_sinks = True
