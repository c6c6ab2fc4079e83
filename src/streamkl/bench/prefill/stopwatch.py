"""The time of each part of a forward pass, by a stack of parts: the time of the innermost one runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

PARTS = ("projections", "selection", "attention", "rest")
"""Linear maps; indexers and key selection; attention with RoPE and its norms; everything else."""


class Stopwatch:
    """Seconds of each part since its creation. A part that starts inside of another stops the time of the other."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self._stack = ["rest"]
        self._since = time.perf_counter()

    def start(self, part: str) -> None:
        """Enters a part. Inside of a selection everything counts as selection."""
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
        """The function, with its calls counted as a part."""

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
