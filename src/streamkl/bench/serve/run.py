"""Starts a dense and a sparse server in turn, and sends both the same requests by vLLM's own client."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from streamkl.bench.machine import facts
from streamkl.bench.serve.records import DENSE, SPARSE, Load, Served
from streamkl.bench.serve.server import VLLM, ServerError, serving

SEEDS = 1000
"""Seeds of the prompts of a length: one for each round, and the last for requests that are not measured."""


@dataclass(frozen=True)
class Job:
    """What is measured.

    Attributes:
        model: The folder of a model, or a name on the hub.
        sparse: ``streamkl`` of the sparse server's ``--hf-overrides``; empty for a model that was saved sparse.
        arguments: Arguments of ``vllm serve`` for both servers.
        loads: The requests.
        rounds: How often both servers are started.
        logs: The folder that servers write to.
    """

    model: str
    sparse: dict[str, Any]
    arguments: tuple[str, ...]
    loads: tuple[Load, ...]
    rounds: int
    logs: Path

    @property
    def settings(self) -> dict[str, Any]:
        """What tells its records from those of other jobs."""
        return {"model": self.model, "sparse": self.sparse, "arguments": list(self.arguments)}

    def overrides(self, kind: str) -> list[str]:
        """The argument of ``vllm serve`` that makes a server dense or sparse."""
        if kind == SPARSE and not self.sparse:
            return []  # as the model was saved
        return ["--hf-overrides", json.dumps({"streamkl": self.sparse if kind == SPARSE else None})]


def run(job: Job, before: list[Served], say: Callable[[str], None]) -> Iterator[Served]:
    """Measures what is missing; whichever server was first in a round is second in the next.

    Args:
        job: What is measured.
        before: Records of earlier runs.
        say: Told of what comes next.

    Raises:
        ServerError: A server did not start, or a request failed.
    """
    done = {(r.kind, r.round, r.load) for r in before if r.settings == job.settings}
    for number in range(job.rounds):
        for kind in (DENSE, SPARSE) if number % 2 == 0 else (SPARSE, DENSE):
            missing = [load for load in job.loads if (kind, number, load) not in done]
            if not missing:
                continue
            named = f"round {number + 1} of {job.rounds}, {kind}"
            say(f"{named}: the server starts")
            arguments = [*job.arguments, *job.overrides(kind)]
            with serving(job.model, arguments, job.logs / f"{kind}-{number}.log") as address:
                for load in missing:
                    said = f"{named}: prompts of {load.prompt_tokens:,} tokens"
                    say(f"{said}, to warm up")
                    # Prompts of one seed begin with the same tokens, which the server would have in its cache.
                    seed = SEEDS * load.prompt_tokens
                    warm_up = Load(load.prompt_tokens, load.output_tokens, 1, 1)
                    send(address, job.model, warm_up, seed + SEEDS - 1)
                    say(said)
                    yield _record(job, kind, number, load, send(address, job.model, load, seed + number))


def send(address: str, model: str, load: Load, seed: int) -> dict[str, Any]:
    """Sends requests by ``vllm bench serve``, and returns what it saves.

    Raises:
        ServerError: It failed, or a request did.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *VLLM, "bench", "serve", "--base-url", address, "--model", model, "--dataset-name", "random",
            "--input-len", str(load.prompt_tokens), "--output-len", str(load.output_tokens), "--ignore-eos",
            "--num-prompts", str(load.requests), "--max-concurrency", str(load.at_once), "--temperature", "0",
            "--seed", str(seed), "--save-result", "--save-detailed", "--result-dir", folder,
            "--result-filename", "result.json", "--disable-tqdm",
        ]  # fmt: skip
        ended = subprocess.run(command, capture_output=True, text=True)
        result = Path(folder) / "result.json"
        if ended.returncode or not result.exists():
            raise ServerError(f"vllm bench serve ended with {ended.returncode}:\n{ended.stderr[-2000:]}")
        found = json.loads(result.read_text())
    failed = [error for error in found["errors"] if error]
    if failed or found["completed"] != load.requests:
        raise ServerError(f"{len(failed)} of {load.requests} requests failed: {failed[0] if failed else found}")
    return found


def _record(job: Job, kind: str, number: int, load: Load, found: dict[str, Any]) -> Served:
    return Served(
        job.settings, kind, number, load, found["ttfts"], [x for each in found["itls"] for x in each],
        found["output_throughput"], facts(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
    )  # fmt: skip
