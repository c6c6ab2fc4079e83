"""Results on disk, one line of JSON each, appended as they are measured, so that an interrupted run can resume."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

NAME, START = "results.jsonl", b'{"run": '
"""The file of a run, and how it starts."""


class Record(NamedTuple):
    """One context with one method, or the layers of one method.

    Attributes:
        task: A name of ``TASKS``, or ``layers``.
        length: Tokens of the context.
        number: Of the context.
        method: The name of the method.
        found: The measured values, by name: ``right``, ``generated`` and ``answer``, or ``nll``, ``tokens``,
            ``nll_last`` and ``tokens_last``, and ``seconds`` of the prefill; for layers ``recall`` and ``mass``, by
            layer.
    """

    task: str
    length: int
    number: int
    method: str
    found: dict[str, Any]

    @property
    def key(self) -> tuple[str, int, int, str]:
        """The identity of the record."""
        return self[:4]


class Records:
    """The file of a run, ``results.jsonl`` in its folder. The first line has the identity of the run.

    Args:
        folder: Is created if it does not exist.
        identity: Everything that a record depends on besides its key; under ``indexers``, the digests of folders by
            name, to which a later run may add others.

    Raises:
        ValueError: The folder holds a run of something else.
    """

    def __init__(self, folder: Path, identity: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / NAME
        lines, whole = _whole_lines(self.path)
        there, records = _split(lines)
        merged = identity if there is None else _merged(self.path, there, identity)
        if self.path.exists() and self.path.stat().st_size > whole:
            os.truncate(self.path, whole)  # drops a last line that was cut off
        if merged != there:
            _append(self.path, {"run": merged})
        self._records = {record.key: record for record in records}

    def __contains__(self, key: tuple[str, int, int, str]) -> bool:
        return key in self._records

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records.values())

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: Record) -> None:
        """Stores a record, also on disk."""
        _append(self.path, record._asdict())
        self._records[record.key] = record


def read(folder: Path) -> tuple[dict[str, Any], list[Record]]:
    """The identity of the run in a folder, and its records."""
    there, records = _split(_whole_lines(folder / NAME)[0])
    if there is None:
        raise ValueError(f"{folder} holds no run")
    return there, records


def _append(path: Path, line: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _whole_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The lines of a file, without a last one that was cut off, and how many bytes they are.

    Raises:
        ValueError: It is a file of something else, or damaged.
    """
    data = path.read_bytes() if path.exists() else b""
    if not START.startswith(data[: len(START)]):
        raise ValueError(f"{path} is not a file of results: choose another folder")
    whole = data.rfind(b"\n") + 1
    lines = []
    for number, line in enumerate(data[:whole].splitlines(), 1):
        try:
            lines.append(json.loads(line))
        except ValueError:
            raise ValueError(f"line {number} of {path} is damaged: delete it, and the same command resumes") from None
    return lines, whole


def _split(lines: list[dict[str, Any]]) -> tuple[dict[str, Any] | None, list[Record]]:
    """The identity of the run, from the last line that has it, and the records."""
    runs = [line["run"] for line in lines if "run" in line]
    return runs[-1] if runs else None, [Record(**line) for line in lines if "run" not in line]


def _merged(path: Path, there: dict[str, Any], identity: dict[str, Any]) -> dict[str, Any]:
    """The identity of both runs; indexers that only one of them has are no contradiction."""
    old, new = (_flat(each) for each in (there, identity))
    for name in sorted(old.keys() & new.keys()):
        if old.get(name) != new.get(name):
            raise ValueError(
                f"{path} has results with {name} = {old.get(name)!r}, and this run has {new.get(name)!r}: "
                f"choose another folder, or delete that one"
            )
    return {**identity, "indexers": {**there.get("indexers", {}), **identity.get("indexers", {})}}


def _flat(identity: dict[str, Any]) -> dict[str, Any]:
    """The digests of indexers beside all else."""
    rest = {name: value for name, value in identity.items() if name != "indexers"}
    return {**rest, **{f"indexers {name}": digest for name, digest in identity.get("indexers", {}).items()}}
