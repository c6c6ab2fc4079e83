"""The limits of each target, the budget of a binary, and the ceiling that its instructions set.

A ceiling is a computed upper bound, not a measurement: the share of the tensor cores' peak that the main loop could
reach if nothing ever waited, from the least clocks of its products, its other instructions and its exponentials.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from streamkl.engines.triton.inspect.binary import Binary
from streamkl.engines.triton.launch import Launch


class Target(NamedTuple):
    """One architecture.

    Attributes:
        shared: Bytes of shared memory that a program may have.
        mma: The kind of its tensor-core instructions.
        macs: Half-precision multiply-adds per clock of one multiprocessor or compute unit, accumulating in float32.
        issue: Instructions of a warp (wave) that it issues per clock.
        exp: Exponentials of a warp (wave) that it computes per clock.
    """

    shared: int
    mma: str
    macs: int
    issue: float
    exp: float


TARGETS = {
    "sm_80": Target(163 << 10, "HMMA", 1024, 4, 0.5),
    "sm_86": Target(99 << 10, "HMMA", 512, 4, 0.5),
    "sm_89": Target(99 << 10, "HMMA", 512, 4, 0.5),
    "sm_90": Target(227 << 10, "WGMMA", 2048, 4, 0.5),
    "sm_100": Target(227 << 10, "tcgen05", 4096, 4, 0.5),
    "sm_120": Target(99 << 10, "HMMA", 512, 4, 0.5),
    "gfx942": Target(64 << 10, "MFMA", 1024, 1, 0.25),
    "gfx950": Target(160 << 10, "MFMA", 2048, 1, 0.25),
}
"""Limits and rates from the vendors' programming guides and data sheets."""


WARP_GROUP_ROWS = 64
"""A tile of fewer rows is multiplied by a warp's own instruction: over selected keys a query may have few heads."""


class Clocks(NamedTuple):
    """The least clocks of a multiprocessor for one iteration of the main loop."""

    mma: float
    issue: float
    exp: float

    @property
    def ceiling(self) -> float:
        """The share of the tensor cores' peak that is left."""
        return self.mma / max(self) if max(self) > 0 else 0.0


def violations(binary: Binary, launch: Launch, arch: str, half: bool) -> list[str]:
    """The broken budgets of a kernel's binary: spills, shared memory, the kind of its products."""
    target, broken = TARGETS[arch], []
    rows = max(launch.constants["ROWS"], launch.constants.get("TARGET_ROWS", 0))
    mma = "HMMA" if rows < WARP_GROUP_ROWS and target.mma in ("WGMMA", "tcgen05") else target.mma
    if binary.spills:
        broken.append(f"{binary.spills} spills")
    if binary.shared > target.shared:
        broken.append(f"{binary.shared:,} bytes of shared memory, of {target.shared:,}")
    if half and launch.multiplies and not binary.mma.get(mma):
        broken.append(f"no {mma} instruction, but {binary.mma or 'none'}")
    return broken


def clocks(binary: Binary, launch: Launch, arch: str) -> Clocks:
    """The least clocks of the main loop."""
    target = TARGETS[arch]
    macs = sum(count * _macs(name, launch) for name, count in binary.loop.products.items())
    return Clocks(
        macs * launch.warps / target.macs,
        binary.loop.instructions * launch.warps / target.issue,
        binary.loop.exp * launch.warps / target.exp,
    )


def _macs(name: str, launch: Launch) -> float:
    """Multiply-adds that one warp does in a tensor-core instruction."""
    if name.startswith("HGMMA"):
        m, n, k = (int(x) for x in re.findall(r"\d+", name)[:3])
        return m * n * k / 4  # four warps share it
    if name.startswith("HMMA"):
        return {"16816": 16 * 8 * 16, "1688": 16 * 8 * 8}[name.split(".")[1]]
    if name.startswith("UTCHMMA"):  # its shape is in a register: that of a product of queries and keys
        return launch.constants["ROWS"] * launch.constants["KEYS"] * 16 / launch.warps
    m, n, k = (int(x) for x in re.findall(r"(\d+)x(\d+)x(\d+)", name)[0])
    return m * n * k
