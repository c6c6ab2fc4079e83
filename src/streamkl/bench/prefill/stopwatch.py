"""Where a forward pass spends its time: a stack of parts, the innermost of which runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

PARTS = ("projections", "selection", "attention", "rest")
"""Linear maps; indexers and the choice of keys; attention itself with RoPE and its norms; all else."""


class Stopwatch:
    """Seconds of each part since it was made. A part that starts inside of another stops the other one's time."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self._stack = ["rest"]
        self._since = time.perf_counter()

    def start(self, part: str) -> None:
        """Enters a part. What belongs to a selection stays one, whatever it does."""
        self._turn()
        self._stack.append("selection" if self._stack[-1] == "selection" else part)

    def stop(self) -> None:
        """Leaves the innermost part."""
        self._turn()
        self._stack.pop()

    def _turn(self) -> None:
        now = time.perf_counter()
        self.seconds[self._stack[-1]] += now - self._since
        self._since = now

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose calls count as a part."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.start(part)
            try:
                return function(*args, **kwargs)
            finally:
                self.stop()

        return call

    @contextmanager
    def watching(self, parts: dict[nn.Module, str]) -> Iterator[None]:
        """Counts the calls of modules as their parts."""
        handles = []
        for module, part in parts.items():
            handles.append(module.register_forward_pre_hook(lambda *_, part=part: self.start(part)))
            handles.append(module.register_forward_hook(lambda *_: self.stop()))
        try:
            yield
        finally:
            self._turn()
            for handle in handles:
                handle.remove()
