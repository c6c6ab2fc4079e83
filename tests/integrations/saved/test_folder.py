"""The three files of a folder of indexers, and everything that is not theirs."""

import json
import os

import pytest
import torch

from streamkl import durable
from streamkl.integrations.saved import folder as folders

NAMES = {folders.WEIGHTS, folders.DESCRIPTION, folders.MARKER}


def write(folder, value: float = 1.0):
    return folders.write(folder, {"w": torch.full((2, 3), value)}, {"value": value})


def value(folder) -> float:
    """What was written; raises unless the folder is whole."""
    shapes, description = folders.read(folder)
    assert shapes == {"w": [2, 3]}
    assert (folders.read_weights(folder)["w"] == description["value"]).all()
    return description["value"]


def files(folder) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


CHECKPOINT = json.dumps({"step": 4, "files": {"indexers.safetensors": "0" * 64, "indexers.json": "0" * 64}})


@pytest.mark.parametrize(
    "theirs",
    [
        {"notes.txt": "mine"},
        {"indexers.json": "{}"},
        {"indexers.json": "{}", "indexers.safetensors": "", "thesis.tex": "years of work"},
        {"complete.json": "{}", "data": "mine"},
        {"complete.json": CHECKPOINT, "indexers.json": "{}"},
        {"complete.json": "[" * 100_000},
        {"complete.json": json.dumps({"indexers.safetensors": 1, "indexers.json": None})},
    ],
    ids=lambda theirs: "+".join(theirs),
)
def test_a_folder_of_something_else_is_refused_and_kept(tmp_path, theirs) -> None:
    for name, text in theirs.items():
        (tmp_path / name).write_text(text)
    before = files(tmp_path)
    with pytest.raises(ValueError, match="is there already and holds no indexers: choose another folder"):
        write(tmp_path)
    assert files(tmp_path) == before


def test_a_file_is_no_folder(tmp_path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="file is a file: indexers are written to a folder"):
        write(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_what_else_lies_in_a_folder_of_indexers_stays(tmp_path) -> None:
    write(tmp_path)
    (tmp_path / "README.md").write_text("mine")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "notes").write_text("mine too")
    inode = tmp_path.stat().st_ino
    write(tmp_path, 2.0)
    assert value(tmp_path) == 2.0
    assert files(tmp_path).keys() == {*NAMES, "README.md", "deep/notes"}
    assert tmp_path.stat().st_ino == inode


def test_folders_that_are_missing_empty_relative_or_here_are_written_to(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "here").mkdir()
    for place in ("empty", "some/where", "../" + tmp_path.name + "/up"):
        for new in (1.0, 2.0):
            assert os.fspath(write(place, new)) == place
            assert value(place) == new
    monkeypatch.chdir(tmp_path / "here")
    for new in (1.0, 2.0):
        write(".", new)
        assert value(".") == value(tmp_path / "here") == new
    assert files(tmp_path / "here").keys() == NAMES


def test_a_link_is_followed_and_stays_a_link(tmp_path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    (tmp_path / "dangling").symlink_to(tmp_path / "disk" / "later")
    for link, target in (("link", "disk"), ("dangling", "disk/later")):
        write(tmp_path / link)
        write(tmp_path / link, 2.0)
        assert (tmp_path / link).is_symlink()
        assert value(tmp_path / target) == 2.0


@pytest.mark.parametrize("before", [None, 1.0])
def test_an_interrupted_folder_is_not_loaded_says_why_and_is_written_again(tmp_path, monkeypatch, before) -> None:
    folder = tmp_path / "indexers"
    if before is not None:
        write(folder, before)

    def crash(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(durable.os, "replace", crash)
        with pytest.raises(KeyboardInterrupt):
            write(folder, 2.0)
    with pytest.raises(ValueError, match=r"has no complete.json: writing it did not end"):
        folders.read(folder)
    with monkeypatch.context() as patched:
        patched.setattr(folders, "save_file", crash)
        with pytest.raises(KeyboardInterrupt):
            write(folder, 3.0)
    assert value(folder) == 2.0  # the next writer has brought the first one's to its end
    write(folder, 4.0)
    assert value(folder) == 4.0
    assert files(folder).keys() == NAMES


def test_what_a_killed_writer_left_is_cleaned(tmp_path) -> None:
    (tmp_path / durable.STAGING).mkdir()
    (tmp_path / durable.STAGING / folders.WEIGHTS).write_bytes(b"half of it")
    write(tmp_path)
    assert files(tmp_path).keys() == NAMES


def test_a_checkpoint_of_a_run_says_where_its_indexers_are(tmp_path) -> None:
    write(tmp_path / "indexers")
    (tmp_path / "complete.json").write_text(CHECKPOINT)
    with pytest.raises(ValueError, match=r"is no folder of indexers: .*indexers is$"):
        folders.read(tmp_path)
