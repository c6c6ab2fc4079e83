"""The table of mutations fits the sources and the tests; `make mutants` runs it."""

import importlib.util
import re
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def runner() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutants", Path(__file__).with_name("run.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_mutation_applies_exactly_once_and_its_tests_exist(runner: ModuleType) -> None:
    reasons = {mutant.name: runner.stale(mutant) for mutant in runner.table()}
    assert not {name: reason for name, reason in reasons.items() if reason}


def test_every_mutation_has_a_name_of_its_own_and_each_language_has_some(runner: ModuleType) -> None:
    mutants = runner.table()
    assert not [name for name, count in Counter(mutant.name for mutant in mutants).items() if count > 1]
    counts = Counter(mutant.language for mutant in mutants if not mutant.equivalent)
    assert counts.total() >= 60
    assert min(counts[language] for language in ("Python", "C++", "Triton")) >= 10


def test_a_row_that_does_not_fit_is_told(runner: ModuleType) -> None:
    row = next(mutant for mutant in runner.table() if mutant.file == "state.py")
    assert runner.stale(row) is None
    for change, reason in (
        ({"file": "none.py"}, "there is no none.py"),
        ({"find": "no such text"}, "state.py has its text 0 times"),
        ({"find": "self"}, "state.py has its text [0-9]+ times"),
        ({"replace": row.find}, "it changes nothing"),
        ({"tests": ()}, "it names no test"),
        ({"tests": ("tests/test_state.py::test_none",)}, "there is no tests/test_state.py::test_none"),
        ({"tests": ("tests/none.py::test_none",)}, "there is no tests/none.py::test_none"),
    ):
        assert re.match(reason, runner.stale(row._replace(**change))), change


def test_the_copy_alone_is_mutated(runner: ModuleType) -> None:
    row = next(mutant for mutant in runner.table() if mutant.file == "state.py")
    before = (runner.SOURCES / row.file).read_text()
    with runner.mutated(row) as copy:
        after = (copy / "streamkl" / row.file).read_text()
        assert after == before.replace(row.find, row.replace) != before
    assert (runner.SOURCES / row.file).read_text() == before
    assert not copy.exists()
