"""Ahead-of-time compilation of a `Launch` for an architecture that need not be present."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as triton_compile

from streamkl.engines.triton.launch import Launch

POINTERS = {
    torch.float64: "*fp64", torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16",
    torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip


def gpu_target(arch: str) -> GPUTarget:
    """Triton's name of an architecture."""
    if arch.startswith("sm_"):
        return GPUTarget("cuda", int(arch[3:]), 32)
    return GPUTarget("hip", arch, 64)


def compile_launch(
    launch: Launch, arch: str, aligned: bool = True, lowered: Callable[[str], None] | None = None
) -> Any:
    """The compiled kernel, as a launch of these arguments would compile it there.

    Args:
        launch: From a plan, made of tensors on any device, ``meta`` too.
        arch: ``sm_80`` and so on, ``gfx942``.
        aligned: Whether pointers are aligned to 16 bytes and sizes that are multiples of 16 are known to be.
        lowered: Called with the kernel's Triton IR before anything is made of it; what it raises ends the compilation.
    """
    signature: dict[str, Any] = {}
    constants: dict[Any, Any] = {}
    attributes: dict[tuple[int, ...], list[Any]] = {}
    names = launch.kernel.arg_names
    given = {**launch.arguments, **launch.constants}
    for n, name in enumerate(names):
        if name in launch.constants:
            signature[name], constants[(n,)] = "constexpr", launch.constants[name]
        else:
            signature[name] = _specialise(given[name], (n,), constants, attributes, aligned, arch.startswith("gfx"))
    source = ASTSource(launch.kernel, signature, constants, attributes)
    options = {"num_warps": launch.warps, "num_stages": launch.stages, "enable_fp_fusion": False}
    with _watching(lowered):
        return triton_compile(source, target=gpu_target(arch), options=options)


@contextlib.contextmanager
def _watching(lowered: Callable[[str], None] | None) -> Iterator[None]:
    """Shows the Triton IR of what is compiled, without its line numbers, to ``lowered``; a Triton before 3.5 cannot."""
    runtime: Any = getattr(getattr(triton, "knobs", None), "runtime", None)
    if lowered is None or not hasattr(runtime, "add_stages_inspection_hook"):
        yield
        return

    def hook(*backend_and_stages: Any) -> tuple[str, str]:
        if backend_and_stages:
            stages = backend_and_stages[1]
            make = stages["ttir"]

            def stage(source: Any, metadata: Any) -> Any:
                module = make(source, metadata)
                lowered(module.str_nodebug())
                return module

            stages["ttir"] = stage
        return "", ""  # adds nothing to the key of Triton's own cache: the binary is the same

    before, runtime.add_stages_inspection_hook = runtime.add_stages_inspection_hook, hook
    try:
        yield
    finally:
        runtime.add_stages_inspection_hook = before


def _specialise(
    value: Any,
    path: tuple[int, ...],
    constants: dict[Any, Any],
    attributes: dict[tuple[int, ...], list[Any]],
    aligned: bool,
    amd: bool,
) -> Any:
    """The type of an argument as Triton's launcher specialises it: ones and None are constants, 16s known."""
    if isinstance(value, tuple):
        inner = [_specialise(x, (*path, n), constants, attributes, aligned, amd) for n, x in enumerate(value)]
        return type(value)(*inner) if hasattr(value, "_fields") else tuple(inner)  # kernels read fields by name
    if isinstance(value, Tensor):
        attributes[path] = [["tt.divisibility", 16]] if aligned else []
        if amd and aligned:  # the launcher says so of tensors of at most 2 GB; those beyond are left to the others
            attributes[path].append(["tt.pointer_range", 32])
        return POINTERS[value.dtype]
    if isinstance(value, float):
        return "fp32"
    if value is None or value == 1:
        constants[path] = value
        return "constexpr"
    if value % 16 == 0 and aligned:
        attributes[path] = [["tt.divisibility", 16]]
    return "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
