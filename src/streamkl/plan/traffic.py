"""What ranks exchange: the formulas of ``docs/scale.md``, in bytes that a rank receives."""

from __future__ import annotations

from dataclasses import dataclass

from streamkl.plan.model import Heads, Model
from streamkl.plan.run import Run

SUMS = 8
"""The sum of weights and the loss, float32."""
FINITE = 4
"""What tells the ranks that share a sequence whether a layer's activations are finite, float32."""


@dataclass(frozen=True)
class Exchange:
    """Bytes that a rank receives for one layer from the ranks that it shares sequences with.

    Attributes:
        keys: Of the teacher.
        values: Of the teacher.
        index_keys: Of the indexer.
        gradients: Of index keys, in float32.
        sums: Of weights and the loss.
    """

    keys: int
    values: int
    index_keys: int
    gradients: int
    sums: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.keys + self.values + self.index_keys + self.gradients + self.sums


def exchange(run: Run, of: Heads, rank: int = 0) -> Exchange:
    """What `ContextParallel` exchanges for one layer.

    Args:
        run: Its tokens, batch, ranks that share a sequence, dtype and index heads.
        of: The teacher's keys and values.
        rank: Which of the ranks.

    Examples:
        >>> from streamkl.plan import Run, exchange
        >>> from streamkl.plan.model import Heads
        >>> exchange(Run(tokens=64, ranks=2, context=2, index_dim=8), Heads(4, 2, 16, 16))
        Exchange(keys=2048, values=2048, index_keys=512, gradients=1024, sums=8)
    """
    if run.shared == 1:
        return Exchange(0, 0, 0, 0, 0)
    others = run.shared - 1
    gathered = others * 2 * run.chunk * run.batch * run.itemsize
    gradients = others * run.own(rank) * run.batch * run.index_dim * 4
    values = gathered * of.values if run.tensor == 1 else 0  # each rank attends with its own heads
    return Exchange(gathered * of.keys, values, gathered * run.index_dim, gradients, SUMS)


@dataclass(frozen=True)
class Traffic:
    """Bytes that a rank receives.

    Attributes:
        layer: For one layer, from the ranks that it shares sequences with.
        learning: In all layers of a step, with the gradients of index keys, and whether activations are finite. Steps
            that are logged exchange a little more, for recall and mass.
        weights: Of the teacher in a step, where they are sharded.
        gradients: Of the indexers in a step, if ranks are a ring.
        heads: In a step, of hidden states and heads, under tensor parallelism.
    """

    layer: Exchange
    learning: int
    weights: int
    gradients: int
    heads: int


def traffic(model: Model, run: Run, rank: int = 0) -> Traffic:
    """What a rank receives in a step."""
    layer = exchange(run, run.attended(model), rank)
    attended = layer.keys + layer.values if run.tensor == 1 else 0  # layers without an indexer exchange them, too
    learns = layer.total + (FINITE if run.shared > 1 else 0)
    learning = model.learning * learns + (model.layers - model.learning) * attended
    frozen = model.weights - (0 if model.tied else model.embedding)  # the head does not run
    weights = round(frozen * run.itemsize / run.tensor * (run.shards - 1) / run.shards)
    trained = model.learning * model.indexer_weights(run.index_heads, run.index_dim)
    gradients = round(_reduced(4 * trained, run.ranks))
    hidden = round(2 * _reduced(run.batch * run.tokens * model.hidden * run.itemsize, run.tensor)) * model.layers
    return Traffic(layer, learning, weights, gradients, hidden + model.learning * heads(run, run.attended(model), rank))


def heads(run: Run, of: Heads, rank: int = 0) -> int:
    """What a rank receives where tensor-parallel ranks exchange heads for tokens: queries, keys and the LSE."""
    others = run.batch * run.own(rank) * (run.tensor - 1)
    return others * ((of.queries + of.keys) * run.itemsize + of.heads * 4) // run.tensor


def _reduced(size: int, ranks: int) -> float:
    """What a rank receives in an all-reduce of so many bytes, if ranks are a ring."""
    return 2 * (ranks - 1) / ranks * size
