"""Figures of binaries, cached beside the CPU engine's builds, so that nothing is compiled twice.

Two launches with the same Triton IR, options and target are the same kernel: the compiler depends on nothing else. A
head dim, for one, is a constant of every kernel and leaves no trace in those that read heads in chunks. So a launch is
cached as the digest of its IR, and the figures of its binary by that digest.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from streamkl import cache
from streamkl.engines.triton.inspect.binary import Binary, Loop, read
from streamkl.engines.triton.inspect.compiler import compile_launch
from streamkl.engines.triton.launch import Launch

READ = ("binary.py", "compiler.py")
"""The modules that figures depend on: how a kernel is compiled, and how its binary is read."""


class _Known(Exception):  # noqa: N818 - no error: it ends a compilation whose result is known
    pass


def binary_of(launch: Launch, arch: str, aligned: bool) -> tuple[str, Binary]:
    """The digest of a launch's IR, and the figures of its binary: from the cache, or compiled now."""
    named = _path(_launch_key(launch, arch, aligned))
    if named.exists():
        digest = json.loads(named.read_text())["ir"]
        known = _remembered(digest)
        if known is not None:
            return digest, known
    digest = named.stem  # where this Triton does not show its IR, each launch counts as a kernel of its own

    def lowered(ir: str) -> None:
        nonlocal digest
        digest = _digest(arch, launch.warps, launch.stages, ir)
        if _path(digest).exists():
            raise _Known

    try:
        made = read(compile_launch(launch, arch, aligned, lowered))
        _write(_path(digest), made._replace(loop=made.loop._asdict())._asdict())  # pyright: ignore[reportArgumentType]
    except _Known:
        made = _remembered(digest)
        assert made is not None, digest
    if digest != named.stem:
        _write(named, {"ir": digest})
    return digest, made


def _remembered(digest: str) -> Binary | None:
    path = _path(digest)
    if not path.exists():
        return None
    found = json.loads(path.read_text())
    return Binary(**{**found, "loop": Loop(**found["loop"])})


def _path(key: str) -> Path:
    return cache.directory() / "kernels" / f"{key}.json"


def _write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(content))
    temporary.replace(path)


def _launch_key(launch: Launch, arch: str, aligned: bool) -> str:
    """A digest of the kernel and all that it calls, its config, and its arguments."""
    arguments = {name: _described(value) for name, value in launch.arguments.items()}
    cut = (_sources(launch.kernel), arguments, launch.constants, launch.warps, launch.stages)
    return _digest(arch, aligned, cut)


def _sources(kernel: Any) -> dict[str, Any]:
    """The source of a kernel and of all functions that it calls, and the constants of their modules that they read.

    Triton's own ``cache_key`` leaves out some constants, and which depends on the kernels that were hashed before.
    """
    found: dict[str, Any] = {}
    waiting = [kernel]
    while waiting:
        function = waiting.pop()
        whole_name = f"{function.__module__}.{function.__name__}"
        if whole_name in found:
            continue
        seen = {name: function.__globals__.get(name) for name in function.fn.__code__.co_names}
        waiting += [value for value in seen.values() if isinstance(value, triton.JITFunction)]
        constants = {name: value for name, value in seen.items() if isinstance(value, (int, float, tl.constexpr))}
        found[whole_name] = (function.src, constants)
    return dict(sorted(found.items()))


def _digest(*parts: Any) -> str:
    """A digest that also depends on Triton, and on how kernels are compiled and read."""
    digest = hashlib.sha256(f"{triton.__version__} {parts}".encode())
    for name in READ:
        digest.update((Path(__file__).parent / name).read_bytes())
    return digest.hexdigest()[:24]


def _described(value: Any) -> Any:
    """The part of an argument that a kernel is compiled for: of a tensor, its dtype."""
    if isinstance(value, tuple):
        return tuple(_described(x) for x in value)
    return str(value.dtype) if isinstance(value, torch.Tensor) else value
