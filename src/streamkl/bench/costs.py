"""What the costs of a step of a model have in common: a figure, the tokens of a run, and when losses agree."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from streamkl.bench.gate import RedGateError

GATE = 0.01
"""By what part two losses may differ, or no figure is shown."""


class Cost(NamedTuple):
    """One call at one length.

    Attributes:
        tokens: The length.
        call: Its name.
        seconds: The median of its repetitions; ``None`` where only memory was measured.
        extra_bytes: The memory that it added to its process at its peak.
    """

    tokens: int
    call: str
    seconds: float | None
    extra_bytes: int


def random_ids(model: Any, tokens: int) -> Tensor:
    """A sequence of random tokens of a model's vocabulary, ``[1, tokens]``, always the same."""
    vocabulary = model.config.get_text_config().vocab_size
    return torch.randint(vocabulary, (1, tokens), generator=torch.Generator().manual_seed(0))


def check_agreement(found: dict[str, float], ours: str, materialised: str, tokens: int) -> None:
    """Raises `RedGateError` if our loss is not that of the matrices."""
    if not abs(found[ours] - found[materialised]) <= GATE * found[materialised]:
        raise RedGateError(f"the losses at {tokens} tokens are {found}")
