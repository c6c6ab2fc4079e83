"""Checkpoints on the disk: which are whole, and how many are kept."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from streamkl.distillation import checkpoints


def written(output: Path, step: int) -> Path:
    staged = output / checkpoints.STAGING / "any"
    (staged / "indexers").mkdir(parents=True)
    (staged / "indexers" / "weights").write_text(f"of step {step}")
    folder = output / f"{checkpoints.PREFIX}{step}"
    checkpoints.finish(staged, folder, {"step": step})
    return folder


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_exactly_the_last_checkpoints_are_kept_as_many_as_are_asked_for(tmp_path: Path, keep: int) -> None:
    steps = (3, 6, 9, 12, 100)
    for step in steps:  # by number, not by name
        written(tmp_path, step)
    (tmp_path / "checkpoint-notes").mkdir()
    checkpoints.clean(tmp_path)
    checkpoints.rotate(tmp_path, keep)
    kept = [f"checkpoint-{step}" for step in steps[-keep:]]
    assert sorted(os.listdir(tmp_path)) == sorted([*kept, "checkpoint-notes"])
    checkpoints.rotate(tmp_path, 5)
    assert [path.name for _, path in checkpoints.steps(tmp_path)] == kept


def test_a_checkpoint_replaces_one_of_its_step_and_is_whole_as_long_as_nothing_changes(tmp_path: Path) -> None:
    folder = written(tmp_path, 3)
    (folder / "old").write_text("of a run before")
    assert written(tmp_path, 3) == folder
    assert not (folder / "old").exists()
    assert checkpoints.latest(tmp_path) == folder
    about = checkpoints.about(folder)
    assert about is not None
    assert about["step"] == 3
    assert list(about["files"]) == ["indexers/weights"]
    (folder / "indexers" / "weights").write_text("of step 4")
    assert checkpoints.about(folder) is None
    assert checkpoints.latest(tmp_path) is None
