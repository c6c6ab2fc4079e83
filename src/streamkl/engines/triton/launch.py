"""From a problem to launches: grids, splits, arguments, and the guard that a launch runs under.

A `Launch` can be run, or compiled for an architecture that is not present (``streamkl kernels``): what is checked is
what is launched. Nothing here reads a tensor's values, so nothing waits for the device.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from streamkl.engines.triton.configs import architecture
from streamkl.engines.triton.kernels.groups import PackedStarts, SupportArguments
from streamkl.engines.triton.meta import Config, Group, Mask, SideMeta
from streamkl.problem import Problem

UNBOUNDED = 1 << 29
"""A window's side beyond this sees all keys, and sums with it still fit 32 bits."""


@dataclass(frozen=True)
class Launch:
    """One kernel, its grid (all of it on axis x), its arguments by name, and how it is compiled.

    ``multiplies`` says that it has products, which tensor cores should compute.
    """

    kernel: Any
    programs: int
    arguments: dict[str, Any]
    constants: dict[str, Any] = field(default_factory=dict)
    warps: int = 4
    stages: int = 1
    multiplies: bool = True

    def run(self, device: torch.device) -> None:
        """Runs it on the tensors' device, which need not be the current one."""
        if self.programs == 0:
            return
        with device_guard(device):
            self.kernel[(self.programs,)](
                **self.arguments, **self.constants, num_warps=self.warps, num_stages=self.stages,
                enable_fp_fusion=False,
            )  # fmt: skip


def device_guard(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Makes a device current; for the interpreter, silences numpy's warnings about nan."""
    return torch.cuda.device(device) if device.type == "cuda" else _quiet()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    import numpy

    with numpy.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


class Tiling:
    """How a pass over a problem is tiled, and the constants and arguments that all its launches have in common."""

    def __init__(
        self, problem: Problem, tensors: Sequence[Tensor], arch: str, kind: str, weighted: bool = False
    ) -> None:
        self.problem, self.support, self._arch = problem, problem.support, arch
        width = max(problem.a.dim, problem.b.dim)
        if max(problem.a.dtype.itemsize, problem.b.dtype.itemsize) == 4:
            kind = f"{kind}_float32"
        elif not all(is_aligned(x) for x in tensors):
            kind = f"{kind}_misaligned"
        elif problem.runs > 1:
            kind = f"{kind}_max"
        self.config: Config = architecture.config(arch, kind, width)
        self.processors = architecture.processors(arch)
        upcast = arch == architecture.INTERPRETER
        hold_a = self.config.hold if self.config.hold_a is None else self.config.hold_a
        self.a, self.b = (
            SideMeta.of(side, self.config, hold, upcast and side.dtype == torch.bfloat16, has_weights)
            for side, hold, has_weights in ((problem.a, hold_a, False), (problem.b, self.config.hold, weighted))
        )
        self.group = Group.of(problem)
        self.mask = Mask.of(problem.support)

    def warps_of(self, kind: str) -> int:
        """The warps of a kernel of the same pass that reads no heads, by its row in the table."""
        return architecture.config(self._arch, kind, 1).warps

    @property
    def head_packs(self) -> int:
        """How many head packs, of ``group.pack`` distributions each, a batch element has."""
        return self.problem.distributions // self.group.pack

    def support_arguments(self) -> SupportArguments:
        """The support as kernels read it."""
        left, right = (min(bound or 0, UNBOUNDED) for bound in (self.support.left, self.support.right))
        return SupportArguments(self.support.nq, self.support.nk, left, right, self._packed())

    def _packed(self) -> PackedStarts | None:
        """The starts of packed sequences as kernels read them."""
        starts_q, starts_k = self.support.cu_seqlens_q, self.support.cu_seqlens_k
        if starts_q is None or starts_k is None:
            return None
        count = starts_q.shape[0] - 1
        return PackedStarts(
            starts_q, starts_k, starts_q.stride(0), starts_k.stride(0), count, max(1, count.bit_length())
        )

    def blocks(self, tokens: int, block: int) -> int:
        """How many blocks an axis has: the lengths of packed sequences are unknown, so each may have a ragged block."""
        if self.support.cu_seqlens_q is None:
            return math.ceil(tokens / block)
        count = self.support.cu_seqlens_q.shape[0] - 1
        return tokens // block + count if count else 0

    def row_blocks(self) -> int:
        """Blocks of packed rows."""
        return self.blocks(self.support.nq * self.group.pack, self.config.rows)

    def key_blocks(self) -> int:
        """Blocks of keys."""
        return self.blocks(self.support.nk, self.config.keys)

    def splits(self, programs: int, tiles: int) -> int:
        """How many programs split the tiles of one, so that few blocks still keep a device busy."""
        if programs == 0 or programs >= self.processors:
            return 1
        return max(1, min(math.ceil(2 * self.processors / programs), tiles // architecture.TILES_PER_SPLIT))

    def key_splits(self) -> int:
        """How many programs split the keys of a block of rows."""
        return self.splits(self.row_blocks() * self.head_packs * self.support.batch, self.key_blocks())

    def constants(self, **more: Any) -> dict[str, Any]:
        """The compile-time constants of every pass."""
        return {
            "A": self.a, "B": self.b, "GROUP": self.group, "MASK": self.mask, "ROWS": self.config.rows,
            "KEYS": self.config.keys, **more,
        }  # fmt: skip

    def launch(self, kernel: Any, programs: int, arguments: dict[str, Any], constants: dict[str, Any]) -> Launch:
        """A launch with this tiling's warps and stages."""
        return Launch(kernel, programs, arguments, constants, self.config.warps, self.config.stages)


def is_aligned(x: Tensor) -> bool:
    """Whether 16 bytes of ``x`` can be loaded at once, as Triton's launcher sees it."""
    offset = x.storage_offset() * x.element_size() if x.is_meta else x.data_ptr()
    return offset % 16 == 0 and x.stride(-1) == 1 and all(stride % 16 == 0 for stride in x.stride()[:-1])


def row_launch(kernel: Any, rows: int, arguments: dict[str, Any], **constants: Any) -> Launch:
    """A launch over row vectors."""
    return Launch(kernel, math.ceil(rows / 256), arguments, {"BLOCK": 256, **constants})


def run_all(launches: list[Launch], device: torch.device) -> None:
    """Runs launches in order."""
    for launch in launches:
        launch.run(device)


def new_rows(q: Tensor, heads: int, packed: bool, value: float) -> Tensor:
    """A row vector ``[B, heads, Nq]``; filled where a packed batch may have rows past its last sequence."""
    shape = (q.shape[0], heads, q.shape[2])
    if packed:
        return torch.full(shape, value, dtype=torch.float32, device=q.device)
    return torch.empty(shape, dtype=torch.float32, device=q.device)
