"""One call in a process of its own, to measure the resident memory of that call alone.

`run` starts ``python -m streamkl.bench.isolated REQUEST`` and reads its result.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from streamkl.bench.cells import Cell, draw_inputs

RETURNED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
"""Makes glibc return freed memory where memory is measured: a peak is then memory in use, not what malloc kept."""


class Measurement(NamedTuple):
    """One call's time, and its memory.

    Attributes:
        seconds: Of the call.
        extra_bytes: The memory that the call added to the process at its peak (on GPUs: to the allocator), gradients
            included.
        resident_bytes: The peak resident memory of the process.
        loss: The loss, if the call computes one.
    """

    seconds: float
    extra_bytes: int
    resident_bytes: int
    loss: float | None


def run(cell: Cell, implementation: str, backend: str, device: torch.device, threads: int) -> Measurement:
    """Runs an implementation once, in a process of its own."""
    request = {
        "cell": cell.to_dict(), "implementation": implementation, "backend": backend, "device": str(device),
        "threads": threads,
    }  # fmt: skip
    result = subprocess.run([sys.executable, "-m", __name__, json.dumps(request)], capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(f"{implementation} failed on {cell}: {result.stderr.strip()[-2000:]}")
    return Measurement(**json.loads(result.stdout.splitlines()[-1]))


def extra_bytes(module: str, request: dict[str, Any]) -> int:
    """The memory that a request adds to its process, which runs ``python -m module REQUEST`` and prints it last.

    The process has as many threads as this one.
    """
    command = [sys.executable, "-m", module, json.dumps(request)]
    environment = {**os.environ, **RETURNED, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        raise RuntimeError(f"{request} failed: {done.stderr.strip()[-2000:]}")
    return int(done.stdout.splitlines()[-1])


def measure(cell: Cell, implementation: str, backend: str, device: str, threads: int) -> Measurement:
    """Runs the call in this process.

    It is the first call of the process, so that all memory it keeps is counted; only compilation happens before.
    """
    from streamkl.bench.implementations import prepare

    torch.set_num_threads(threads)
    inputs = draw_inputs(cell, device)
    call = prepare(implementation, cell, inputs, backend)
    if implementation == "compiled":
        call()
        for x in inputs.values():
            x.grad = None
    before_call = peak_resident()
    before = start_counting(device)
    start = time.perf_counter()
    result = call()
    loss = result.item() if result.numel() == 1 else None
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    extra = torch.cuda.max_memory_allocated() if device.startswith("cuda") else peak_resident()
    return Measurement(seconds, max(0, extra - before), max(before_call, peak_resident()), loss)


def peak_resident() -> int:
    """The peak resident memory of this process, in bytes, since counting started."""
    with suppress(OSError):  # not getrusage: on Linux a process inherits the peak of the one that started it
        return int(re.findall(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())[0]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def start_counting(device: str) -> int:
    """Bytes in use now. Resets the peak where the system can, and returns memory that malloc holds."""
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    return peak_resident()


def _main(request: dict[str, Any]) -> None:
    measurement = measure(**{**request, "cell": Cell.of_dict(request["cell"])})
    sys.stdout.write(json.dumps(measurement._asdict()) + "\n")


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
