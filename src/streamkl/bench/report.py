"""Tables and figures from the records of a suite.

Ratios are ratios of medians. A backward is the median of forward and backward less that of the forward alone, so that
no work can hide in the other half.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from streamkl.bench.cells import Cell
from streamkl.bench.records import Record

COST_BASELINES = ("sdpa", "products", "plain", "student")
"""Baselines that compute something else: StreamKL is given as a fraction of their time. Others are given in multiples
of StreamKL's time."""

STEADY = 0.15
"""How far a baseline may move between the parts of a run (`Record.drift`) for a headline to be made of it.
Tables have every cell, with its spread."""

PARTS = {"forward": ("forward",), "backward": ("forward", "training"), "training": ("training",)}
"""The directions that each part of `speedups` is made of."""

Times = dict[tuple[str, int], Record]
"""The records of a cell, by implementation and threads."""


@dataclass
class Table:
    """A title, column names, and rows of text."""

    title: str
    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)

    def markdown(self) -> str:
        """The table for a page."""
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        return f"{self.title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)


def suites(records: Iterable[Record]) -> dict[str, list[Record]]:
    """The records of each suite."""
    return dict(_groups(records, lambda r: r.suite))


def by_cell(records: Iterable[Record]) -> dict[Cell, Times]:
    """The records of each cell."""
    cells: dict[Cell, Times] = {}
    for record in records:
        cells.setdefault(record.cell, {})[record.implementation, record.threads] = record
    return cells


def detailed(records: list[Record]) -> Iterator[Table]:
    """For each direction and dtype a table with a row per cell and implementation, for a terminal."""
    for kind, group in _groups(records, _kind):
        table = Table(kind, ["", "", "ms", "spread", "ours / it", "MB added", "error"])
        name_of = _namer(group)
        for cell, times in by_cell(group).items():
            for n, ((name, threads), record) in enumerate(times.items()):
                ours = times.get(("streamkl", threads))
                row = ["" if n else cell_name(cell), name_of(name, threads)]
                row.append(_number(record.median * 1e3) if record.seconds else "-")
                row.append(_number(record.spread * 1e3) if len(record.seconds) > 1 else "")
                row.append("" if ours is None or record is ours else _number(_over(ours, record)))
                row.append(_megabytes(record.extra_bytes))
                row.append("" if record.error is None else f"{record.error:.1e}")
                table.rows.append(row)
        yield table


def compact(records: list[Record]) -> Iterator[Table]:
    """For each direction and dtype a table with a row per cell, for a page."""
    for kind, group in _groups(records, _kind):
        entries = list(dict.fromkeys((r.implementation, r.threads) for r in group if r.seconds))
        name_of = _namer(group)
        others = [name for name, _ in entries if name != "streamkl"] if len({n for _, n in entries}) == 1 else []
        ratios = [("streamkl", name) if name in COST_BASELINES else (name, "streamkl") for name in others]
        columns = ["tokens x heads x dim", *(f"{name_of(*entry)}, ms (spread)" for entry in entries)]
        table = Table(kind, [*columns, *map(" / ".join, ratios), "MB added"])
        for cell, times in by_cell(group).items():
            found = [times.get(entry) for entry in entries]
            row = [cell_name(cell), *(_milliseconds(r) for r in found)]
            row += [_number(ratio(times, *pair)) for pair in ratios]
            ours = [r.extra_bytes for (name, _), r in times.items() if name == "streamkl"]
            table.rows.append([*row, _megabytes(ours[-1]) if ours else ""])
        yield table


def where(records: list[Record]) -> str:
    """The machine, the software and the commit."""
    facts = records[-1].machine
    threads = " and ".join(dict.fromkeys(threads_name(record.threads) for record in records))
    engines = ", ".join(dict.fromkeys(record.engine for record in records if record.engine))
    software = f"torch {facts.get('torch', 'unknown')}, engine {engines or 'unknown'} ({facts.get('capability', '')})"
    return f"{facts.get('device', 'unknown device')}, {threads}, {software}, commit {facts.get('commit') or 'unknown'}"


def where_briefly(machine: dict[str, str], threads: int) -> str:
    """The machine in a few words, for a plot."""
    return f"{machine.get('device', '')}, {threads_name(threads)}, torch {machine.get('torch', '')}"


