"""Ranks that are killed, stop or cannot write: nothing is lost, and nobody waits for ever."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from streamkl.distillation import checkpoints, curves

WORKER = Path(__file__).parents[1] / "workers" / "elastic.py"
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
PATIENCE = 300
"""Seconds after which a run counts as hanging."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    """A process that starts runs."""
    with (tmp_path_factory.mktemp("server") / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, str(WORKER)], env=ONE_THREAD, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=log, text=True, start_new_session=True,
        )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"  # it imports much, which no test's patience should be spent on
    yield process
    os.killpg(process.pid, signal.SIGKILL)  # with the runs of tests that failed
    process.communicate()


class Ranks:
    """A run on several ranks, in a folder of its own, by torchrun's agent."""

    def __init__(self, server: subprocess.Popen[str], folder: Path, settings: Any, **request: Any) -> None:
        self.output, self.folder, self.ranks = Path(settings.output), folder, request["ranks"]
        request = {"folder": str(folder), "settings": dataclasses.asdict(settings), **request}
        assert server.stdin is not None
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()

    def pids(self) -> list[int]:
        """The processes of the ranks that were started last."""
        return [int((self.folder / f"pid-{rank}").read_text()) for rank in range(self.ranks)]

    def at_step(self, step: int) -> None:
        """Waits until a step was logged."""
        until = time.monotonic() + PATIENCE
        while logged(self.output) < step:
            assert time.monotonic() < until, f"step {step} does not come: {self.stacks()}"
            assert not (self.folder / "ended").exists(), f"it ended before step {step}: {self.said()}"
            time.sleep(0.002)

    def send(self, rank: int, what: signal.Signals) -> None:
        """Sends a signal to a rank."""
        os.kill(self.pids()[rank], what)

    def end(self) -> bool:
        """Whether the run succeeded, when it has ended."""
        until = time.monotonic() + PATIENCE
        while not (self.folder / "ended").exists():
            assert time.monotonic() < until, f"it hangs: {self.stacks()}"
            time.sleep(0.01)
        return json.loads((self.folder / "ended").read_text())

    def stacks(self) -> str:
        """Where each rank is, after what it wrote to stderr: what to look at when a run hangs."""
        for rank in range(self.ranks):
            with contextlib.suppress(ProcessLookupError):
                self.send(rank, signal.SIGUSR1)
        time.sleep(1)
        return "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(self.said()))

    def said(self) -> list[str]:
        """What each rank wrote to stderr in its last life."""
        files = [sorted((self.folder / "logs").rglob(f"{rank}/stderr.log")) for rank in range(self.ranks)]
        return [max(found, key=lambda file: file.stat().st_mtime).read_text() for found in files if found]


def logged(output: Path) -> int:
    """The last step that was logged."""
    log = output / "curves.jsonl"
    return log.read_text().count("\n") if log.exists() else 0


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "indexers" / "indexers.safetensors")


def assert_same_bits(one: Path, other: Path, hint: str) -> None:
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first), hint
    assert losses(one) == losses(other), hint


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in curves.read(run / "curves.jsonl")]


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_are_killed_at_random_moments_and_restarted_end_with_the_same_bits(
    server: Any, tiny: Any, llama: Path, prose: Path, tmp_path: Path, request: pytest.FixtureRequest, ranks: int
) -> None:
    kills = 20 if request.config.getoption("--nightly") else 3
    seed = random.randrange(10**6)
    draw, steps = random.Random(seed), 3 * kills + 6
    options = {"steps": steps, "batch": 1, "length": 64, "save_every": 2, "threads": 1, "resume": True}
    whole = Ranks(server, tmp_path / "one", tiny.settings(llama, prose, tmp_path / "whole", **options), ranks=ranks)
    assert whole.end(), whole.said()
    cut = Ranks(
        server, tmp_path / "two", tiny.settings(llama, prose, tmp_path / "cut", **options), ranks=ranks, restarts=kills
    )
    killed = []
    for step in sorted(draw.sample(range(1, steps - 4), kills)):
        cut.at_step(step)
        time.sleep(draw.random() * 0.1)
        rank, before = draw.randrange(ranks), cut.pids()
        cut.send(rank, signal.SIGKILL)
        killed.append((logged(cut.output), rank))
        until = time.monotonic() + PATIENCE
        while any(pid in before for pid in cut.pids()):
            assert time.monotonic() < until, "the ranks are not restarted"
            time.sleep(0.002)
    assert cut.end(), cut.said()
    hint = f"seed {seed}, killed after step and rank {killed}"
    print(hint)
    assert_same_bits(whole.output, cut.output, hint)
    assert not (cut.output / ".writing").exists()


