"""A server of vLLM on 127.0.0.1, in a process group of its own that ends with the block it was started for."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

VLLM = (sys.executable, "-m", "vllm.entrypoints.cli.main")
"""The command ``vllm`` of this environment."""
PATIENCE = {signal.SIGINT: 30.0, signal.SIGTERM: 10.0, signal.SIGKILL: 10.0}
"""How a server is ended: the signals, and the seconds that it has for each."""


class ServerError(RuntimeError):
    """A server did not start, or a client of it failed."""


@contextmanager
def serving(model: str, arguments: list[str], log: Path, patience: float = 900.0) -> Iterator[str]:
    """Serves a model, and ends all of the server's processes, whatever happens.

    Args:
        model: As ``vllm serve`` takes it.
        arguments: More of its arguments.
        log: The file that the server writes to.
        patience: Seconds in which it must answer.

    Yields:
        Its address.

    Raises:
        ServerError: It ended, or did not answer in time.
    """
    address = f"http://127.0.0.1:{free_port()}"
    command = [*VLLM, "serve", model, "--host", "127.0.0.1", "--port", address.rpartition(":")[2], *arguments]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as out, _interrupted_by(signal.SIGTERM):
        # Ctrl-C is for us alone: in a group of its own the server goes on until it is ended below.
        server = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            _wait(server, address, log, patience)
            yield address
        finally:
            end(server)


def free_port() -> int:
    """A port of 127.0.0.1 that nothing listens to."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def end(server: subprocess.Popen) -> None:
    """Ends a process and its group, ever more firmly."""
    for kind, seconds in PATIENCE.items():
        if not _lives(server):
            return
        with suppress(ProcessLookupError):
            os.killpg(server.pid, kind)
        until = time.monotonic() + seconds
        while _lives(server) and time.monotonic() < until:
            time.sleep(0.05)


def _lives(server: subprocess.Popen) -> bool:
    """Whether the process, or one that it started, is there; its own end is noticed."""
    server.poll()
    try:
        os.killpg(server.pid, 0)
    except ProcessLookupError:
        return False
    return True


def _wait(server: subprocess.Popen, address: str, log: Path, patience: float) -> None:
    until = time.monotonic() + patience
    while time.monotonic() < until:
        if server.poll() is not None:
            raise ServerError(f"the server ended with {server.returncode}; the end of {log}:\n{tail(log)}")
        with suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            urllib.request.urlopen(f"{address}/health", timeout=5).close()
            return
        time.sleep(0.2)
    raise ServerError(f"the server did not answer within {patience:.0f} s; the end of {log}:\n{tail(log)}")


def tail(log: Path, lines: int = 15) -> str:
    """The last lines of a file."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


@contextmanager
def _interrupted_by(kind: signal.Signals) -> Iterator[None]:
    """A signal that would end this process at once is an interruption here, so that the server is ended, too."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(kind, interrupt)
    try:
        yield
    finally:
        signal.signal(kind, before)
