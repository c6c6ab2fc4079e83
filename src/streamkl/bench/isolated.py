"""One call in a process of its own, for the memory that it alone makes the process resident with.

Run as ``python -m streamkl.bench.isolated REQUEST``; `run` does, and reads the answer.
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


class Measurement(NamedTuple):
    """One call's time, and its memory.

    Attributes:
        seconds: Of the call.
        extra_bytes: What the call added to the process at its peak (on GPUs: to the allocator), gradients included.
        resident_bytes: The most that the process was resident with.
        loss: What it computed, where it computes a loss.
    """

    seconds: float
    extra_bytes: int
    resident_bytes: int
    loss: float | None


def run(cell: Cell, contestant: str, backend: str, device: torch.device, threads: int) -> Measurement:
    """Runs a contestant once, in a process of its own."""
    request = {
        "cell": cell.to_dict(), "contestant": contestant, "backend": backend, "device": str(device), "threads": threads,
    }  # fmt: skip
    result = subprocess.run([sys.executable, "-m", __name__, json.dumps(request)], capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(f"{contestant} failed on {cell}: {result.stderr.strip()[-2000:]}")
    return Measurement(**json.loads(result.stdout.splitlines()[-1]))


def measure(cell: Cell, contestant: str, backend: str, device: str, threads: int) -> Measurement:
    """Runs the call in this process.

    It is the first of the process, so that whatever it keeps is counted; only what is compiled is compiled before.
    """
    from streamkl.bench.contestants import prepare

    torch.set_num_threads(threads)
    inputs = draw_inputs(cell, device)
    call = prepare(contestant, cell, inputs, backend)
    if contestant == "compiled":
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
    """The most bytes this process has been resident with, since counting started."""
    with suppress(OSError):  # not getrusage: on Linux a process inherits the peak of the one that started it
        return int(re.findall(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())[0]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def start_counting(device: str) -> int:
    """Bytes in use now. Forgets earlier peaks where the system can, and hands back what malloc only keeps."""
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