def test_ranks_that_share_sequences_and_the_teacher_and_are_killed_and_restarted_end_with_the_same_bits(
    server: Any, tiny: Any, llama: Path, prose: Path, tmp_path: Path
) -> None:
    options = {
        "steps": 8, "batch": 1, "length": 67, "save_every": 2, "threads": 1, "resume": True, "context_parallel": 2,
        "shard_teacher": True,
    }  # fmt: skip
    whole = Ranks(server, tmp_path / "one", tiny.settings(llama, prose, tmp_path / "whole", **options), ranks=4)
    cut = Ranks(server, tmp_path / "two", tiny.settings(llama, prose, tmp_path / "cut", **options), ranks=4, restarts=1)
    cut.at_step(4)
    cut.send(3, signal.SIGKILL)
    assert cut.end(), cut.said()
    assert whole.end(), whole.said()
    assert_same_bits(whole.output, cut.output, "killed after step 4")
    alone = Ranks(
        server, tmp_path / "alone-ranks",
        tiny.settings(llama, prose, tmp_path / "alone", **{**options, "batch": 2, "context_parallel": 1}), ranks=1,
    )  # fmt: skip
    assert alone.end(), alone.said()
    found = [[[line[name] for name in ("loss", "recall", "mass")] for line in curves.read(run.output / "curves.jsonl")]
             for run in (alone, whole)]  # fmt: skip
    torch.testing.assert_close(*map(torch.tensor, found), rtol=1e-4, atol=0)
    # The two groups of ranks have different samples, and the ranks of a group the same.
    seen = samples(whole, 0, 8)
    assert seen.keys() == samples(alone, 0, 8).keys()
    assert set(seen.values()) == {2}


def test_torchrun_restarts_a_killed_rank_and_the_run_resumes_with_the_same_bits(
    server: Any, tiny: Any, llama: Path, prose: Path, tmp_path: Path
) -> None:
    options = {"steps": 12, "batch": 1, "length": 64, "save_every": 2, "threads": 1}
    whole = Ranks(server, tmp_path / "one", tiny.settings(llama, prose, tmp_path / "whole", **options), ranks=2)
    assert whole.end(), whole.said()
    cut = tmp_path / "cut"
    flags = {"model": llama, "text": prose, "output": cut, **options, "head-dim": 16, "dtype": "float32",
             "device": "cpu", "log-every": 1, "warmup": 2}  # fmt: skip
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1",
        "-m", "streamkl", "distill", "--resume",
        *(part for name, value in flags.items() for part in (f"--{name.replace('_', '-')}", str(value))),
    ]  # fmt: skip
    with (tmp_path / "log").open("w") as log:
        agent = subprocess.Popen(command, env=ONE_THREAD, stdout=log, stderr=log)
    until = time.monotonic() + PATIENCE
    while logged(cut) < 5:
        assert time.monotonic() < until, (tmp_path / "log").read_text()
        time.sleep(0.002)
    os.kill(children(agent.pid)[1], signal.SIGKILL)
    assert agent.wait(PATIENCE) == 0, (tmp_path / "log").read_text()
    assert_same_bits(whole.output, cut, (tmp_path / "log").read_text())


def children(pid: int) -> list[int]:
    """The processes that a process started."""
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=True)
    return [int(word) for word in found.stdout.split()]


@pytest.mark.parametrize(("ranks", "flags"), [(2, {}), (4, {"tensor_parallel": 2})], ids=["2_ranks", "4_by_heads"])
def test_when_a_rank_stops_all_end_within_the_timeout(
    server: Any, tiny: Any, llama: Path, prose: Path, tmp_path: Path, ranks: int, flags: dict[str, int]
) -> None:
    """Ranks that share heads, and shard the model, wait for each other in groups of their own, and for no other."""
    timeout = 8
    settings = tiny.settings(
        llama, prose, tmp_path / "run", steps=10_000, batch=1, length=64, threads=1, log_every=1, save_every=2,
        set=["disable_tqdm=true", f"ddp_timeout={timeout}"], **flags,
    )  # fmt: skip
    run = Ranks(server, tmp_path / "ranks", settings, ranks=ranks)
    run.at_step(5)
    pids, start = run.pids(), time.monotonic()
    run.send(1, signal.SIGSTOP)
    while any(map(is_running, pids)) and time.monotonic() < start + PATIENCE:
        time.sleep(0.01)
    took = time.monotonic() - start
    assert not run.end()
    print(f"{took:.1f} s with a timeout of {timeout} s")
    assert took < timeout + 5
    assert "rank 0: another rank ended, or does not answer" in run.said()[0]
    last = checkpoints.latest(run.output)
    assert last is not None
    assert f"the last good checkpoint is {last}" in run.said()[0].replace("\n", "")


