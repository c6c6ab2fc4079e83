"""Memory of a call on the CPU, counted tensor by tensor."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch


def counted_peak(call: Callable[[], Any]) -> int:
    """The most bytes that tensors take during a call, over what they take before it.

    What threads and libraries allocate without PyTorch is not in it.

    Examples:
        >>> import torch
        >>> from streamkl.testing.memory import counted_peak
        >>> x = torch.ones(1000)
        >>> counted_peak(lambda: (x + 1) * 2) // 1000  # the sum, and its product
        8
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    changes = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e["name"] == "[memory]")
    return max(accumulate(change for _, change in changes), default=0)
