"""A small engine of two sources in folders, built in a moment; its compiler writes down what it is asked to do."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from streamkl.engines.cpu import build


class Small(NamedTuple):
    """A small engine.

    Attributes:
        sources: The folder of its sources.
        kept: The folder that is the cache.
        private: The folder that stands in for it.
        calls: What the compiler did since the last time it was asked: names of sources, ``link``, ``--version``.
    """

    sources: Path
    kept: Path
    private: Path
    calls: Callable[[], list[str]]


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Small:
    if build.unfit() is not None or shutil.which("g++") is None:
        pytest.skip("the CPU engine is not built here")
    sources, kept, log, wrapper = (tmp_path / name for name in ("sources", "kept", "log", "wrapper"))
    for folder in ("below", "beside"):
        (sources / folder).mkdir(parents=True)
    (sources / "below" / "shared.h").write_text("#pragma once\n")
    (sources / "below" / "deep.h").write_text('#pragma once\n#include "below/shared.h"\n')
    (sources / "one.cpp").write_text('#include "below/deep.h"\nint one() { return 1; }\n')
    (sources / "beside" / "two.cpp").write_text("#include <cstddef>\nint two() { return 2; }\n")
    wrapper.write_text(f'#!/bin/sh\necho "$@" >> {log}\nexec "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setenv("STREAMKL_CACHE", str(kept))
    monkeypatch.setenv("CXX", f"{wrapper} g++")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))

    def calls() -> list[str]:
        lines = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
        log.unlink(missing_ok=True)
        return sorted(
            Path(words[words.index("-c") + 1]).name if "-c" in words else "link" if "-shared" in words else words[-1]
            for words in lines
        )

    return Small(sources, kept, build.cache.private_directory(), calls)
