"""Products of a step, in FLOPs of one rank: two per multiply-add, pairs that a causal mask leaves out not counted."""

from __future__ import annotations

from dataclasses import dataclass

from streamkl.plan.assumptions import Assumptions
from streamkl.plan.model import Model
from streamkl.plan.run import Run
from streamkl.plan.traffic import Traffic


@dataclass(frozen=True)
class Arithmetic:
    """FLOPs of one rank in a step.

    Attributes:
        projections: Of the teacher, its MLPs, and the indexers, forward and backward.
        attention: The teacher's, queries with keys and weights with values.
        lse: The pass for the teacher's log-sum-exp, which GPUs' attention does not hand out.
        loss: One product of the teacher; four of the indexer: for its row sums, its logits, dQ and dK.
    """

    projections: int
    attention: int
    lse: int
    loss: int


def arithmetic(model: Model, run: Run) -> Arithmetic:
    """What one of the ranks that share a sequence computes: each the same share."""
    of, share, pairs = run.attended(model), run.shared, run.batch * run.pairs
    trained = model.learning * model.indexer_weights(run.index_heads, run.index_dim)
    tokens = run.batch * run.tokens
    windowed = run.batch * sum(min(n + 1, model.window) for n in range(min(run.tokens, model.window)))
    windowed += run.batch * max(0, run.tokens - model.window) * model.window
    attended = 2 * of.heads * (of.key_dim + of.value_dim)
    rest = (model.layers - model.learning) * attended * (windowed if model.window else pairs)
    return Arithmetic(
        projections=(2 * tokens * model.active + 4 * tokens * trained) // share,
        attention=(model.learning * attended * pairs + rest) // share,
        lse=model.learning * 2 * pairs * of.queries // share,
        loss=model.learning * 2 * pairs * (of.queries + 4 * run.index_heads * run.index_dim) // share,
    )


@dataclass(frozen=True)
class Seconds:
    """Time of a step under the assumptions, without overlap.

    Attributes:
        projections: Of the teacher, its MLPs, and the indexers.
        attention: The teacher's.
        loss: With the pass for the log-sum-exp.
        keys: Exchanged between ranks that share sequences.
        rest: Other exchanges: sharded weights, gradients of the indexers, heads.
    """

    projections: float
    attention: float
    loss: float
    keys: float
    rest: float

    @property
    def step(self) -> float:
        """All of them."""
        return self.projections + self.attention + self.loss + self.keys + self.rest


def seconds(work: Arithmetic, traffic: Traffic, run: Run, given: Assumptions) -> Seconds:
    """Arithmetic and traffic at the assumed speeds."""
    rate = given.flops * 1e12
    return Seconds(
        projections=work.projections / (rate * given.projections),
        attention=work.attention / (rate * given.attention),
        loss=(work.lse + work.loss) / (rate * given.loss),
        keys=given.seconds(traffic.learning, run.shared),
        rest=given.seconds(traffic.weights + traffic.gradients, run.ranks) + given.seconds(traffic.heads, run.tensor),
    )
