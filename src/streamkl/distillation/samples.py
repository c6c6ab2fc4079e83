"""The samples of a run, in an order that depends only on its seed: not on processes, batches or interruptions."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from streamkl.distillation import needles
from streamkl.distillation.order import shuffled
from streamkl.distillation.shards import TokenSequences


class Samples(Dataset):
    """The samples of a run; when all sequences have been seen, they are repeated in another order.

    Args:
        sequences: ``[sequences, length]``, uint32: in memory, or in shards.
        count: How many samples there are.
        seed: Of the order, and of the needles.
        tokenizer: For the needles.
        share: The fraction of samples with needles, from 0 to 1.
        facts: The most questions of such a sample.
        answer_weight: The weight of the queries of questions and answers.
        late: Whether the weight of a query is the number of keys that it sees.
    """

    def __init__(
        self,
        sequences: np.ndarray | TokenSequences,
        count: int,
        seed: int,
        *,
        tokenizer: Any = None,
        share: float = 0.0,
        facts: int = 1,
        answer_weight: float = 1.0,
        late: bool = False,
    ) -> None:
        self.sequences, self.count, self.seed = sequences, count, seed
        self.tokenizer, self.share, self.facts = tokenizer, share, facts
        self.answer_weight, self.late = answer_weight, late
        if share:
            needles.check(tokenizer, sequences.shape[1])

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        if not 0 <= number < self.count:
            raise IndexError(number)
        epoch, at = divmod(number, len(self.sequences))
        ids = self.sequences[shuffled(at, len(self.sequences), self.seed, epoch)]
        draw = np.random.default_rng((self.seed, epoch, at))
        asked = len(ids)
        if draw.random() < self.share:
            ids, asked = needles.hide(self.tokenizer, ids, int(draw.integers(2**62)), self.facts)
        sample = {"input_ids": torch.from_numpy(ids.astype(np.int64))}
        if self.late or (self.share and self.answer_weight != 1):
            sample["row_weight"] = self._weights(len(ids), asked)
        return sample

    def _weights(self, length: int, asked: int) -> Tensor:
        """Weights of the queries, whose mean is 1, so that every sequence weighs the same."""
        weights = torch.arange(1, length + 1, dtype=torch.float32, device="cpu")
        weights = weights if self.late else torch.ones_like(weights)
        weights[asked:] *= self.answer_weight
        return weights / weights.mean()
