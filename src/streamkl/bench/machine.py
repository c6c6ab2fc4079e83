"""The machine of a measurement: device, versions, commit; and its available memory."""

from __future__ import annotations

import hashlib
import platform
import re
import subprocess
from pathlib import Path

import torch

import streamkl


def facts(device: torch.device) -> dict[str, str]:
    """The machine and the software, for a record."""
    return {
        "device": device_name(device),
        "capability": capability(device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "streamkl": streamkl.__version__,
        "commit": commit(Path(streamkl.__file__).parent),
    }


def device_name(device: torch.device) -> str:
    """The model name of the CPU or GPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        models = re.findall(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:
        models = []
    name = models[0] if models else platform.processor() or platform.machine()
    return f"{name}, {len(models) or 1} cores"


def capability(device: torch.device) -> str:
    """The instruction set of the device, and how the CPU engine multiplies on it."""
    if device.type == "cuda":
        return "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    from streamkl.engines import cpu

    refused = cpu.unsupported(device)
    return cpu.products() if refused is None else torch.backends.cpu.get_cpu_capability()


def commit(package: Path) -> str:
    """The commit of the package's sources, empty outside of a repository.

    ``-dirty`` and a digest of the difference follow if the sources differ from it.
    """

    def git(*arguments: str) -> str | None:
        try:
            result = subprocess.run(["git", "-C", str(package), *arguments], capture_output=True, text=True)
        except OSError:
            return None
        return result.stdout.strip() if result.returncode == 0 else None

    # An installed copy may lie inside of another repository.
    if git("ls-files", "--error-unmatch", "__init__.py") is None:
        return ""
    head = git("rev-parse", "--short=12", "HEAD") or ""
    changes = git("status", "--porcelain", "--", ".")
    if not changes:
        return head
    difference = f"{changes}\n{git('diff', 'HEAD', '--', '.')}"
    return f"{head}-dirty-{hashlib.sha256(difference.encode()).hexdigest()[:8]}"


def available_bytes(device: torch.device) -> int:
    """Memory that a new allocation could get."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        return int(re.findall(r"MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text())[0]) * 1024
    except (OSError, IndexError):
        return 8 << 30
