"""The build: cached, shared by processes that start together, loaded if whole and safe, clear if it cannot be done."""

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from streamkl import cache
from streamkl.engines.cpu import build, compiler

CALL = """
import torch, streamkl
from streamkl import engines
q = torch.randn(1, 2, 50, 16)
for backend in {backends!r}:
    loss = streamkl.attention_kl(q, q, q * 0.5, q, backend=backend)
    print(engines.choose("auto", q.device).engine.name, round(loss.item(), 4), flush=True)
"""


def start(*backends: str, **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", CALL.format(backends=backends)], env={**os.environ, **environment}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


@pytest.mark.slow
def test_two_processes_that_start_together_share_one_build(small: Any) -> None:
    script = f"""
from pathlib import Path
from streamkl.engines.cpu import build
build.SOURCES = Path({str(small.sources)!r})
print(build.build())
"""
    processes = [
        subprocess.Popen([sys.executable, "-c", script], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=300) for process in processes]
    assert all(process.returncode == 0 for process in processes), outputs
    assert {stdout.strip() for stdout, _ in outputs} == {str(path) for path in small.kept.glob("*.so")}
    assert len(list(small.kept.glob("*.so"))) == 1, "one library, and no temporary left"
    assert sum("building the CPU engine, once: two to three minutes of processor" in err for _, err in outputs) == 1
    assert [call for call in small.calls() if call != "--version"] == ["link", "one.cpp", "two.cpp"]


def test_the_library_runs_on_several_threads() -> None:
    if build.missing() is not None:
        pytest.skip("the CPU engine is not built here")
    library = build.build().read_bytes()
    assert b"GOMP_parallel" in library, "without OpenMP at::parallel_for runs on one thread, without a word"


def test_without_a_compiler_auto_takes_tiled_and_the_named_engine_says_what_is_missing(tmp_path: Path) -> None:
    process = start("auto", "cpu", STREAMKL_CACHE=str(tmp_path), TMPDIR=str(tmp_path), CXX="", PATH="")
    stdout, stderr = process.communicate(timeout=600)
    assert stdout.startswith("tiled ")
    assert "RuntimeWarning" not in stderr, "a machine without a compiler is not expected to have the engine"
    assert "backend='cpu' cannot run on cpu: cpu: cannot be built: no C++ compiler was found" in stderr
    assert process.returncode != 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("named", "reason"),
    [("/bin/false", "the compiler failed: /bin/false"), ("/nonexistent/c++ -x", "no program '/nonexistent/c++'")],
)
def test_a_build_that_fails_is_told_once_by_auto_and_as_an_error_by_the_named_engine(
    tmp_path: Path, named: str, reason: str
) -> None:
    folders = {"STREAMKL_CACHE": str(tmp_path), "TMPDIR": str(tmp_path)}
    process = start("auto", "auto", "cpu", CXX=named, PYTHONWARNINGS="always::RuntimeWarning", **folders)
    stdout, stderr = process.communicate(timeout=600)
    assert [line.split()[0] for line in stdout.splitlines()] == ["tiled", "tiled"]
    warning, error = stderr.split("Traceback", 1)
    assert warning.count("the cpu engine should run here and does not, so tiled runs instead") == 1
    assert reason in warning
    assert "streamkl doctor" in warning
    assert f"backend='cpu' cannot run on cpu: cpu: {'the compiler' if 'false' in named else 'CXX='}" in error
    assert reason in error
    assert list(tmp_path.glob("*.so")) == []


def test_cxx_may_be_several_words(small: Any) -> None:
    assert cache.read(build.build()) is not None
    assert "link" in small.calls()


