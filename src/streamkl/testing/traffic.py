"""What a rank receives from others, counted in the collectives that PyTorch runs."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Traffic(TorchDispatchMode):
    """Counts the bytes that this rank gets from others while it is open.

    Attributes:
        bytes: Per kind of collective, by its name in ``torch.ops.c10d``, those of each call; of an all-reduce the size
            of its tensor.

    Args:
        size: How many ranks take part.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.bytes: dict[str, list[int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind, _, name = func._schema.name.partition("::")
        if kind == "c10d":
            received = args[0][0] if isinstance(args[0], (list, tuple)) else args[0]
            share = received.nbytes if name == "allreduce_" else received.nbytes * (self.size - 1) // self.size
            self.bytes.setdefault(name, []).append(share)
        return func(*args, **(kwargs or {}))
