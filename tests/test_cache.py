"""Native code in the cache: whole or not taken, readable by those who may, and written by nobody else."""

import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamkl import cache

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="native code is kept on Linux")
CONTENT = bytes(range(256)) * 100


@pytest.fixture
def umask() -> Iterator[None]:
    """The umask of most machines."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture
def folder(tmp_path: Path, umask: None) -> Path:
    cache.make(tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def kept(folder: Path) -> Path:
    cache.write(folder / "code.so", CONTENT)
    return folder / "code.so"


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a file or folder another user's, or, for want of the right to, this process another user's."""
    if os.geteuid() == 0:
        os.chown(path, 4321, -1, follow_symlinks=False)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 4321)


def test_what_was_written_is_read(kept: Path) -> None:
    assert cache.read(kept) == CONTENT
    assert [file.name for file in kept.parent.iterdir()] == ["code.so"], "no temporary file is left"


def test_what_is_missing_empty_cut_off_changed_or_without_a_seal_is_not_read(kept: Path) -> None:
    whole = kept.read_bytes()
    changed = bytes([whole[0] ^ 1]) + whole[1:]
    for broken in (b"", whole[: len(whole) // 2], whole[:-1], whole[1:], changed, CONTENT):
        kept.write_bytes(broken)
        assert cache.read(kept) is None
    kept.unlink()
    assert cache.read(kept) is None


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o002, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_the_umask_decides_who_may_read_and_nobody_else_may_write(folder: Path, mask: int, mode: int) -> None:
    os.umask(mask)
    cache.write(folder / "code.so", CONTENT)
    cache.make(folder / "objects")
    assert stat.S_IMODE((folder / "code.so").stat().st_mode) == mode
    assert stat.S_IMODE((folder / "objects").stat().st_mode) & 0o022 == 0


def test_a_write_that_fails_leaves_what_was_there(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_room)
    with pytest.raises(OSError, match="No space left"):
        cache.write(kept, b"new")
    assert cache.read(kept) == CONTENT
    assert [file.name for file in kept.parent.iterdir()] == ["code.so"]


@pytest.mark.parametrize("what", ["file", "folder"])
@pytest.mark.parametrize(("bit", "who"), [(stat.S_IWOTH, "every user"), (stat.S_IWGRP, "its group")])
def test_code_that_others_can_write_is_not_read(
    kept: Path, what: str, bit: int, who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_is_private", lambda _: False)
    path = kept if what == "file" else kept.parent
    path.chmod(path.stat().st_mode | bit)
    assert cache.read(kept) is None
    assert f"{path} can be written by {who}; chmod" in (cache.unsafe(path) or "")
    if what == "folder":
        with pytest.raises(PermissionError, match=who):
            cache.make(path)


@pytest.mark.parametrize("what", ["file", "folder"])
def test_code_of_another_user_is_not_read(kept: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = kept if what == "file" else kept.parent
    give_away(path, monkeypatch)
    assert cache.read(kept) is None
    assert "belongs to another user" in (cache.unsafe(path) or "")


def test_a_link_that_another_user_made_is_not_followed(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = kept.with_name("link.so")
    link.symlink_to(kept)
    assert cache.read(link) == CONTENT, "one's own is"
    give_away(link, monkeypatch)
    assert cache.read(link) is None


def test_a_sticky_folder_and_a_group_of_ones_own_are_safe(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept.parent.chmod(0o1777)
    assert cache.read(kept) == CONTENT
    monkeypatch.setattr(cache, "_is_private", lambda _: True)
    kept.parent.chmod(0o775)
    assert cache.read(kept) == CONTENT
    kept.parent.chmod(0o777)
    assert cache.read(kept) is None


def test_pruning_keeps_the_last_used_and_removes_what_killed_processes_left(folder: Path) -> None:
    for age in range(6):
        cache.write(folder / f"{age}.o", CONTENT)
        os.utime(folder / f"{age}.o", (1000 - age, 1000 - age))
    cache.use(folder / "5.o")
    (folder / "6.o.0123abcd.tmp").write_bytes(b"half")
    (folder / "other.so").write_bytes(b"")
    cache.prune(folder, "*.o", keep=3)
    assert sorted(file.name for file in folder.iterdir()) == ["0.o", "1.o", "5.o", "other.so"]


def test_a_user_without_a_home_has_a_folder_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("STREAMKL_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert cache.directory() == cache.private_directory()
