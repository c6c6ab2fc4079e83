"""Mutation testing: breaks the sources in small ways, one at a time, and asks the closest tests to notice.

``table.toml`` has a row for each mutation. The checkout is never changed: a mutation is made in a copy of ``src``, and
the tests run with ``PYTHONPATH`` there. C++ is compiled by the engine's own build, in a cache that is kept from one run
to the next. ``docs/testing.md`` says how to add a row.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest needs it there

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src" / "streamkl"
TABLE = Path(__file__).with_name("table.toml")
BUILD = "from streamkl.engines.cpu import build; build.build()"
LANGUAGES = ("Python", "C++", "Triton")
GOOD = ("caught", "caught by the time limit", "caught by a crash", "equivalent")
SEEDS = 240
"""How many seeded problems a row may choose from, by their numbers."""


class Mutant(NamedTuple):
    """A row of the table.

    Attributes:
        name: What the sources do wrong, unique.
        file: What is mutated, below ``src/streamkl``.
        find: Text that the file has exactly once.
        replace: What stands in its place.
        tests: Node ids of the closest tests, at least one of which must fail.
        equivalent: Why no test can notice; empty if one must.
    """

    name: str
    file: str
    find: str
    replace: str
    tests: tuple[str, ...]
    equivalent: str = ""

    @property
    def language(self) -> str:
        """Of the file."""
        if self.file.endswith((".cpp", ".h")):
            return "C++"
        return "Triton" if self.file.startswith("engines/triton/kernels/") else "Python"


class Outcome(NamedTuple):
    """What became of a mutation, and the end of what the tests, or the compiler, said."""

    verdict: str
    seconds: float = 0.0
    output: str = ""


def table(path: Path = TABLE) -> list[Mutant]:
    """The rows of the table."""
    rows = tomllib.loads(path.read_text())["mutant"]
    return [Mutant(**{**row, "tests": tuple(row["tests"])}) for row in rows]


def stale(mutant: Mutant) -> str | None:
    """Why a row does not fit the sources and the tests any more, or ``None``."""
    path = SOURCES / mutant.file
    if not path.is_file():
        return f"there is no {mutant.file}"
    count = path.read_text().count(mutant.find)
    if count != 1:
        return f"{mutant.file} has its text {count} times, and should have it once"
    if mutant.find == mutant.replace:
        return "it changes nothing"
    if not mutant.tests and not mutant.equivalent:
        return "it names no test"
    missing = [test for test in mutant.tests if test.split("::")[-1].split("[")[0] not in _functions(test)]
    return f"there is no {' nor '.join(missing)}" if missing else None


def _functions(test: str) -> frozenset[str]:
    return _functions_of(ROOT / test.split("::")[0])


@functools.cache
def _functions_of(path: Path) -> frozenset[str]:
    """The tests that a file defines."""
    nodes = ast.walk(ast.parse(path.read_text())) if path.is_file() else ()
    return frozenset(node.name for node in nodes if isinstance(node, ast.FunctionDef))


@contextlib.contextmanager
def mutated(mutant: Mutant | None) -> Iterator[Path]:
    """A copy of ``src``, mutated; its modules are compiled already where the checkout's are."""
    with tempfile.TemporaryDirectory(prefix="streamkl-mutant-") as folder:
        copy = Path(folder) / "src"
        shutil.copytree(ROOT / "src", copy)
        if mutant is not None:
            path = copy / "streamkl" / mutant.file
            path.write_text(path.read_text().replace(mutant.find, mutant.replace))
        yield copy


def build(mutant: Mutant | None = None) -> str | None:
    """Builds the CPU engine of the sources, mutated or not, so that no test has to; says what went wrong."""
    with mutated(mutant) as copy:
        built = subprocess.run(
            [sys.executable, "-c", BUILD], env={**os.environ, **_environment(copy)}, capture_output=True, text=True
        )
    return None if built.returncode == 0 else built.stderr


def run(mutant: Mutant, limit: float) -> Outcome:
    """Makes a mutation and runs the closest tests."""
    if mutant.equivalent:
        return Outcome("equivalent")
    if mutant.language == "C++" and (failed := build(mutant)) is not None:
        return Outcome("does not compile", output=failed)
    with mutated(mutant) as copy:
        code, output, seconds = _test(copy, mutant.tests, limit)
    verdict = {0: "survived", 1: "caught", None: "caught by the time limit"}.get(code)
    if verdict is None:
        verdict = "caught by a crash" if code is not None and code < 0 else "tests did not run"
    return Outcome(verdict, seconds, output)


def unmutated(tests: list[str], limit: float) -> Outcome:
    """Runs the tests of all rows on the sources as they are."""
    with mutated(None) as copy:
        code, output, seconds = _test(copy, tests, limit)
    return Outcome("passed" if code == 0 else "failed", seconds, output)


