"""The suites: the cells that answer a question, and the baselines.

Every suite is one command, ``streamkl bench run NAME``; `report` computes its figures.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from streamkl.bench.cells import Cell
from streamkl.bench.models import MODELS
from streamkl.testing import Heads

QUICK_TOKENS, QUICK_CELLS = 512, 4
"""The most tokens and cells under ``--quick``, which only shows that everything works."""


@dataclass(frozen=True)
class Suite:
    """Cells, and how they are measured.

    Attributes:
        question: What the suite answers.
        cells: The problems.
        baselines: The implementations that StreamKL is measured beside.
        threads: Thread counts that alternate; empty for that of the command line.
        isolated: Each implementation runs once, in a process of its own, for its peak memory, instead of in rounds.
    """

    question: str
    cells: tuple[Cell, ...]
    baselines: tuple[str, ...]
    threads: tuple[int, ...] = ()
    isolated: bool = False

    @property
    def implementations(self) -> tuple[str, ...]:
        """StreamKL, and the baselines."""
        return "streamkl", *self.baselines

    def quick(self) -> Suite:
        """The suite with few cells of few tokens."""
        cells = dict.fromkeys(cell.shortened(QUICK_TOKENS) for cell in self.cells)
        return replace(self, cells=tuple(cells)[:QUICK_CELLS])


def _grid(dtype: str, direction: str) -> Iterator[Cell]:
    for (tokens, heads), dim, mask in product(((4096, 8), (16384, 4)), (64, 128), ("causal", "full")):
        yield Cell.square(heads, tokens, dim, mask=mask, dtype=dtype, direction=direction)


def _training_grid(dtype: str) -> Iterator[Cell]:
    """Student gradients and all gradients of a shape next to each other, so that they alternate in one run."""
    for cell in _grid(dtype, "training"):
        yield from (cell, replace(cell, direction="training-both"))


def _against_eager() -> Iterator[Cell]:
    # Two heads at 8,192: eager's float32 matrices of eight would not fit into 24 GB.
    for dim, (tokens, heads) in product((128, 64), ((2048, 8), (4096, 8), (8192, 2))):
        for direction in ("forward", "training"):
            yield Cell.square(heads, tokens, dim, direction=direction)


def _threads() -> Iterator[Cell]:
    for dim, direction in product((64, 128), ("forward", "training")):
        yield Cell.square(8, 4096, dim, direction=direction)


def _models() -> Iterator[Cell]:
    for (name, layout), direction in product(MODELS.items(), ("forward", "training")):
        heads, kv, dim = layout
        for student in (Heads(heads, kv, heads, kv), Heads(heads, kv, 1, 1)):
            # A student of one head learns the mean of all; it has the width of the DeepSeek-V3.2 indexer.
            width = dim if student.student == heads else 128
            yield Cell(4096, student, (dim, width), direction=direction, label=name)


def _one_head(*tokens: int, dtype: str) -> tuple[Cell, ...]:
    return tuple(Cell.square(1, n, 64, dtype=dtype, direction="training") for n in tokens)


def _indexers() -> Iterator[Cell]:
    for index_heads, width in ((1, 128), (8, 64), (64, 128)):
        yield Cell(8192, Heads(32, 8, index_heads, 1), (128, width), direction="training", indexer=True)


def _compressed() -> Iterator[Cell]:
    for index_heads, width in ((1, 128), (8, 64)):
        yield Cell(8192, Heads(32, 8, index_heads, 1), (128, width), direction="training", indexer=True, rest=True)
    yield Cell(8192, Heads(32, 8, 64, 1), (128, 128), direction="training", indexer=True, key_span=4)


def _indexers_against_eager() -> Iterator[Cell]:
    # Half of the heads at 8,192: eager's matrices of all of them would not fit into 24 GB.
    for tokens, heads, kv_heads in ((2048, 32, 8), (4096, 32, 8), (8192, 16, 4)):
        yield Cell(tokens, Heads(heads, kv_heads, 1, 1), (128, 128), direction="training", indexer=True)


SUITES = {
    "forward": Suite(
        "What does the divergence cost beside attention, and beside its products alone?",
        tuple(_grid("bfloat16", "forward")),
        ("sdpa", "composed", "products"),
    ),
    "training": Suite(
        "What does a training step cost beside one of attention, with student gradients and with all?",
        tuple(_training_grid("bfloat16")),
        ("sdpa",),
    ),
    "eager": Suite(
        "How much faster is it than what people write?",
        tuple(_against_eager()),
        ("eager", "compiled", "chunked", "composed", "sdpa", "products"),
    ),
    "dtypes": Suite(
        "Does it hold in float32 and float16?",
        tuple(_grid("float32", "forward")) + tuple(_grid("float16", "forward")),
        ("sdpa", "products"),
    ),
    "threads": Suite(
        "What is a second thread worth?",
        tuple(_threads()),
        ("sdpa",),
        threads=(1, 2),
    ),
    "long": Suite(
        "How far does it go, in what memory, and how does time grow?",
        _one_head(131072, 262144, 1048576, dtype="bfloat16"),
        (),
        isolated=True,
    ),
    "memory": Suite(
        "How does memory grow?",
        _one_head(1024, 2048, 4096, 8192, 16384, 32768, 65536, dtype="float32"),
        ("eager",),
        isolated=True,
    ),
    "indexer": Suite(
        "What do loss and gradients of an indexer cost beside the forward of the attention that it learns from?",
        tuple(_indexers()),
        ("sdpa", "student"),
    ),
    "indexer-eager": Suite(
        "How much faster, and in how much less memory, than the indexer loss as frameworks write it?",
        tuple(_indexers_against_eager()),
        ("eager",),
    ),
    "compressed": Suite(
        "What does a softmax that covers more cost, and what do keys save that stand for several tokens?",
        tuple(_compressed()),
        ("plain",),
    ),
    "topk": Suite(
        "With a per-query top-k, does time grow with the number of tokens only?",
        tuple(
            Cell(tokens, Heads(4, 1, 1, 1), (64, 64), direction="training", indexer=True, topk=2048)
            for tokens in (32768, 65536)
        ),
        (),
        isolated=True,
    ),
    "models": Suite(
        "What does it cost at the layouts of real models, per head and against the mean of all heads?",
        tuple(_models()),
        ("sdpa", "products"),
    ),
}
