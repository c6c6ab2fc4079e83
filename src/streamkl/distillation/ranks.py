"""What the ranks of a run do together: they join with a timeout, and agree on the outcome of what some of them did."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_peers: list[Any] = []
"""The machine and the process id of each rank."""


class RankError(RuntimeError):
    """Another rank ended, or does not answer; the message says which rank noticed."""


def join(timeout: float, *, use_cpu: bool) -> None:
    """Joins the ranks that a launcher started, with a timeout that holds on CPUs too.

    transformers passes its ``ddp_timeout`` on for GPUs alone, and uses a process group that is there already.

    Args:
        timeout: Seconds that a rank waits for another one.
        use_cpu: Whether the run uses no accelerator.
    """
    is_launched = all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    on_cpu = use_cpu or not torch.accelerator.is_available()
    if not (is_launched and on_cpu) or int(os.environ["WORLD_SIZE"]) == 1 or dist.is_initialized():
        return
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    limit = timedelta(seconds=timeout)
    store, rank, world_size = next(rendezvous("env://", timeout=limit))
    # torchrun may keep its store when it restarts ranks: those of the attempt before are not to be found in it.
    store = PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)


def limit(timeout: float) -> None:
    """Gives every group that this rank is in the timeout: PyTorch makes those of a mesh with a default of its own."""
    from torch.distributed.distributed_c10d import _set_pg_timeout, _world

    for group in _world.pg_map if are_joined() else ():
        _set_pg_timeout(timedelta(seconds=timeout), group)


def are_joined() -> bool:
    """Whether a launcher started this process, alone or with others."""
    return dist.is_available() and dist.is_initialized()


def count() -> int:
    """How many ranks there are."""
    return dist.get_world_size() if are_joined() else 1


def number() -> int:
    """The number of this rank."""
    return dist.get_rank() if count() > 1 else 0


def prefix() -> str:
    """What a message of this rank starts with; nothing if there is one rank."""
    is_one_of_many = int(os.environ.get("WORLD_SIZE", "1")) > 1  # they may not have joined yet
    return f"rank {os.environ.get('RANK', '0')}: " if is_one_of_many else ""


def meet() -> None:
    """Tells all ranks where each runs, for `wake`. All ranks call it."""
    if count() > 1:
        found: list[Any] = [None] * count()
        dist.all_gather_object(found, (socket.gethostname(), os.getpid()))
        _peers[:] = found


def wake() -> None:
    """Continues ranks of this machine that were stopped, so that they find that the others have ended, and end too.

    A launcher asks them to end, which a process that is stopped does not hear: torchrun waits half a minute for it.
    """
    for host, process in _peers:
        if host == socket.gethostname() and process != os.getpid():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGCONT)


def agree(error: Exception | None) -> str | None:
    """What went wrong on any rank, with the numbers of the ranks; ``None`` if nothing did. All ranks call it.

    No rank returns before all have called it, so that none removes what another still writes.
    """
    said = None if error is None else str(error) or type(error).__name__
    if count() == 1:
        return said
    found: list[Any] = [None] * count()
    dist.all_gather_object(found, said)
    wrong = [f"rank {rank}: {text}" for rank, text in enumerate(found) if text is not None]
    return "; ".join(wrong) or None


def same(value: Any) -> Any:
    """The value of rank 0, on all ranks, which all call it."""
    if count() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def is_lost(error: BaseException) -> bool:
    """Whether an error of torch.distributed says that another rank ended or does not answer."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)
