"""The guard against regressions: what it compares, when it measures again, and when it fails."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from streamkl.bench import guard
from streamkl.bench.cells import Cell
from streamkl.cli import bench as commands


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[float]]:
    """The ratios that are measured, by name, one after another; the last one again and again."""
    found = {name: [2.0] for name in guard.GUARDED}

    def measure(names: Iterable[str], seconds: float) -> dict[str, float]:
        return {name: found[name].pop(0) if len(found[name]) > 1 else found[name][0] for name in names}

    monkeypatch.setattr(guard, "measure", measure)
    monkeypatch.setattr(guard, "AGAIN", (0.0, 0.0, 0.0))
    return found


def test_a_ratio_is_the_median_over_rounds_of_our_time_over_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {name: guard.Guarded(Cell.square(1, 32, 16), beside) for name, beside in (("a", "sdpa"), ("b", "products"))}
    monkeypatch.setattr(guard, "GUARDED", small)
    times = {("a", "streamkl"): [3.0, 8.0, 3.0], ("a", "sdpa"): [1.0, 2.0, 2.0],
             ("b", "streamkl"): [1.0, 1.0, 1.0], ("b", "products"): [4.0, 4.0, 2.0]}  # fmt: skip

    def alternate(calls, budget):
        assert list(calls) == list(times)
        for call in calls.values():
            call()
        return times

    monkeypatch.setattr(guard, "alternate", alternate)
    assert guard.measure(small, 1.0) == {"a": 3.0, "b": 0.25}


def test_the_table_has_a_ratio_for_every_guarded_call_and_no_other() -> None:
    table = guard.read(guard.TABLE)
    assert table
    assert all(set(row) == set(guard.GUARDED) for row in table.values())


def test_amx_has_a_row_of_its_own_unless_onednn_is_held_to_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    assert guard.instruction_set().endswith(", AMX")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    assert not guard.instruction_set().endswith(", AMX")


def test_gradients_of_all_kinds_are_guarded() -> None:
    assert {beside for _, beside in guard.GUARDED.values()} == {"sdpa", "products"}
    assert {cell.direction for cell, _ in guard.GUARDED.values()} == {"forward", "training", "training-both"}


def test_what_is_beyond_the_band_is_measured_again_and_its_least_ratio_counts(clock) -> None:
    slow, noisy = list(guard.GUARDED)[:2]
    clock[slow], clock[noisy] = [2.8, 2.7, 2.9, 2.8], [9.0, 2.1]
    verdicts = {v.name: v for v in guard.check(dict.fromkeys(guard.GUARDED, 2.0), 1.25, 1.0)}
    assert verdicts[slow] == guard.Verdict(slow, 2.7, 2.0, 4)
    assert verdicts[noisy] == guard.Verdict(noisy, 2.1, 2.0, 2)
    assert all(v.tries == 1 for name, v in verdicts.items() if name not in (slow, noisy))
    assert [name for name, v in verdicts.items() if not v.holds(1.25)] == [slow]


def test_the_command_fails_if_a_kernel_became_slower_by_35_percent_and_not_before(clock, tmp_path, monkeypatch) -> None:
    table = tmp_path / "guard.json"
    monkeypatch.setattr(guard, "TABLE", table)
    run = CliRunner()
    unknown = run.invoke(commands.app, ["guard"])
    assert (unknown.exit_code, table.exists()) == (0, False)
    assert "--update measures them" in unknown.stdout
    assert run.invoke(commands.app, ["guard", "--update"]).exit_code == 0
    assert json.loads(table.read_text()) == {guard.instruction_set(): dict.fromkeys(guard.GUARDED, 2.0)}
    name = "forward beside attention"
    clock[name] = [2.0 * 1.2]
    assert run.invoke(commands.app, ["guard"]).exit_code == 0
    clock[name] = [2.0 * 1.35]
    slower = run.invoke(commands.app, ["guard"])
    assert slower.exit_code == 1
    assert f"Slower by more than 25%: {name}" in " ".join(slower.stdout.split())
    assert run.invoke(commands.app, ["guard", "--band", "1.4"]).exit_code == 0


def test_an_update_keeps_the_rows_of_other_machines(clock, tmp_path: Path) -> None:
    table = tmp_path / "guard.json"
    table.write_text(json.dumps({"another": {"forward beside attention": 0.5}}))
    guard.update(table, 1.0)
    assert set(guard.read(table)) == {"another", guard.instruction_set()}
