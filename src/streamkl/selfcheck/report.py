"""One JSON and one Markdown file of what a selfcheck found."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from streamkl.bench import report
from streamkl.bench.records import Record
from streamkl.selfcheck.checks import Outcome


def write(path: Path, facts: dict[str, str], outcomes: list[Outcome], records: list[Record]) -> tuple[Path, Path]:
    """Writes ``path.json`` and ``path.md``, and returns them."""
    data, page = path.with_suffix(".json"), path.with_suffix(".md")
    lines = [json.loads(record.to_json()) for record in records]
    data.write_text(
        json.dumps({"machine": facts, "checks": [asdict(o) for o in outcomes], "timings": lines}, indent=1) + "\n"
    )
    page.write_text(markdown(facts, outcomes, records))
    return data, page


def markdown(facts: dict[str, str], outcomes: list[Outcome], records: list[Record]) -> str:
    """The report as a page."""
    lines = ["# streamkl selfcheck", ""]
    lines += [f"- {name}: {value}" for name, value in facts.items() if value]
    lines += ["", "| check | | |", "| --- | --- | --- |"]
    lines += [f"| {o.name} | {'passed' if o.passed else '**failed**'} | {o.figure} |" for o in outcomes]
    for outcome in outcomes:
        lines += ["", f"Failures of {outcome.name}:", "", *(f"- {failure}" for failure in outcome.failures)] * bool(
            outcome.failures
        )
    if records:
        lines += ["", "## Timings", "", f"Measured here: {report.where(records)}.", ""]
        for table in report.compact(records):
            lines += [table.markdown(), ""]
        lines += [f"- {line}" for line in report.skipped(records)]
    elif not all(o.passed for o in outcomes):
        lines += ["", "No timings: a check failed."]
    return "\n".join(lines).rstrip() + "\n"
