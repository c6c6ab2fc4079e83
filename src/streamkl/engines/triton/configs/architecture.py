"""The architecture of a device, and the kernel configs for it."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path

import torch

from streamkl.engines.triton.configs import amd, nvidia
from streamkl.engines.triton.meta import Config, padded

INTERPRETER = "interpreter"

INTERPRETED = Config(rows=128, keys=1024, warps=1, stages=1, hold=1024)
"""Large tiles: the interpreter takes as long for one row as for many."""

INTERPRETED_PROCESSORS = 1

TILES_PER_SPLIT = 4
"""A split of fewer tiles is not worth its own program and the merge."""


def of(device: torch.device) -> str:
    """The name of a device's architecture, ``sm_90`` or ``gfx942``."""
    if device.type == "cpu":
        return INTERPRETER
    return _of_gpu(device.index if device.index is not None else torch.cuda.current_device())


@functools.cache
def _of_gpu(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        return properties.gcnArchName.split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def processors(arch: str) -> int:
    """How many multiprocessors, or compute units, to keep busy."""
    if arch == INTERPRETER:
        return INTERPRETED_PROCESSORS
    return {**nvidia.PROCESSORS, **amd.PROCESSORS}.get(_known(arch), 64)


def config(arch: str, kind: str, width: int) -> Config:
    """The config of a kind of kernel for heads of a width; a ``_max`` without rows of its own has those of its kind."""
    if arch == INTERPRETER:
        return INTERPRETED
    table = _tables()[_known(arch)]
    rows = table[kind if kind in table else kind.removesuffix("_max")]
    fitting = [at_most for at_most in rows if at_most >= padded(width)]
    return rows[min(fitting)] if fitting else rows[max(rows)]


def has_table(arch: str) -> bool:
    """Whether there are configs for exactly this architecture."""
    return arch in _tables()


def _known(arch: str) -> str:
    """The architecture itself, or the newest known one of its vendor that is not newer."""
    return _nearest(arch, _tables())


def _nearest(arch: str, tables: dict[str, dict[str, dict[int, Config]]]) -> str:
    if arch in tables:
        return arch
    vendor = arch[:2]
    older = [name for name in tables if name[:2] == vendor and (len(name), name) <= (len(arch), arch)]
    return max(older, key=lambda name: (len(name), name)) if older else min(n for n in tables if n[:2] == vendor)


@functools.cache
def _tables() -> dict[str, dict[str, dict[int, Config]]]:
    """The tables of both vendors, with rows replaced by those of the file ``STREAMKL_CONFIGS``."""
    tables = {
        arch: {kind: dict(rows) for kind, rows in table.items()} for arch, table in (nvidia.TABLES | amd.TABLES).items()
    }
    own = os.environ.get("STREAMKL_CONFIGS")
    if own:
        _add_own(tables, own)
    return tables


def _add_own(tables: dict[str, dict[str, dict[int, Config]]], path: str) -> None:
    """Replaces rows by those of a file; a new architecture starts from the nearest known one."""
    where = path
    try:
        for arch, table in json.loads(Path(path).read_text()).items():
            if arch not in tables:
                tables[arch] = {kind: dict(rows) for kind, rows in tables[_nearest(arch, tables)].items()}
            for kind, rows in table.items():
                for width, values in rows.items():
                    where = f"{path}: {arch}, {kind}, {width}"
                    tables[arch].setdefault(kind, {})[int(width)] = Config(**values)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"STREAMKL_CONFIGS must name a file of rows as docs/kernels.md shows; {where}: {error}"
        ) from error
