"""Builds the C++ sources with the machine's compiler, once, and loads the result.

The library is kept in a cache under a name made of what it depends on: the sources, the torch it was built against, the
CPU's capability and the compiler's flags. It is written under a temporary name and renamed, and a lock lets a second
process wait for the first, so that processes which start together find a whole file or none.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from streamkl import cache

SOURCES = Path(__file__).parent
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
"""What the compiler may use, by the capability that torch reports (``ATEN_CPU_CAPABILITY`` lowers it)."""


class BuildError(RuntimeError):
    """The engine could not be built; the message says what is missing or what the compiler said."""


def capability() -> str:
    """What torch runs this CPU as: ``AVX512``, ``AVX2`` or ``DEFAULT``."""
    return torch.backends.cpu.get_cpu_capability().split("_")[0]


def missing() -> str | None:
    """What keeps the engine from being built here, or ``None``."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        return f"it is built on Linux on x86-64, and this is {platform.system()} on {platform.machine()}"
    if capability() not in CAPABILITY_FLAGS:
        return f"it needs AVX2 or AVX-512, and torch runs this CPU as {capability()}"
    if not library_path().exists() and compiler() is None:
        return "no C++ compiler was found; install g++ 10 or later (Debian: apt install g++), or set CXX"
    return None


def compiler() -> str | None:
    """The C++ compiler: ``CXX``, or the first that is found."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "c++"]
    return next((path for path in map(shutil.which, names) if path), None)


def library_path() -> Path:
    """Where the library for this machine is, or would be."""
    digest = hashlib.sha256()
    for source in sorted(SOURCES.glob("*.cpp")) + sorted(SOURCES.glob("*.h")):
        digest.update(source.read_bytes())
    digest.update(" ".join((torch.__version__, *_flags())).encode())
    return cache.directory() / f"cpu-{capability().lower()}-{digest.hexdigest()[:16]}.so"


@functools.cache
def load() -> None:
    """Builds the library if it is not there, and registers its operators."""
    torch.ops.load_library(str(build()))


def build(force: bool = False) -> Path:
    """Compiles the engine unless the cache has it; returns the library's path. Raises `BuildError`."""
    path = library_path()
    if path.exists() and not force:
        return path
    reason = missing()
    if reason is not None:
        raise BuildError(f"the CPU engine cannot be built: {reason}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with cache.locked(path.with_suffix(".lock")):
        if path.exists() and not force:
            return path
        sys.stderr.write("streamkl: building the CPU engine, once, in about half a minute ...\n")
        handle, temporary = tempfile.mkstemp(suffix=".so", dir=path.parent)
        os.close(handle)
        try:
            _compile(Path(temporary))
            os.replace(temporary, path)
        finally:
            Path(temporary).unlink(missing_ok=True)
    return path


def _flags() -> tuple[str, ...]:
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    rounding = ("-mavx512bf16",) if capability() == "AVX512" and _has("avx512_bf16") else ()
    return (*FLAGS, *CAPABILITY_FLAGS.get(capability(), ()), *rounding, abi)


@functools.cache
def _has(feature: str) -> bool:
    """Whether the CPU has a feature, by the name that Linux gives it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return any(feature in line.split() for line in lines if line.startswith("flags"))


def _compile(target: Path) -> None:
    root = Path(torch.__file__).parent
    includes = [f"-I{path}" for path in (root / "include", root / "include" / "torch" / "csrc" / "api" / "include")]
    with tempfile.TemporaryDirectory(dir=target.parent) as directory:
        objects = {source: Path(directory) / f"{source.stem}.o" for source in sorted(SOURCES.glob("*.cpp"))}
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # each source in a compiler of its own
            commands = ([*_flags(), *includes, "-c", str(source), "-o", str(made)] for source, made in objects.items())
            list(pool.map(_run_compiler, commands))
        libraries = [f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10"]
        _run_compiler([*_flags(), "-shared", *map(str, objects.values()), "-o", str(target), *libraries])


def _run_compiler(arguments: list[str]) -> None:
    command = [str(compiler()), *arguments]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise BuildError(f"the compiler failed: {' '.join(command)}\n{result.stderr[-4000:]}")
