"""The report of a run: ``report.md`` for people, ``report.json`` for programs, and plots."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from streamkl.evaluation import records as files
from streamkl.evaluation.methods import DENSE
from streamkl.evaluation.statistics import Estimate
from streamkl.evaluation.summary import Figure, Gap, LayerFigure, figures, gaps, layer_figures

TITLES = {
    "needle": "Needle: a number hidden in prose, asked for at the end",
    "multikey": "Multi-key needle: several numbers are hidden, one is asked for",
    "tracking": "Variable tracking: a value handed on from variable to variable",
    "perplexity": "Perplexity of passages",
}
GAPS = {
    "oracle": "oracle gap: dense attention to the oracle's per-query top-k (the budget)",
    "indexer": "indexer gap: the oracle's keys to those that an indexer predicts (the prediction)",
    "realization": "realization gap: per-query top-k to top-k shared by a query block (the sharing)",
}


class Table(NamedTuple):
    """Names of columns, and the cells of each row."""

    head: list[str]
    rows: list[list[str]]


class Report(NamedTuple):
    """The files of a report, with plots if there is matplotlib; and its tables, by task."""

    files: list[Path]
    tables: dict[str, Table]


def write(folder: Path, facts: dict[str, str]) -> Report:
    """Writes the report of the run in a folder.

    Args:
        folder: Holds ``results.jsonl``.
        facts: The machine of the run.
    """
    run, records = files.read(folder)
    shown, lost, layers = figures(records), gaps(records), layer_figures(records)
    try:
        from streamkl.evaluation import plots
    except ImportError:
        pictures: list[Path] = []
    else:
        pictures = plots.draw(folder, shown, lost, layers, f"{run.get('model', '')}, {run['dtype']}, {where(facts)}")
    data = {
        "run": run,
        "machine": facts,
        "figures": [figure._replace(method=figure.method.name)._asdict() for figure in shown],  # pyright: ignore
        "gaps": [gap._asdict() for gap in lost],
        "layers": [figure._replace(method=figure.method.name)._asdict() for figure in layers],  # pyright: ignore
    }
    (folder / "report.json").write_text(json.dumps(_plain(data), indent=1) + "\n", encoding="utf-8")
    tables = {task: _table([f for f in shown if f.task == task]) for task in dict.fromkeys(f.task for f in shown)}
    (folder / "report.md").write_text(markdown(run, facts, tables, lost, layers, pictures), encoding="utf-8")
    return Report([folder / "report.md", folder / "report.json", *pictures], tables)


def markdown(
    run: dict[str, Any], facts: dict[str, str], tables: dict[str, Table], lost: list[Gap], layers: list[LayerFigure],
    pictures: list[Path],
) -> str:  # fmt: skip
    """The page."""
    there = {path.stem: path.name for path in pictures}
    lines = [f"# Sparse attention in {run.get('model', 'a model')}", ""]
    lines += [
        f"{run['dtype']}, seed {run['seed']}, {run['decode']} decoding; {where(facts)}.", "",
        "Every method was run on the same contexts. Answers are generated greedily. Intervals are of 95%: Wilson's for "
        "a rate, Newcombe's for the difference of two rates on the same contexts, Student's over passages for "
        "perplexity. The time is the median of the prefills, on this machine.", "",
    ]  # fmt: skip
    if "frontier" in there:
        lines += [f"![Quality against time to first token]({there['frontier']})", ""]
    if "quality" in there:
        lines += [f"![Quality against budget]({there['quality']})", ""]
    for task, table in tables.items():
        lines += [f"## {TITLES.get(task, task)}", "", *_markdown(table.head, table.rows), ""]
        if task == "perplexity":
            lines += [
                f"The queries of a block share their top-k, so a later query can select keys for an earlier one whose "
                f"next token is scored. The last query of a block has none after it: `last rows` is of only every "
                f"{run['largest_query_block']}th row, the same rows for every method.", "",
            ]  # fmt: skip
    if lost:
        lines += ["## Gaps", "", *(f"- {text}" for text in GAPS.values()), "", *_gap_table(lost), ""]
        if "gaps" in there:
            lines += [f"![Gaps]({there['gaps']})", ""]
    if layers:
        lines += ["## Layers", "", *_layer_table(layers), ""]
        lines += [f"![Recall and mass, layer by layer]({there['layers']})", ""] if "layers" in there else []
    return "\n".join(lines)


def where(facts: dict[str, str]) -> str:
    """The machine, in a line."""
    return ", ".join(
        text for text in (facts.get("device"), facts.get("threads"), f"torch {facts.get('torch', '')}") if text
    )


def _table(shown: list[Figure]) -> Table:
    """A row per length and method of one task."""
    is_rate = shown[0].change_last is None
    head = ["tokens", "method", *(("contexts", "right") if is_rate else ("passages", "perplexity"))]
    head += ["against dense", "first token"]
    if not is_rate:
        head.insert(5, "against dense, last rows")
    rows = []
    for f in shown:
        is_dense = f.method == DENSE
        row = [f"{f.length:,}", f.method.name, str(f.contexts), _rate(f.quality) if is_rate else _number(f.quality)]
        row.append("" if is_dense else _points(f.change) if is_rate else _percent(f.change))
        if f.change_last is not None:
            row.append("" if is_dense else _percent(f.change_last))
        rows.append([*row, f"{f.seconds:.2f} s"])
    return Table(head, rows)


def _gap_table(lost: list[Gap]) -> list[str]:
    rows = [
        [
            g.kind,
            g.task,
            f"{g.length:,}",
            g.better,
            g.worse,
            _loss(g.loss, "%" if g.task == "perplexity" else " points"),
        ]
        for g in sorted(lost, key=lambda gap: (list(GAPS).index(gap.kind), gap.length, gap.topk))
    ]
    return _markdown(["gap", "task", "tokens", "from", "to", "lost"], rows)


def _layer_table(layers: list[LayerFigure]) -> list[str]:
    rows = []
    for f in layers:
        row = [f"{f.length:,}", f.method.name, str(f.contexts)]
        for values in (f.recall, f.mass):
            lowest = min(values, key=values.__getitem__)
            row += [f"{sum(values.values()) / len(values):.3f}", f"{values[lowest]:.3f} (layer {lowest})"]
        rows.append(row)
    head = ["tokens", "method", "passages", "recall", "lowest", "mass", "lowest"]
    return [
        "The last queries of passages, on the queries and keys of the dense model: the share of the oracle's keys that "
        "a method selects (recall), and the share of attention on selected keys (mass), means over layers.", "",
        *_markdown(head, rows),
    ]  # fmt: skip


def _markdown(head: list[str], rows: list[list[str]]) -> list[str]:
    is_number = [all(cell[:1] in "+-0123456789" for cell in column) for column in zip(*rows, strict=True)]
    marks = ["---:" if right else "---" for right in is_number]
    return [f"| {' | '.join(row)} |" for row in (head, marks, *rows)]


def _rate(e: Estimate) -> str:
    return f"{100 * e.value:.1f}% [{100 * e.low:.1f}, {100 * e.high:.1f}]"


def _points(e: Estimate) -> str:
    return f"{100 * e.value:+.1f} points [{100 * e.low:+.1f}, {100 * e.high:+.1f}]"


def _number(e: Estimate) -> str:
    return f"{e.value:.2f}{_interval(e, '.2f')}"


def _percent(e: Estimate) -> str:
    return f"{100 * e.value:+.2f}%{_interval(e.scaled(100), '+.2f')}"


def _loss(e: Estimate, unit: str) -> str:
    return f"{e.value:.2f}{unit}{_interval(e, '.2f')}"


def _interval(e: Estimate, form: str) -> str:
    """The interval; empty for a mean of one value, which has none."""
    return f" [{e.low:{form}}, {e.high:{form}}]" if math.isfinite(e.low) and math.isfinite(e.high) else ""


def _plain(value: Any) -> Any:
    """A value for JSON: named tuples as objects, and ``None`` for numbers that JSON does not have."""
    if isinstance(value, Estimate):
        return _plain(value._asdict())
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
