"""Results of prefill measurements on disk: one line of JSON per method and prompt length."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path

from streamkl.bench.prefill.stopwatch import PARTS


@dataclass
class Prefill:
    """The prefill of a prompt by one method.

    Attributes:
        model: The shape or checkpoint.
        random_weights: Whether its weights are random: then it is a stress test, and says nothing about quality.
        layers: How many layers it was run with.
        all_layers: How many the model has.
        tokens: Of the prompt.
        method: ``dense``, or the selector's name.
        topk: Selected keys per query block, 0 for dense.
        query_block: Queries that share their top-k, 0 for dense.
        dtype: Of weights and activations.
        threads: CPU threads.
        keep_memory: Whether freed memory stayed with the process (`allocator`).
        seconds: Time to first token, every repetition.
        parts: Seconds of each part, of the repetition next to the median.
        extra_bytes: The memory that a pass added to its process at its peak.
        machine: Device, versions and commit.
        date: The time of measurement, in UTC.
    """

    model: str
    random_weights: bool
    layers: int
    all_layers: int
    tokens: int
    method: str
    topk: int
    query_block: int
    dtype: str
    threads: int
    keep_memory: bool = True
    seconds: list[float] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)
    extra_bytes: int | None = None
    machine: dict[str, str] = field(default_factory=dict)
    date: str = ""

    @property
    def median(self) -> float:
        """Seconds, the median of the repetitions."""
        return statistics.median(self.seconds)

    @property
    def title(self) -> str:
        """The model, and how it was run."""
        layers = "" if self.layers == self.all_layers else f", {self.layers} of {self.all_layers} layers"
        drawn = ", random weights (a stress test)" if self.random_weights else ""
        returned = "" if self.keep_memory else ", freed memory returned"
        return f"{Path(self.model).name}{drawn}{layers}{returned}"

    @property
    def setting(self) -> tuple[str, int, int, str]:
        """What dense and sparse attention have in common where one stands beside the other."""
        return self.title, self.tokens, self.threads, self.dtype

    @property
    def name(self) -> str:
        """The method and its budget."""
        if self.method == "dense":
            return self.method
        return f"{self.method}, {self.topk:,} keys per query block of {self.query_block}"


def append(path: Path, record: Prefill) -> None:
    """Appends a whole line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(asdict(record)) + "\n")


def read(path: Path) -> list[Prefill]:
    """All records, in the order of the file; of two of one setting and method the later one."""
    records = (Prefill(**json.loads(line)) for line in path.read_text().splitlines())
    return list({(r.setting, r.name): r for r in records}.values())


def faster(record: Prefill, records: list[Prefill]) -> float | None:
    """How many times as fast as dense attention in the same setting; ``None`` if there is no such record."""
    dense = [d for d in records if d.method == "dense" and d.setting == record.setting]
    return dense[0].median / record.median if dense and record.method != "dense" else None


def table(records: list[Prefill]) -> list[tuple[str, ...]]:
    """Rows of text: tokens, method, time to first token, speed-up over dense, the parts, memory added."""
    rows = []
    for r in records:
        times = faster(r, records)
        ratio = "" if times is None else f"{times:.2f}"
        added = "" if r.extra_bytes is None else f"{r.extra_bytes / 1e6:,.0f}"
        parts = (f"{r.parts.get(part, 0.0):.2f}" for part in PARTS)
        rows.append((f"{r.tokens:,}", r.name, f"{r.median:.2f}", ratio, *parts, added))
    return rows


COLUMNS = ("tokens", "method", "seconds", "faster", *PARTS, "MB added")
"""The columns of `table`. All times are seconds; ``faster`` is the speed-up over dense."""
