"""A teacher with structure to find, for tests that train an indexer."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

TOKENS, CLASSES, WIDTH, HEADS, KV_HEADS, DIM = 512, 16, 64, 8, 2, 32


class Batch(NamedTuple):
    """Hidden states ``[1, N, WIDTH]`` and the teacher's ``q [1, HEADS, N, DIM]`` and ``k [1, KV_HEADS, N, DIM]``."""

    hidden: Tensor
    teacher_q: Tensor
    teacher_k: Tensor


@pytest.fixture(scope="session")
def planted_batch() -> Callable[[int], Batch]:
    """A function of a seed: tokens of 16 classes, and a teacher that attends to earlier tokens of the same class.

    Query and key heads of a group share a projection of the token's embedding, with some noise on the queries', so a
    token's own class has the highest logits. The teacher is the same for every seed.
    """
    rng = torch.Generator().manual_seed(0)
    embedding = torch.randn(CLASSES, WIDTH, generator=rng)
    key = torch.randn(KV_HEADS, WIDTH, DIM, generator=rng) / WIDTH**0.5
    noise = torch.randn(HEADS, WIDTH, DIM, generator=rng) / WIDTH**0.5
    query = key.repeat_interleave(HEADS // KV_HEADS, 0) + 0.2 * noise

    def draw(seed: int) -> Batch:
        rng = torch.Generator().manual_seed(seed)
        classes = torch.randint(CLASSES, (1, TOKENS), generator=rng)
        x = embedding[classes] + 0.2 * torch.randn(1, TOKENS, WIDTH, generator=rng)
        return Batch(x, torch.einsum("bnw,hwd->bhnd", x, query), torch.einsum("bnw,hwd->bhnd", x, key))

    return draw
