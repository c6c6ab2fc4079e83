"""Builds the C++ sources with the machine's compiler, once, and loads the result.

The library is kept in the cache under a name made of what its results depend on: the sources, the torch it was built
against, the CPU's capability and the compiler's flags. Which compiler it was is not part of the name (it is of the
objects' names): an image may drop the compiler after ``streamkl build``, and users of one cache may have several.

A lock lets a second process wait for the first. A library is loaded only if it is whole and if nobody but the user and
root could have written it; else it is built again. Where the cache cannot keep it, a private folder does.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import sys
import tempfile
import time
from pathlib import Path

import torch

from streamkl import cache
from streamkl.engines.cpu import compiler, objects
from streamkl.engines.cpu.compiler import CAPABILITY_FLAGS, BuildError, capability

SOURCES = Path(__file__).parent
"""The folder of the C++ sources, which are in folders of it; includes are named from here."""
KEEP = 30
"""How many libraries the cache keeps, the last used ones."""
PROCESSOR_MINUTES = "two to three minutes"
"""What a whole build takes of one core, g++ 12 on an Intel Xeon; `docs/installation.md` says so too."""


def unfit() -> str | None:
    """Why the engine cannot run on this machine with any software, or ``None``."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        return f"it is built on Linux on x86-64, and this is {platform.system()} on {platform.machine()}"
    if capability() not in CAPABILITY_FLAGS:
        return f"it needs AVX2 or AVX-512, and torch runs this CPU as {capability()}"
    return None


def missing() -> str | None:
    """Why the engine is not expected here: the machine is unfit or has no compiler. ``None`` if it should be built."""
    reason = unfit()
    if reason is not None:
        return reason
    try:
        if compiler.command() is None and not any(path.exists() for path in library_paths()):
            return f"no C++ compiler was found; {compiler.INSTALL}"
    except BuildError:  # one was named, so that a build is expected, and will say what is wrong
        pass
    return None


def library_paths() -> tuple[Path, Path]:
    """The possible paths of the library for this machine: in the cache, and in the private folder as a fallback."""
    digest = hashlib.sha256()
    for source in (*_sources(), *sorted(SOURCES.rglob("*.h"))):
        digest.update(source.relative_to(SOURCES).as_posix().encode() + b"\n" + source.read_bytes())
    digest.update(" ".join((torch.__version__, *compiler.flags())).encode())
    name = f"cpu-{capability().lower()}-{digest.hexdigest()[:16]}.so"
    return cache.directory() / name, cache.private_directory() / name


@functools.cache
def load() -> None:
    """Builds the library if it is not there, and registers its operators. Raises `BuildError`."""
    path = build()
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise BuildError(f"{path} does not load: {error}; `streamkl build --force` builds it again") from error
    cache.use(path)


def build(force: bool = False) -> Path:
    """Compiles the engine unless the cache has it; returns the library's path. Raises `BuildError`."""
    reason = missing()
    if reason is not None:
        raise BuildError(f"the CPU engine cannot be built: {reason}")
    paths = library_paths()
    found = None if force else next((path for path in paths if cache.read(path) is not None), None)
    if found is not None:
        return found
    refusals = []
    for path in paths:
        try:
            cache.make(path.parent)
            with cache.locked(path.parent / "build.lock"):
                if force or cache.read(path) is None:  # nobody made it while this process waited
                    _build(path, force, refusals)
                return path
        except OSError as error:
            refusals.append(str(error))
    raise BuildError(f"the library has no place: {'; '.join(refusals)}")


def passed_over() -> str | None:
    """Why the cache could not keep the library, which is in the private folder; ``None`` if it could."""
    in_cache, in_private = library_paths()
    if in_cache == in_private or cache.read(in_cache) is not None or cache.read(in_private) is None:
        return None
    try:
        cache.make(in_cache.parent)
    except OSError as error:
        return str(error)
    return None


def _build(path: Path, force: bool, refusals: list[str]) -> None:
    where = "".join(f", in {path.parent}, since {refusal}" for refusal in refusals)
    sources, cores, started = _sources(), os.cpu_count() or 1, time.monotonic()
    sys.stderr.write(
        f"streamkl: building the CPU engine, once: {PROCESSOR_MINUTES} of processor time on {cores} "
        f"{'core' if cores == 1 else 'cores'}{where}\n"
    )

    def tell(count: int) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(f"\rstreamkl: {count} of {len(sources)} sources, {time.monotonic() - started:.0f} s")
            sys.stderr.write("\n" if count == len(sources) else "")
            sys.stderr.flush()

    with tempfile.TemporaryDirectory() as scratch:
        made = objects.provide(sources, SOURCES, path.parent / "objects", Path(scratch), force, tell)
        library = Path(scratch) / path.name
        compiler.link(made, library)
        cache.write(path, library.read_bytes())
    cache.prune(path.parent, "cpu-*.so", KEEP)


def _sources() -> list[Path]:
    return sorted(SOURCES.rglob("*.cpp"))