def _test(copy: Path, tests: Sequence[str], limit: float) -> tuple[int | None, str, float]:
    """Runs tests on a copy: pytest's exit code, ``None`` past the time limit, what it printed, and the seconds.

    They run in a fork of a process that has imported torch, which takes longer than most of them.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "torch"])
    start, log = time.monotonic(), copy.parent / "log.txt"
    process = context.Process(target=_test_in_fork, args=(copy, list(tests), log))
    process.start()
    assert process.pid is not None
    try:
        process.join(limit)
    finally:
        code = process.exitcode
        if code is None:
            os.killpg(process.pid, signal.SIGKILL)  # and what the tests started
            process.join()
    return code, log.read_text(errors="replace"), time.monotonic() - start


def _test_in_fork(copy: Path, tests: list[str], log: Path) -> None:
    import pytest

    os.setsid()
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(_environment(copy))
    os.chdir(ROOT)
    sys.path.insert(0, str(copy))
    plugins = ("no:cacheprovider", "no:hypothesispytest", "no:anyio")  # which take longer than most tests
    options = ("-x", "-q", f"--fuzz-seeds={SEEDS}", *(f"-p{plugin}" for plugin in plugins))
    sys.exit(pytest.main([*options, *tests]))


def _environment(copy: Path) -> dict[str, str]:
    """For tests, and what they start, to find the copy, and a cache that is kept."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return {"STREAMKL_CACHE": str(caches / "streamkl-mutants"), "PYTHONPATH": str(copy)}


def _tell(number: int, count: int, mutant: Mutant, outcome: Outcome, verbose: bool) -> None:
    took = f"{outcome.seconds:6.1f} s" if outcome.seconds else " " * 8
    print(f"[{number:3}/{count}] {took}  {outcome.verdict}: {mutant.name} ({mutant.file})", flush=True)
    if outcome.verdict not in GOOD:
        print(f"    - {mutant.find}\n    + {mutant.replace}\n    {' '.join(mutant.tests)}", flush=True)
    if outcome.verdict not in (*GOOD, "survived") or verbose:
        print(outcome.output[-4000:], flush=True)


def _summary(mutants: list[Mutant], outcomes: dict[Mutant, Outcome]) -> bool:
    """Prints the counts; returns whether all is well."""
    print()
    for language in LANGUAGES:
        verdicts = Counter(outcomes[m].verdict for m in mutants if m in outcomes and m.language == language)
        told = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common())
        print(f"{language}: {sum(verdicts.values())} mutations" + (f": {told}" if told else ""))
    bad = [m for m in mutants if m in outcomes and outcomes[m].verdict not in GOOD]
    for mutant in bad:
        print(f"{outcomes[mutant].verdict}: {mutant.name} ({mutant.file})")
    return not bad


def main() -> int:
    """Runs the rows that the command line names; 0 if every mutation that is not equivalent was caught."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("only", nargs="*", help="rows whose name or file contains one of these; all if none is given")
    parser.add_argument("--from", dest="first", type=int, default=1, metavar="N", help="start with the N-th of them")
    parser.add_argument("--language", choices=LANGUAGES, help="those in this language alone")
    parser.add_argument("--jobs", type=int, default=1, help="how many rows at a time")
    parser.add_argument("--limit", type=float, default=300, help="seconds that the tests of a row may take")
    parser.add_argument("--list", action="store_true", help="print the rows and stop")
    parser.add_argument("--unchecked", action="store_true", help="do not run the unmutated tests first")
    parser.add_argument("--verbose", action="store_true", help="print what the tests said")
    options = parser.parse_args()
    chosen = [m for m in table() if options.language in (None, m.language)]
    chosen = [m for m in chosen if not options.only or any(o in m.name or o in m.file for o in options.only)]
    if options.list:
        for number, mutant in enumerate(chosen, 1):
            print(f"[{number:3}/{len(chosen)}] {mutant.language}: {mutant.name} ({mutant.file})")
        return 0
    reasons = {mutant: stale(mutant) for mutant in chosen}
    for mutant, reason in reasons.items():
        if reason:
            print(f"stale: {mutant.name}: {reason}")
    if any(reasons.values()):
        return 1
    mutants = chosen[options.first - 1 :]
    build()
    if not options.unchecked:
        tests = list(dict.fromkeys(test for mutant in mutants if not mutant.equivalent for test in mutant.tests))
        outcome = unmutated(tests, 3600)
        print(f"unmutated, the tests of {len(mutants)} rows {outcome.verdict} in {outcome.seconds:.0f} s", flush=True)
        if outcome.verdict != "passed":
            print(outcome.output[-4000:])
            return 1
    outcomes: dict[Mutant, Outcome] = {}
    pool = ThreadPoolExecutor(options.jobs)
    try:
        futures = {pool.submit(run, mutant, options.limit): mutant for mutant in mutants}
        for future in as_completed(futures):
            mutant = futures[future]
            outcomes[mutant] = future.result()
            _tell(chosen.index(mutant) + 1, len(chosen), mutant, outcomes[mutant], options.verbose)
    finally:
        pool.shutdown(cancel_futures=True)
    return 0 if _summary(mutants, outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
