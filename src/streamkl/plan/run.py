"""A run to plan: the length of sequences, the indexers, and how ranks share the work."""

from __future__ import annotations

import re
from dataclasses import dataclass

from streamkl.plan.model import Heads, Model

ITEMSIZES = {"bfloat16": 2, "float16": 2, "float32": 4}
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20}


@dataclass(frozen=True)
class Run:
    """What is distilled, and on how many ranks.

    Attributes:
        tokens: Of a sequence.
        batch: Sequences of a step, on each group of ranks that shares them.
        ranks: GPUs, one rank each.
        context: Ranks that share a sequence (``--context-parallel``).
        tensor: Ranks that share the heads and MLPs of the teacher (``--tensor-parallel``). One of the two is 1.
        sharded: Whether the teacher's weights are sharded over all ranks (``--shard-teacher``).
        index_heads: Index heads.
        index_dim: Width of an index head.
        dtype: Of the teacher.
        latent: Whether latent attention exchanges the latent in place of keys, which ``streamkl distill`` does not.
    """

    tokens: int
    batch: int = 1
    ranks: int = 1
    context: int = 1
    tensor: int = 1
    sharded: bool = False
    index_heads: int = 1
    index_dim: int = 64
    dtype: str = "bfloat16"
    latent: bool = False

    def __post_init__(self) -> None:
        for name in ("tokens", "batch", "ranks", "context", "tensor", "index_heads", "index_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1: got {getattr(self, name)}")
        if self.dtype not in ITEMSIZES:
            raise ValueError(f"dtype must be one of {', '.join(ITEMSIZES)}: got {self.dtype!r}")
        if self.context > 1 and self.tensor > 1:
            raise ValueError(
                f"context and tensor parallelism both share each sequence: got {self.context} and {self.tensor}; "
                f"choose one"
            )
        if self.ranks % self.shared:
            raise ValueError(
                f"context x tensor = {self.context} x {self.tensor} must divide the number of GPUs: got {self.ranks}"
            )

    @property
    def data(self) -> int:
        """Groups of ranks that train on sequences of their own."""
        return self.ranks // self.shared

    @property
    def shared(self) -> int:
        """Ranks that share the loss of a sequence."""
        return self.context * self.tensor

    @property
    def shards(self) -> int:
        """Shards of a weight, or of a rank's part of it: groups of tensor-parallel ranks shard it unasked."""
        return self.ranks // self.tensor if self.sharded or self.tensor > 1 else 1

    @property
    def itemsize(self) -> int:
        """Bytes of a number of the teacher."""
        return ITEMSIZES[self.dtype]

    @property
    def chunk(self) -> int:
        """Tokens of the longest chunk, where each rank has one from the head and one from the tail of a sequence."""
        return -(-self.tokens // (2 * self.shared))

    def own(self, rank: int = 0) -> int:
        """Tokens of a sequence whose loss a rank computes; but for tensor parallelism, it holds no others."""
        chunks = 2 * self.shared
        bounds = [chunk * self.tokens // chunks for chunk in range(chunks + 1)]
        last = chunks - 1 - rank
        return bounds[rank + 1] - bounds[rank] + bounds[last + 1] - bounds[last]

    @property
    def most(self) -> int:
        """Tokens of the rank that runs the teacher on the most."""
        return self.tokens if self.tensor > 1 else max(self.own(rank) for rank in range(self.context))

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key in a sequence under a causal mask."""
        return self.tokens * (self.tokens + 1) // 2

    def attended(self, model: Model) -> Heads:
        """What attention and the loss read."""
        return model.attended(self.latent)


def parse_tokens(text: str) -> int:
    """A number of tokens: ``4096``, ``128K`` (131,072), ``1M`` (1,048,576).

    Examples:
        >>> from streamkl.plan.run import parse_tokens
        >>> parse_tokens("128K"), parse_tokens("1M"), parse_tokens("1.5k"), parse_tokens("4,096")
        (131072, 1048576, 1536, 4096)

    Raises:
        ValueError: It is none, or no whole number of at least 1.
    """
    found = re.fullmatch(r"(\d[\d_,]*(?:\.\d+)?)\s*([km]?)", text.strip(), re.IGNORECASE)
    count = float(re.sub("[_,]", "", found[1])) * UNITS[found[2].upper()] if found else 0.0
    if count < 1 or count != int(count):
        raise ValueError(f"tokens must be a whole number above 0, such as 4096, 128K or 1M: got {text!r}")
    return int(count)
