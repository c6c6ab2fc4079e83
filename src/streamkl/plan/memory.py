"""Memory of a rank: what is resident, and the most that a step adds to it.

Activations are those of one layer at a time: a step keeps nothing of a layer for a later backward. Each function lists
the tensors that are live at one moment of a layer, as transformers, `ContextParallel` and the loss allocate them; the
peak is the largest of these moments.
"""

from __future__ import annotations

from dataclasses import dataclass

from streamkl.plan.model import Model
from streamkl.plan.run import Run

TRAINED = 16
"""Bytes of a trained weight: float32 with its gradient and the two means of AdamW."""
UPCAST = 8
"""Bytes of a number in an RMSNorm: a float32 copy, and its square or its product; in float32 the two products."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank.

    Attributes:
        teacher: The frozen weights that it holds.
        indexers: The trained weights, their gradients and the optimizer's state.
        moments: The most that a step adds while it is in each of its moments, by name.
        gathered: Weights of sharded layers that are whole for a while: that of this layer and that of the next.
    """

    teacher: int
    indexers: int
    moments: dict[str, int]
    gathered: int

    @property
    def resident(self) -> int:
        """Between two steps."""
        return self.teacher + self.indexers

    @property
    def moment(self) -> str:
        """The moment of the peak."""
        return max(self.moments, key=lambda name: self.moments[name])

    @property
    def step(self) -> int:
        """The most that a step adds."""
        return self.moments[self.moment] + self.gathered

    @property
    def peak(self) -> int:
        """The most that the rank holds."""
        return self.resident + self.step


def memory(model: Model, run: Run) -> Memory:
    """Memory of the rank that holds the most tokens."""
    frozen = model.weights * run.itemsize // run.tensor
    trained = model.learning * model.indexer_weights(run.index_heads, run.index_dim)
    return Memory(
        teacher=frozen // run.shards,
        indexers=TRAINED * trained,
        moments=moments(model, run),
        gathered=2 * model.largest_layer * run.itemsize // run.tensor if run.shards > 1 else 0,
    )


def moments(model: Model, run: Run) -> dict[str, int]:
    """The bytes that a step adds while it is in each of its moments, by name."""
    tokens, size = run.batch * run.most, run.itemsize
    hidden = tokens * model.hidden * size
    # The embedding is kept by the model's forward, and the input of a layer by the loop over layers; in the first
    # layer the two are one. Positions and the tables of RoPE are there once for the whole batch.
    held = hidden * (2 if model.layers > 1 else 1) + run.most * (8 + 2 * model.rotated * size)
    inside = held + hidden + _in_attention(model, run)
    found = {
        "norm": held + hidden + tokens * model.hidden * UPCAST,
        "rotation": held + hidden + _rotation(model, run),
        "attention": inside + attention(model, run),
        "loss": inside + loss(model, run),
    }
    if model.dense_layers:
        mlp = 3 * model.intermediate // run.tensor  # the activated gate, the other half, and their product
        found["mlp"] = held + 2 * hidden + tokens * mlp * size
    if model.dense_layers < model.layers:
        found["experts"] = held + 2 * hidden + _experts(model, run)
    return found


def _rotation(model: Model, run: Run) -> int:
    """Queries, keys and values, and what norms or RoPE make of the queries; of latent attention the latents, too."""
    of, tokens = model.attended(), run.batch * run.most // run.tensor
    if model.query_latent:
        return _in_attention(model, run)
    rotated = (4 * of.queries + of.keys + of.values) * run.itemsize  # two products and the turned halves
    normed = of.queries * (run.itemsize + UPCAST) if model.head_norms else 0
    return tokens * max(rotated, normed)


def _in_attention(model: Model, run: Run) -> int:
    """Queries, keys and values as attention gets them; of latent attention also what they are made of."""
    of, tokens = run.attended(model), run.batch * run.most // run.tensor
    made = of.queries + of.keys + of.values
    if model.query_latent:  # queries before RoPE; both latents, that of keys before and after its norm
        made += model.attended().queries
        made += (model.query_latent + 2 * model.key_latent + model.rotated) * run.tensor
        if not run.latent:  # values are a part of what is projected up, and keys a copy of the rest of it
            made += of.keys - of.kv_heads * model.rotated
    return tokens * made * run.itemsize


def attention(model: Model, run: Run) -> int:
    """The output and its LSE; where ranks share a sequence, all keys and values, and one of them twice.

    They are twice there while chunks are put in order.
    """
    of, tokens = run.attended(model), run.batch * run.most
    added = tokens * of.heads // run.tensor * (of.value_dim * run.itemsize + 4)
    if run.context == 1:
        return added + tokens * of.heads // run.tensor * 4  # the LSE in the order of heads
    every = run.batch * run.tokens * run.itemsize
    ordered = every * (of.keys + of.values + max(of.keys, of.values)) // run.tensor
    # Each of the two chunks is attended to in two parts, and merged in float32; the first is complete by then.
    merged = tokens * of.heads // run.tensor // 2 * of.value_dim * (2 * run.itemsize + 3 * 4)
    return max(ordered, every * (of.keys + of.values) // run.tensor + added + merged)


def loss(model: Model, run: Run) -> int:
    """Output and LSE of the teacher, row vectors, index tensors and their gradients; of all keys where they are shared.

    In the backward an index query or key and its gradient are there four times: rotated, its gradient, and the four
    halves that the backward of RoPE makes of it; or, just before, its gradient in float32 and in the teacher's dtype.
    """
    of, tokens, size = run.attended(model), run.batch * run.most // run.tensor, run.itemsize
    queries, keys = run.index_heads * run.index_dim, run.index_dim
    rows = 3 * of.heads * 4 + 6 * 4  # the LSE and its two parts; max, sum, weight and loss of the indexer's rows
    made = of.outputs * size + rows + keys * size  # index keys before their norm, for its backward
    projected = made + (queries + keys) * size
    if run.index_heads > 1:  # the weights of heads, projected from float32, their gradient and their scaled form
        projected += model.hidden * (4 + size) if size < 4 else 0
        made += 3 * run.index_heads * 4 + (model.hidden * size if size < 4 else 0)
    backward = tokens * max(projected, made + (queries + keys) * max(4 * size, 2 * size + 4))
    if run.shared == 1:
        return backward
    every, teacher = run.batch * run.tokens, of.keys * size
    # Gradients come with the loss: dQ of all rows and of a segment, half of them; dK of a segment, where it is added,
    # and as it is received. All keys of the indexer are gone in the backward.
    forward = tokens * (made + keys * size + queries * (size + 4 + 2)) + every * (keys * size + 3 * keys * 4)
    if run.tensor == 1:
        return max(forward, backward) + every * teacher
    # Queries and keys of all heads, of this rank's tokens; all keys are twice there while chunks are put in order.
    exchanged, ordered = tokens * (of.queries + of.keys) * size, tokens * projected + every * (keys * size + teacher)
    return exchanged + max(forward, backward, ordered) + every * teacher


def _experts(model: Model, run: Run) -> int:
    """Experts by ``grouped_mm``: a token's hidden state once per expert, and each of them four times at the end.

    Sorted by expert, projected, weighted, and back in order. Before, gate and up side by side, and their product.
    """
    tokens, size = run.batch * run.most, run.itemsize
    end = 4 * model.chosen * model.hidden
    middle = model.chosen * (model.hidden + 4 * model.expert_intermediate // run.tensor)
    shared = model.hidden + 3 * model.shared_intermediate // run.tensor
    router = tokens * model.experts * 4 * 2
    return max(tokens * max(end, middle) * size + router, tokens * shared * size)
