"""Files that replace others: all of them or none, whatever happens on the way."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from streamkl import durable

NAMES = ("data", "more", "marker")


def write(folder: Path, text: str) -> None:
    with durable.replacing_files(folder, NAMES) as staged:
        for name in NAMES:
            (staged / name).write_text(text)


def found(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_files_replace_those_of_their_names_and_everything_else_stays(tmp_path) -> None:
    folder = tmp_path / "some" / "where"
    write(folder, "old")
    (folder / "notes").write_text("mine")
    write(folder, "new")
    assert found(folder) == {**dict.fromkeys(NAMES, "new"), "notes": "mine"}


def test_a_block_that_raises_leaves_the_folder_as_it_was(tmp_path) -> None:
    folder = tmp_path / "folder"

    def interrupted() -> None:
        with durable.replacing_files(folder, NAMES) as staged:
            (staged / "data").write_text("new")
            raise KeyboardInterrupt

    for before in (None, "old"):
        if before:
            write(folder, before)
        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert folder.exists() == (before is not None)
    assert found(folder) == dict.fromkeys(NAMES, "old")


def test_a_link_among_the_files_is_replaced_and_not_what_it_points_to(tmp_path) -> None:
    (tmp_path / "theirs").write_text("theirs")
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in (*NAMES, durable.STAGING, durable.READY):
        (folder / name).symlink_to(tmp_path / "theirs")
    write(folder, "new")
    assert found(folder) == dict.fromkeys(NAMES, "new")
    assert not (folder / "data").is_symlink()
    assert (tmp_path / "theirs").read_text() == "theirs"


def test_a_single_file_is_there_at_every_moment(tmp_path, monkeypatch) -> None:
    (tmp_path / "data").write_text("old")
    monkeypatch.setattr(Path, "unlink", lambda path, missing_ok=False: pytest.fail(f"{path} was removed"))
    monkeypatch.setattr(durable, "_remove", lambda path: None)
    with durable.replacing_files(tmp_path, ["data"]) as staged:
        (staged / "data").write_text("new")
    assert (tmp_path / "data").read_text() == "new"


DIES = """
import importlib.util, json, os, sys
from pathlib import Path

spec = importlib.util.spec_from_file_location("durable", sys.argv[1])
durable = importlib.util.module_from_spec(spec)
spec.loader.exec_module(durable)
names, root = ("data", "more", "marker"), Path(sys.argv[2])


def write(folder, text):
    with durable.replacing_files(folder, names) as staged:
        for name in names:
            (staged / name).write_text(text)


def state(folder):
    return {p.name: p.read_text() if p.is_file() else sorted(os.listdir(p)) for p in folder.iterdir()}


def dies(folder, text, calls):
    'Writes in a process that dies before it calls the system once more than so often; whether it did.'
    pid = os.fork()
    if not pid:
        left = calls

        def counted(call):
            def run(*args, **options):
                nonlocal left
                if left == 0:
                    os._exit(9)
                left -= 1
                return call(*args, **options)
            return run

        for name in ("mkdir", "open", "fsync", "rename", "replace", "unlink", "rmdir"):
            setattr(os, name, counted(getattr(os, name)))
        write(folder, text)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9


lines = []
for before in (None, "old"):
    calls, died = 0, True
    while died:
        folder = root / f"{before}-{calls}"
        if before:
            write(folder, before)
        died = dies(folder, "new", calls)
        left = state(folder) if folder.exists() else {}
        dies(folder, "newer", calls // 2)  # the next one may die as well
        again = state(folder) if folder.exists() else {}
        write(folder, "last")
        lines.append({"before": before, "died": died, "left": left, "again": again, "last": state(folder)})
        calls += 1
print(json.dumps(lines))
"""


def test_a_process_that_dies_anywhere_leaves_the_old_files_the_new_ones_or_no_marker(tmp_path) -> None:
    command = [sys.executable, "-c", DIES, durable.__file__, str(tmp_path)]
    lines = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert sum(line["died"] for line in lines) > 30
    for line in lines:
        for left in (line["left"], line["again"]):
            if "marker" in left:
                assert left["data"] == left["more"] == left["marker"], line
            elif line["before"] or "data" in left:  # whose files they are is known
                assert "marker" in left[durable.READY], line
        assert line["last"] == dict.fromkeys(NAMES, "last"), line
    kinds = {(line["before"], line["left"].get("marker")) for line in lines}
    assert kinds == {(None, None), (None, "new"), ("old", None), ("old", "old"), ("old", "new")}


def test_digests_and_folders(tmp_path) -> None:
    staged, folder = tmp_path / "staged", tmp_path / "folder"
    for place in (staged, folder):
        (place / "deep").mkdir(parents=True)
    (staged / "deep" / "a").write_bytes(b"abc")
    (folder / "deep" / "old").write_bytes(b"")
    wanted = {"deep/a": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"}  # of FIPS 180-2
    assert durable.digests(staged) == wanted
    durable.replace_folder(staged, folder)
    assert durable.digests(folder) == wanted
    assert not staged.exists()
