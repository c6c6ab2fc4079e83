"""The compared methods: dense attention, and every selector with every budget and query block."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from typing import NamedTuple

from streamkl.sparse import IndexerSelector, OracleSelector, RandomSelector, Selector, WindowSelector

SELECTORS = {"oracle": OracleSelector, "window": WindowSelector, "random": RandomSelector}
"""Selectors that need no training, by name."""


class Method(NamedTuple):
    """Dense attention, or a selector with its budget and query block.

    Attributes:
        selector: ``dense``, a name of `SELECTORS`, or the name of a folder of indexers.
        topk: The budget: how many keys are selected per query block.
        query_block: How many queries share their top-k.
    """

    selector: str
    topk: int = 0
    query_block: int = 0

    @property
    def name(self) -> str:
        """The name in records: ``dense``, ``oracle k256 b64``."""
        return self.selector if self == DENSE else f"{self.selector} k{self.topk} b{self.query_block}"

    def make(self, activation: str | None = "relu") -> Selector:
        """The selector; not for dense attention. Indexers compare probabilities, as they were trained to.

        Args:
            activation: Of the indexers, if it is a folder of them.
        """
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "a top-k of .* holds only")  # `only_diagonal`, which commands tell of
            if self.selector in SELECTORS:
                return SELECTORS[self.selector](self.topk, self.query_block)
            return IndexerSelector(self.topk, self.query_block, activation, normalise=True)  # pyright: ignore[reportArgumentType]

    @property
    def only_diagonal(self) -> bool:
        """Whether the selected keys are only those on the diagonal of their query block."""
        return self.query_block > 1 and self.topk <= self.query_block


DENSE = Method("dense")


def grid(selectors: Sequence[str], budgets: Sequence[int], query_blocks: Sequence[int], length: int) -> list[Method]:
    """Dense attention and all combinations; a budget of ``length`` keys or more is dense attention and left out."""
    found = [Method(*each) for each in itertools.product(selectors, budgets, query_blocks)]
    return [DENSE, *(method for method in dict.fromkeys(found) if method.topk < length)]