def is_running(pid: int) -> bool:
    """Whether a process has not ended yet; one that its parent has not asked for is a zombie."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_that_cannot_write_ends_all_which_name_it_and_lose_no_checkpoint(
    server: Any, tiny: Any, llama: Path, prose: Path, tmp_path: Path, ranks: int
) -> None:
    settings = tiny.settings(
        llama, prose, tmp_path / "run", steps=1000, batch=1, length=64, threads=1, save_every=2, keep=1000
    )
    run = Ranks(server, tmp_path / "ranks", settings, ranks=ranks, failing=1)
    assert not run.end()
    assert_all_name_it(run, "rank 1: ")


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    """A disk on which not all checkpoints of a run fit."""
    folder = tmp_path / "small"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=500k", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("only root may mount a small disk")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_ends_all_ranks_which_name_the_one_that_wrote_and_lose_no_checkpoint(
    server: Any, tiny: Any, llama: Path, prose: Path, tmp_path: Path, small_disk: Path
) -> None:
    settings = tiny.settings(
        llama, prose, small_disk / "run", steps=1000, batch=1, length=64, threads=1, save_every=2, keep=1000
    )
    run = Ranks(server, tmp_path / "ranks", settings, ranks=2)
    assert not run.end()
    assert_all_name_it(run, "rank ")


def assert_all_name_it(run: Ranks, culprit: str) -> None:
    last = checkpoints.latest(run.output)
    assert last is not None
    said = run.said()
    assert len(said) == run.ranks
    for rank, text in enumerate(said):
        line = next((line for line in text.splitlines() if line.startswith(f"Error: rank {rank}: ")), text)
        assert f"could not be written ({culprit}" in line, line
        assert f"the last good checkpoint is {last}, and is kept" in line, line
        print(line)
    assert not (run.output / ".writing").exists()
    assert all(checkpoints.about(path) is not None for _, path in checkpoints.steps(run.output))


def test_a_run_resumes_on_fewer_ranks_with_the_same_global_batch_and_no_sample_is_lost_or_seen_twice(
    server: Any, tiny: Any, llama: Path, prose: Path, tmp_path: Path
) -> None:
    options = {"steps": 18, "length": 64, "save_every": 2, "threads": 1, "resume": True}
    alone = Ranks(
        server, tmp_path / "alone-ranks", tiny.settings(llama, prose, tmp_path / "alone", batch=4, **options), ranks=1
    )
    assert alone.end(), alone.said()
    run, seen, done = tmp_path / "run", Counter[tuple[int, str]](), 0
    for ranks, until, batch, accumulation in ((4, 6, 1, 1), (2, 12, 1, 2), (1, 18, 2, 2)):
        settings = tiny.settings(llama, prose, run, batch=batch, accumulation=accumulation, **options)
        part = Ranks(server, tmp_path / f"ranks-{ranks}", settings, ranks=ranks)
        if ranks > 1:
            part.at_step(until)
            part.send(ranks - 1, signal.SIGKILL)
            assert not part.end()
        else:
            assert part.end(), part.said()
        last = checkpoints.latest(run)
        assert last is not None
        reached = int(last.name.split("-")[1])
        assert reached > done
        seen += samples(part, done, reached)
        done = reached
    assert seen == samples(alone, 0, 18)
    assert max(seen.values()) == 1, "a sample came twice in a step"
    found = [torch.tensor(losses(folder)) for folder in (tmp_path / "alone", run)]
    print("losses on one rank, and on 4, 2 and 1:", *found, f"{seen.total()} samples, each seen once")
    torch.testing.assert_close(*found, rtol=1e-5, atol=0)


def samples(run: Ranks, first: int, end: int) -> Counter[tuple[int, str]]:
    """How often each sample was trained on in each step, from the first step to one before the end."""
    found: Counter[tuple[int, str]] = Counter()
    for file in run.folder.glob("seen-*.jsonl"):
        for step, digests in map(json.loads, file.read_text().splitlines()):
            if first <= step < end:
                found.update((step, digest) for digest in digests)
    return found