@pytest.mark.parametrize("kept", [b"", "half", "without a seal"])
def test_a_library_that_is_not_whole_is_built_again(small: Any, kept: str | bytes) -> None:
    path = build.build()
    whole = path.read_bytes()
    content = {"half": whole[: len(whole) // 2], "without a seal": cache.read(path)}.get(kept, kept)
    path.write_bytes(content)
    small.calls()
    assert build.build() == path
    assert path.read_bytes() == whole
    assert small.calls() == ["link"]
    build.load.__wrapped__()  # maps the whole file, and would end in a bus error if it were half


def test_the_library_can_be_read_by_those_whom_the_umask_lets(small: Any) -> None:
    before = os.umask(0o022)
    try:
        path = build.build()
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_library_that_others_could_have_written_is_built_again(small: Any) -> None:
    path = build.build()
    path.chmod(0o666)
    assert build.build() == path
    assert path.stat().st_mode & 0o022 == 0


@pytest.mark.parametrize("case", ["writable by all", "no folder"])
def test_where_the_cache_cannot_be_used_a_private_folder_is_and_the_build_says_why(
    small: Any, case: str, capfd: pytest.CaptureFixture
) -> None:
    if case == "no folder":
        small.kept.write_text("a file")
    else:
        small.kept.mkdir()
        small.kept.chmod(0o777)
    path = build.build()
    assert path.parent == small.private
    assert path.parent.stat().st_mode & 0o022 == 0
    printed = capfd.readouterr().err
    reason = f"chmod o-w {small.kept}" if case == "writable by all" else f"{small.kept} cannot be made (File exists)"
    assert f"in {small.private}, since {small.kept} " in printed
    assert reason in printed
    assert "set STREAMKL_CACHE to a folder of your own" in printed
    assert reason in (build.passed_over() or "")
    small.calls()
    assert build.build() == path
    assert small.calls() == [], "the next process finds it there"


def test_a_library_in_a_cache_that_others_can_write_is_not_taken(small: Any) -> None:
    path = build.build()
    assert build.passed_over() is None
    small.kept.chmod(0o777)
    assert build.build() == small.private / path.name


def test_where_neither_can_be_used_both_reasons_are_given(small: Any) -> None:
    small.kept.write_text("a file")
    small.private.mkdir()
    small.private.chmod(0o777)
    with pytest.raises(build.BuildError, match=r"the library has no place: .*kept.*; .*can be written by every user"):
        build.build()


def test_without_a_compiler_a_whole_library_is_taken_and_a_broken_one_is_told(
    small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = build.build()
    monkeypatch.setattr(compiler, "command", lambda: None)
    assert build.build() == path
    path.write_bytes(b"")
    assert build.missing() is None, "somebody built it, so that it is expected"
    with pytest.raises(build.BuildError, match=r"no C\+\+ compiler was found"):
        build.build()


def test_a_library_that_does_not_load_is_told_with_what_to_do(small: Any) -> None:
    cache.write(build.build(), b"not a library")
    with pytest.raises(build.BuildError, match=r"does not load: .*`streamkl build --force`"):
        build.load.__wrapped__()


def test_build_command_prints_where_the_library_is() -> None:
    result = subprocess.run([sys.executable, "-m", "streamkl", "build"], capture_output=True, text=True, timeout=900)
    assert Path(result.stdout.strip()).exists(), result.stderr


@pytest.mark.slow
def test_on_a_terminal_a_build_says_how_far_it_is_and_into_a_file_it_does_not(small: Any, tmp_path: Path) -> None:
    script = f"""
from pathlib import Path
from streamkl.engines.cpu import build
build.SOURCES = Path({str(small.sources)!r})
build.build(force=True)
"""
    terminal, end = os.openpty()
    subprocess.run([sys.executable, "-c", script], stderr=end, check=True, timeout=300)
    os.close(end)
    said = b""
    with contextlib.suppress(OSError):  # the end of a terminal that nobody writes to
        while part := os.read(terminal, 4096):
            said += part
    os.close(terminal)
    assert re.search(r"\rstreamkl: 1 of 2 sources, \d+ s", said.decode())
    assert re.search(r"\rstreamkl: 2 of 2 sources, \d+ s\r?\n", said.decode())
    piped = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=300)
    assert "building the CPU engine" in piped.stderr
    assert "sources" not in piped.stderr
