"""The plan of an evaluation."""

from __future__ import annotations

from dataclasses import dataclass

from streamkl.evaluation.methods import Method, grid
from streamkl.evaluation.tasks import TASKS


@dataclass(frozen=True)
class Plan:
    """The tasks, lengths and methods of a run.

    Attributes:
        tasks: Names of ``TASKS``.
        lengths: Tokens of a context.
        selectors: Names of ``SELECTORS``, and of folders of indexers.
        budgets: How many keys are selected per query block.
        query_blocks: How many queries share their top-k.
        contexts: How many there are per length and task with an answer.
        segments: How many passages per length are scored for perplexity.
        layer_segments: On how many of these recall and mass of each layer are measured.
        seed: Of the contexts.
    """

    tasks: tuple[str, ...] = ("needle", "perplexity")
    lengths: tuple[int, ...] = (2048,)
    selectors: tuple[str, ...] = ("oracle", "window", "random")
    budgets: tuple[int, ...] = (256,)
    query_blocks: tuple[int, ...] = (1, 64)
    contexts: int = 200
    segments: int = 40
    layer_segments: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        for task in self.tasks:
            if task not in TASKS:
                raise ValueError(f"a task is one of {', '.join(TASKS)}: got {task!r}")
        if self.lengths and self.query_blocks and self.largest_query_block > min(self.lengths):
            raise ValueError(
                f"a query block of {self.largest_query_block} queries is longer than {min(self.lengths)} tokens"
            )
        for name in ("lengths", "budgets", "query_blocks"):
            wrong = [number for number in getattr(self, name) if number < (2 if name == "lengths" else 1)]
            if wrong or not getattr(self, name):
                raise ValueError(
                    f"{name} are numbers of at least {2 if name == 'lengths' else 1}: got {wrong or 'none'}"
                )

    @property
    def largest_query_block(self) -> int:
        """The query block whose last rows are also scored apart."""
        return max(self.query_blocks)

    def methods(self, length: int) -> list[Method]:
        """The methods compared at a length."""
        return grid(self.selectors, self.budgets, self.query_blocks, length)
