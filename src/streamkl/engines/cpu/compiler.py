"""The C++ compiler: how it is called, with which flags, and which one it is."""

from __future__ import annotations

import functools
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import torch

FLAGS = (
    "-std=c++20", "-O3", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math",
    "-ffp-contract=off",
)  # fmt: skip
CAPABILITY_FLAGS = {
    "AVX512": (
        "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c", "-mprefer-vector-width=512",
    ),
    "AVX2": ("-mavx2", "-mfma", "-mf16c"),
}  # fmt: skip
"""Flags for instruction sets, by the capability that torch reports (``ATEN_CPU_CAPABILITY`` lowers it)."""

INSTALL = "install g++ 10 or later (Debian: apt install g++), or set CXX"


class BuildError(RuntimeError):
    """The engine could not be built or loaded; the message says what is missing or what the compiler said."""


def capability() -> str:
    """The CPU capability that torch uses: ``AVX512``, ``AVX2`` or ``DEFAULT``."""
    return torch.backends.cpu.get_cpu_capability().split("_")[0]


def command() -> tuple[str, ...] | None:
    """The words that call the compiler: ``CXX``, split as a shell does, or the first one found; ``None`` if none is.

    Raises `BuildError` if ``CXX`` is set and cannot be called.
    """
    named = os.environ.get("CXX", "").strip()
    if not named:
        return next(((path,) for path in map(shutil.which, ("g++", "c++")) if path), None)
    try:
        first, *rest = shlex.split(named)
    except ValueError as error:
        raise BuildError(f"CXX={named!r} is not a command: {error}") from None
    path = shutil.which(first)
    if path is None:
        raise BuildError(f"CXX={named!r} is not a compiler: there is no program {first!r}; {INSTALL}")
    return path, *rest


def flags() -> tuple[str, ...]:
    """The compiler flags of every source on this machine."""
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    rounding = ("-mavx512bf16",) if capability() == "AVX512" and _has("avx512_bf16") else ()
    return (*FLAGS, *CAPABILITY_FLAGS.get(capability(), ()), *rounding, abi)


def identity() -> str:
    """Which compiler it is: how it is called, what file that is, and what it says of itself."""
    words = _words()
    return "\n".join((*words, os.path.realpath(words[0]), _version(words)))


def compile_source(source: Path, target: Path, root: Path) -> None:
    """Makes the object file of a source, whose own includes are named from the folder ``root``."""
    torch_root = Path(torch.__file__).parent / "include"
    of_torch = (f"-I{path}" for path in (torch_root, torch_root / "torch" / "csrc" / "api" / "include"))
    _run(_words(), (*flags(), "-iquote", str(root), *of_torch, "-c", str(source), "-o", str(target)))


def link(objects: Iterable[Path], target: Path) -> None:
    """Makes a library of object files."""
    libraries = (f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch_cpu", "-lc10")
    _run(_words(), (*flags(), "-shared", *map(str, objects), "-o", str(target), *libraries))


def _words() -> tuple[str, ...]:
    words = command()
    if words is None:
        raise BuildError(f"no C++ compiler was found; {INSTALL}")
    return words


@functools.cache
def _version(words: tuple[str, ...]) -> str:
    return _run(words, ("--version",))


@functools.cache
def _has(feature: str) -> bool:
    """Whether the CPU has a feature, by the name that Linux gives it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return any(feature in line.split() for line in lines if line.startswith("flags"))


def _run(words: tuple[str, ...], arguments: tuple[str, ...]) -> str:
    try:
        result = subprocess.run([*words, *arguments], capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise BuildError(f"the compiler failed: {shlex.join(words)}: {error}") from error
    if result.returncode != 0:
        raise BuildError(f"the compiler failed: {shlex.join((*words, *arguments))}\n{result.stderr[-4000:]}")
    return result.stdout
