"""A server and all that it started are gone when its block ends, however it ends; one that fails says why."""

import os
import signal
import subprocess
import sys
import urllib.request
from contextlib import nullcontext
from pathlib import Path

import pytest

from streamkl.bench.serve import server
from streamkl.bench.serve.server import ServerError, serving

ANSWERS = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
"""A server with a process of its own, as vLLM has."""


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes a program the command that serves."""

    def take(program: str) -> Path:
        (tmp_path / "serves.py").write_text(program)
        monkeypatch.setattr(server, "VLLM", (sys.executable, str(tmp_path / "serves.py")))
        return tmp_path / "server.log"

    return take


def lives(process: int) -> bool:
    """Whether a process is there and not a zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def child_of(log: Path) -> int:
    return int(log.read_text().split("child", 1)[1].split()[0])


@pytest.mark.parametrize("error", [None, KeyboardInterrupt, ValueError])
def test_the_server_and_its_processes_end_with_the_block(command, error: type[BaseException] | None) -> None:
    log, child = command(ANSWERS), 0
    with nullcontext() if error is None else pytest.raises(error), serving("model", [], log) as address:
        assert urllib.request.urlopen(f"{address}/health", timeout=5).status == 200
        child = child_of(log)
        assert lives(child)
        if error is not None:
            raise error
    assert child
    assert not lives(child)


def test_processes_that_ignore_an_interruption_are_ended_all_the_same(command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "PATIENCE", {signal.SIGINT: 0.3, signal.SIGTERM: 0.3, signal.SIGKILL: 5.0})
    deaf = "import signal\nfor kind in (signal.SIGINT, signal.SIGTERM): signal.signal(kind, signal.SIG_IGN)\n"
    log = command(deaf + ANSWERS)
    with serving("model", [], log):
        child = child_of(log)
    assert not lives(child)


def test_a_server_that_ends_says_why(command) -> None:
    log = command("import sys; sys.exit('the model is not there')")
    with (
        pytest.raises(ServerError, match=r"(?s)ended with 1; the end of .*the model is not there"),
        serving("m", [], log),
    ):
        pass


def test_a_server_that_does_not_answer_is_not_waited_for_for_ever(command) -> None:
    log = command("import time; time.sleep(600)")
    with pytest.raises(ServerError, match="did not answer within 1 s"), serving("m", [], log, patience=1.0):
        pass


def test_a_benchmark_that_is_terminated_ends_its_server(tmp_path: Path) -> None:
    (tmp_path / "serves.py").write_text(ANSWERS)
    log = tmp_path / "server.log"
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom streamkl.bench.serve import server\n"
        f"server.VLLM = (sys.executable, {str(tmp_path / 'serves.py')!r})\n"
        f"with server.serving('m', [], Path({str(log)!r})):\n    print('serves', flush=True)\n    time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as ours:
        assert ours.stdout is not None
        assert ours.stdout.readline() == b"serves\n"
        child = child_of(log)
        assert lives(child)
        os.kill(ours.pid, signal.SIGTERM)
        assert ours.wait(60) != 0
    assert not lives(child)
