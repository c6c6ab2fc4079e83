"""The samples of a run, in an order that depends on its seed alone: not on processes, batches or interruptions."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from streamkl.distillation import needles


class Samples(Dataset):
    """As many samples as a run takes; sequences come again, in another order, when all have been seen.

    Args:
        sequences: ``[sequences, length]``, uint32.
        count: How many samples there are.
        seed: Of the order, and of the needles.
        tokenizer: For the needles.
        share: How many of the samples have needles, from 0 to 1.
        facts: How many questions such a sample asks, at most.
        answer_weight: How much the queries of questions and answers weigh.
        late: Whether a query weighs as much as it sees keys.
    """

    def __init__(
        self,
        sequences: np.ndarray,
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
        self._order = functools.lru_cache(maxsize=2)(self._draw_order)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        if not 0 <= number < self.count:
            raise IndexError(number)
        epoch, at = divmod(number, len(self.sequences))
        ids = self.sequences[self._order(epoch)[at]]
        draw = np.random.default_rng((self.seed, epoch, at))
        asked = len(ids)
        if draw.random() < self.share:
            ids, asked = needles.hide(self.tokenizer, ids, int(draw.integers(2**62)), self.facts)
        sample = {"input_ids": torch.from_numpy(ids.astype(np.int64))}
        if self.late or (self.share and self.answer_weight != 1):
            sample["row_weight"] = self._weights(len(ids), asked)
        return sample

    def _draw_order(self, epoch: int) -> np.ndarray:
        return np.random.default_rng((self.seed, epoch)).permutation(len(self.sequences))

    def _weights(self, length: int, asked: int) -> Tensor:
        """Weights of the queries, whose mean is 1, so that every sequence weighs the same."""
        weights = torch.arange(1, length + 1, dtype=torch.float32, device="cpu")
        weights = weights if self.late else torch.ones_like(weights)
        weights[asked:] *= self.answer_weight
        return weights / weights.mean()
