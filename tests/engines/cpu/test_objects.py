"""Objects are compiled again when something they depend on has changed, and only then."""

import os
import re
from typing import Any

import pytest
import torch

from streamkl import cache
from streamkl.engines.cpu import build, compiler, objects


@pytest.fixture
def built(small: Any) -> Any:
    build.build()
    assert small.calls() == ["--version", "link", "one.cpp", "two.cpp"]
    return small


def key(engine: Any) -> str:
    return objects.key(engine.sources / "one.cpp", engine.sources)


@pytest.mark.parametrize(
    ("changed", "compiled"),
    [("one.cpp", ["one.cpp"]), ("beside/two.cpp", ["two.cpp"]), ("below/shared.h", ["one.cpp"])],
)
def test_a_change_compiles_only_what_depends_on_it(built: Any, changed: str, compiled: list[str]) -> None:
    first = build.build()
    with (built.sources / changed).open("a") as file:
        file.write("static int more = 3;\n")
    second = build.build()
    assert built.calls() == ["link", *compiled]
    assert second != first
    (built.sources / changed).write_text((built.sources / changed).read_text().replace("static int more = 3;\n", ""))
    assert build.build() == first
    assert built.calls() == [], "the library before the change is still there"


def test_a_source_that_is_added_is_compiled_alone(built: Any) -> None:
    (built.sources / "three.cpp").write_text("int three() { return 3; }\n")
    build.build()
    assert built.calls() == ["link", "three.cpp"]


def test_sources_of_one_name_in_two_folders_are_two_objects(built: Any) -> None:
    (built.sources / "below" / "two.cpp").write_text("#include <cstddef>\nint other_two() { return 2; }\n")
    build.build()
    assert built.calls() == ["link", "two.cpp"]
    assert sorted(path.name.rsplit("-", 1)[0] for path in (built.kept / "objects").iterdir()) == [
        "below-two", "beside-two", "one",
    ]  # fmt: skip


def test_another_torch_flag_or_compiler_compiles_all(built: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {key(built)}
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "2.99.0")
        before.add(key(built))
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "FLAGS", (*compiler.FLAGS, "-DMORE"))
        before.add(key(built))
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "_version", lambda _: "g++ 99")
        before.add(key(built))
    monkeypatch.setenv("CXX", "g++")
    before.add(key(built))
    assert len(before) == 5


def test_an_object_that_is_not_whole_is_compiled_again(built: Any) -> None:
    path = next((built.kept / "objects").glob("one-*.o"))
    os.truncate(path, path.stat().st_size // 2)
    build.build().unlink()
    build.build()
    assert built.calls() == ["link", "one.cpp"]


def test_force_compiles_all(built: Any) -> None:
    build.build(force=True)
    assert built.calls() == ["link", "one.cpp", "two.cpp"]


def test_old_objects_and_libraries_do_not_pile_up(built: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "KEEP", 3)
    monkeypatch.setattr(build, "KEEP", 2)
    unchanged = next((built.kept / "objects").glob("beside-two-*.o"))
    for version in range(3):
        (built.sources / "one.cpp").write_text(f"int one() {{ return {version}; }}\n")
        path = build.build()
    assert len(list((built.kept / "objects").iterdir())) == 3
    assert unchanged.exists(), "it was used each time"
    assert len(list(built.kept.glob("*.so"))) == 2
    assert cache.read(path) is not None


def test_a_build_on_a_terminal_shows_how_far_it_is(
    small: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    build.build()
    told = capsys.readouterr().err
    assert re.search(r"streamkl: 1 of 2 sources, \d+ s\rstreamkl: 2 of 2 sources, \d+ s\n", told)
