"""Object files of the C++ sources, kept in the cache so that a change compiles again only what depends on it."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from streamkl import cache
from streamkl.engines.cpu import compiler

KEEP = 200
"""How many object files the cache keeps, the last used ones: some twenty versions of the engine, or 40 MB."""

INCLUDE = re.compile(rb'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


def provide(
    sources: Sequence[Path],
    root: Path,
    kept: Path,
    scratch: Path,
    force: bool = False,
    tell: Callable[[int], None] = lambda n: None,
) -> list[Path]:
    """Object files of ``sources`` in the folder ``scratch``: copies of those in ``kept``, and the others compiled.

    Includes are named from the folder ``root``, in which the sources are. The caller holds the lock of ``kept``.
    ``tell`` gets the number of those there, after each.
    """
    cache.make(kept)
    names = [f"{_stem(source, root)}-{key(source, root)}.o" for source in sources]

    def one(source: Path, name: str) -> None:
        content = None if force else cache.read(kept / name)
        if content is None:
            compiler.compile_source(source, scratch / name, root)
            cache.write(kept / name, (scratch / name).read_bytes())
        else:
            (scratch / name).write_bytes(content)
            cache.use(kept / name)

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # each source in a compiler of its own
        for count, _ in enumerate(pool.map(one, sources, names), 1):
            tell(count)
    cache.prune(kept, "*.o", KEEP)
    return [scratch / name for name in names]


def key(source: Path, root: Path) -> str:
    """A digest of what the object of a source depends on: what it includes, flags, compiler and torch."""
    digest = hashlib.sha256("\n".join((torch.__version__, *compiler.flags(), compiler.identity())).encode())
    for file in included(source, root):
        digest.update(file.relative_to(root).as_posix().encode() + b"\n" + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:16]


def included(source: Path, root: Path) -> list[Path]:
    """The source, and the files below ``root`` that it includes, directly or indirectly."""
    found, waiting = set(), [source]
    while waiting:
        file = waiting.pop()
        if file in found:
            continue
        found.add(file)
        names = INCLUDE.findall(file.read_bytes())
        waiting += [path for path in (root / name.decode() for name in names) if path.exists()]
    return sorted(found)


def _stem(source: Path, root: Path) -> str:
    """``dense-forward`` of ``dense/forward.cpp``."""
    return "-".join(source.relative_to(root).with_suffix("").parts)