def skipped(records: list[Record]) -> list[str]:
    """Which implementations did not run where, and why: a line per reason."""
    cells: dict[tuple[str, str], list[Cell]] = {}
    for r in records:
        if r.skipped is not None:
            cells.setdefault((r.implementation, r.skipped), []).append(r.cell)
    return [
        f"{name} left out of {of[0] if len(of) == 1 else f'{len(of)} cells'}: {reason}"
        for (name, reason), of in cells.items()
    ]


def summary(records: list[Record]) -> list[str]:
    """The figures of a suite, one per line."""
    lines = []
    for kind, group in _groups(records, _kind):
        cells = by_cell(group)
        lines += _ratios(f"{kind}: streamkl / sdpa", cells, "streamkl", "sdpa")
        lines += _ratios(f"{kind}: streamkl / products", cells, "streamkl", "products")
        for dim in sorted({cell.dims[0] for cell in cells}):
            at_dim = {cell: times for cell, times in cells.items() if cell.dims[0] == dim}
            if len(at_dim) < len(cells):
                lines += _ratios(f"{kind}: streamkl / products at D = {dim}", at_dim, "streamkl", "products")
        for name in ("composed", "chunked", "compiled"):
            lines += _ratios(f"{kind}: {name} / streamkl", cells, name, "streamkl")
        lines += _threading(kind, cells)
        lines += _indexers(cells)
    return lines + _against_eager(by_cell(records)) + _growth(records)


def ratio(times: Times, one: str, other: str) -> float | None:
    """Median over median, on the same threads; ``None`` where one of them did not run."""
    for (name, threads), record in times.items():
        if name == one and (other, threads) in times:
            return _over(record, times[other, threads])
    return None


def speedups(cells: dict[Cell, Times], name: str = "eager") -> dict[Cell, dict[str, float]]:
    """How many times faster StreamKL is, by the forward's cell: ``forward``, ``training`` and ``backward``."""
    found: dict[Cell, dict[str, float]] = {}
    for cell, times in cells.items():
        forward = replace(cell, direction="forward")
        here = found.setdefault(forward, {})
        if (value := ratio(times, name, "streamkl")) is not None:
            here[cell.direction] = value
        if cell.direction == "training":
            theirs, ours = (_backward(times, cells.get(forward, {}), who) for who in (name, "streamkl"))
            if theirs and ours:
                here["backward"] = theirs / ours
    return {cell: values for cell, values in found.items() if values}


def cell_name(cell: Cell) -> str:
    """The name of a cell without its direction and dtype."""
    return f"{cell.tokens:,} x {cell.layout} {cell.mask}"


def threads_name(n: int) -> str:
    """The number of threads in words."""
    return "1 thread" if n == 1 else f"{n} threads"


def _backward(training: Times, forward: Times, name: str) -> float | None:
    """Seconds that the backward adds; ``None`` where they cannot be distinguished from noise."""
    for key, record in training.items():
        if key[0] == name and key in forward and record.seconds and forward[key].seconds:
            added = record.median - forward[key].median
            return added if added > 0 else None
    return None


def _headline(title: str, values: dict[Cell, float], baselines: dict[Cell, list[Record]], told: str) -> list[str]:
    """The line of a figure: ``told`` after its title, or why not, if a baseline moved during the run in some cell."""
    if not values:
        return []
    worst = max(((r.drift, r.implementation, cell) for cell in values for r in baselines[cell]), key=lambda x: x[0])
    moved, name, cell = worst
    if moved <= STEADY:
        return [f"{title}: {told}"]
    return [
        f"{title}: no headline, for {name} moved by {100 * moved:.3g}% during the run at {cell_name(cell)}; "
        f"{STEADY:.0%} is allowed"
    ]


def _ratios(title: str, cells: dict[Cell, Times], one: str, other: str) -> list[str]:
    if any(len({threads for _, threads in times}) > 1 for times in cells.values()):
        return []
    values = {cell: value for cell, times in cells.items() if (value := ratio(times, one, other)) is not None}
    baseline = one if other == "streamkl" else other
    return _headline(title, values, {cell: _of(cells[cell], baseline) for cell in values}, _range(values))


def _threading(kind: str, cells: dict[Cell, Times]) -> list[str]:
    """The speed-up by more threads, relative to the fewest."""
    lines = []
    counts = sorted({threads for times in cells.values() for _, threads in times})
    for name in dict.fromkeys(name for times in cells.values() for name, _ in times):
        values, baselines = {}, {}
        for cell, times in cells.items():
            few, many = (times.get((name, n)) for n in (counts[0], counts[-1]))
            if few is not many and few is not None and many is not None and (value := _over(few, many)) is not None:
                values[cell], baselines[cell] = value, [few]
        title = f"{kind}: speed-up of {name} by {threads_name(counts[-1])} instead of {counts[0]}"
        lines += _headline(title, values, baselines, _range(values))
    return lines


