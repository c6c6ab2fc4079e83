"""What a load has measured, one JSON line each."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

DENSE, SPARSE = "dense", "sparse"


@dataclass(frozen=True)
class Load:
    """Requests to one server.

    Attributes:
        prompt_tokens: Of each prompt; prompts are random and differ.
        output_tokens: Of each answer.
        requests: How many.
        at_once: How many of them are under way.
    """

    prompt_tokens: int
    output_tokens: int
    requests: int
    at_once: int


@dataclass(frozen=True)
class Served:
    """A load that was served.

    Attributes:
        settings: What tells runs apart: the model, the sparse model's settings, the server's arguments.
        kind: `DENSE` or `SPARSE`.
        round: Its number.
        load: The requests.
        ttfts: Seconds to the first token, of each request.
        itls: Seconds between tokens, of all requests.
        throughput: Tokens of answers per second.
        machine: The facts of the machine.
    """

    settings: dict[str, Any]
    kind: str
    round: int
    load: Load
    ttfts: list[float]
    itls: list[float]
    throughput: float
    machine: dict[str, str]


@dataclass(frozen=True)
class Row:
    """All rounds of one kind of server at one length of prompts.

    Attributes:
        kind: `DENSE` or `SPARSE`.
        prompt_tokens: The length.
        ttft: The median of the seconds to the first token.
        ttft_range: The least and the most of the rounds' medians.
        itl: The median of the seconds between tokens; ``None`` if answers have one token.
        throughput: The median over rounds.
    """

    kind: str
    prompt_tokens: int
    ttft: float
    ttft_range: tuple[float, float]
    itl: float | None
    throughput: float


def append(path: Path, record: Served) -> None:
    """Adds a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(dataclasses.asdict(record)) + "\n")


def read(path: Path) -> list[Served]:
    """All records; a last line that was cut off is left out, and taken out of the file."""
    if not path.exists():
        return []
    whole = path.read_text()
    lines = whole[: whole.rfind("\n") + 1]
    if lines != whole:
        path.write_text(lines)
    found = [json.loads(line) for line in lines.splitlines()]
    return [Served(**{**one, "load": Load(**one["load"])}) for one in found]


def rows(records: list[Served]) -> list[Row]:
    """The records, by the length of prompts and the kind of server."""
    made = []
    for tokens in sorted({r.load.prompt_tokens for r in records}):
        for kind in (DENSE, SPARSE):
            here = [r for r in records if r.kind == kind and r.load.prompt_tokens == tokens]
            if not here:
                continue
            medians = [median(r.ttfts) for r in here]
            itls = [seconds for r in here for seconds in r.itls]
            made.append(Row(
                kind, tokens, median(x for r in here for x in r.ttfts), (min(medians), max(medians)),
                median(itls) if itls else None, median(r.throughput for r in here),
            ))  # fmt: skip
    return made