def _against_eager(cells: dict[Cell, Times]) -> list[str]:
    lines = []
    found = {cell: values for cell, values in speedups(cells).items() if "forward" in values}
    for dim in sorted({cell.dims[0] for cell in found}, reverse=True):
        for part, directions in PARTS.items():
            values = {c: v[part] for c, v in found.items() if part in v and c.dims[0] == dim}
            baselines = {
                c: [r for d in directions for r in _of(cells[replace(c, direction=d)], "eager")] for c in values
            }
            told = ", ".join(f"{_number(value)}x at {c.tokens:,}" for c, value in values.items())
            lines += _headline(f"eager / streamkl, {part}, D = {dim}", values, baselines, told)
    return lines


def _indexers(cells: dict[Cell, Times]) -> list[str]:
    """The cost of an indexer's step, cell by cell: the cells are too different for a mean."""
    lines = []
    for cell, times in cells.items():
        if not cell.indexer:
            continue
        for name, threads in times:
            if name == "streamkl":
                continue
            one, other = ("streamkl", name) if name in COST_BASELINES else (name, "streamkl")
            value = ratio(times, one, other)
            if value is None:
                continue
            title = f"{cell_name(cell)}: {one} / {other}"
            lines += _headline(title, {cell: value}, {cell: _of(times, name)}, _number(value))
            added, ours = (times[who, threads].extra_bytes for who in (name, "streamkl"))
            if added and ours:
                memory = f"{name} adds {_megabytes(added)} MB, streamkl {_megabytes(ours)} MB"
                lines.append(f"{cell_name(cell)}: {memory}, {_number(added / ours)}x less")
    return lines


def _growth(records: list[Record]) -> list[str]:
    """Time and memory of cells that ran once, in a process of their own."""
    lines = []
    before = None
    for r in records:
        if r.implementation != "streamkl" or len(r.seconds) != 1 or r.resident_bytes is None:
            continue
        line = f"{r.cell}: {r.median:,.1f} s, {_megabytes(r.resident_bytes)} MB resident"
        if before is not None and before.cell.tokens < r.cell.tokens:
            times, work = r.median / before.median, r.cell.pairs / before.cell.pairs
            line += f", {times:.2f}x the time of {before.cell.tokens:,} tokens for {work:.2f}x the work"
        lines.append(line)
        before = r
    return lines


def _over(one: Record, other: Record) -> float | None:
    return one.median / other.median if one.seconds and other.seconds else None


def _of(times: Times, name: str) -> list[Record]:
    """The records of an implementation that ran."""
    return [record for (who, _), record in times.items() if who == name and record.seconds]


def _milliseconds(record: Record | None) -> str:
    """Median and spread for a table."""
    if record is None or not record.seconds:
        return "-"
    spread = f" ({_number(record.spread * 1e3)})" if len(record.seconds) > 1 else ""
    return _number(record.median * 1e3) + spread


def _range(values: dict[Cell, float]) -> str:
    """The mean over cells, and the ends."""
    if not values:
        return ""
    mean = statistics.geometric_mean(values.values())
    if len(values) == 1:
        return _number(mean)
    low, high = min(values, key=values.__getitem__), max(values, key=values.__getitem__)
    ends = " to ".join(f"{_number(values[cell])} ({cell_name(cell)})" for cell in (low, high))
    return f"{_number(mean)} in the geometric mean of {len(values)} cells, {ends}"


def _kind(record: Record) -> str:
    return f"{record.cell.direction}, {record.cell.dtype}"


def _groups(records: Iterable[Record], kind: Callable[[Record], str]) -> Iterator[tuple[str, list[Record]]]:
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(kind(record), []).append(record)
    yield from groups.items()


def _namer(records: list[Record]) -> Callable[[str, int], str]:
    """Names an implementation, with its threads where they differ."""
    several = len({record.threads for record in records}) > 1
    return lambda name, threads: f"{name}, {threads_name(threads)}" if several else name


def _number(value: float | None) -> str:
    """Three significant digits, or all digits before the point."""
    if value is None:
        return ""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value >= 0.01 or value == 0 else f"{value:.1e}"


def _megabytes(count: int | None) -> str:
    return "" if count is None else f"{count / 1e6:,.1f}"
