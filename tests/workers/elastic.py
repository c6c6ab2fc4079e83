"""Runs distillations on several ranks by torchrun's own agent, which forks the ranks instead of starting Python anew.

Every line of its input is a request in JSON, for which it forks an agent: ``ranks``, ``settings``, ``restarts``, and
``folder``, which gets the process ids of the ranks, what they print, the samples they train on, and at last ``ended``:
whether the run succeeded. ``failing`` is a rank that can no longer write files when ``checkpoint-4`` is there. All
are forked from one process that has imported everything and computed nothing, so that each starts in no time.
"""

from __future__ import annotations

import faulthandler
import hashlib
import importlib
import json
import os
import resource
import signal
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from streamkl.cli.distill import run
from streamkl.distillation import Settings
from streamkl.distillation.run import distill  # noqa: F401  imported before the fork
from streamkl.distillation.trainer import DistillationTrainer

for name in (  # which a run imports when it needs them
    "torch._dynamo",
    "torch.distributed.fsdp",
    "transformers.distributed.fsdp",
    "transformers.models.llama.modeling_llama",
):
    importlib.import_module(name)


def counted(folder: Path, rank: int) -> None:
    """Writes down which samples the steps of this rank train on."""
    step = DistillationTrainer.training_step

    def training_step(self: DistillationTrainer, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        with (folder / f"seen-{rank}.jsonl").open("a") as file:
            digests = [hashlib.sha256(row.numpy().tobytes()).hexdigest()[:16] for row in inputs["input_ids"]]
            file.write(json.dumps([self.state.global_step, digests]) + "\n")
        return step(self, model, inputs, num_items_in_batch)

    DistillationTrainer.training_step = training_step


def fail(output: Path) -> None:
    """Lets this process write no file of more than 1,000 bytes from the checkpoint of step 4 on."""
    while not (output / "checkpoint-4").exists():
        time.sleep(0.001)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def wait_for_forks(folder: Path, number: int) -> None:
    """Waits until all ranks of this attempt are forked, before this one connects to the agent.

    The agent looks up the name of each rank that connects; a rank that is forked at that moment inherits the lock of
    glibc's resolver, which nobody will ever open, and hangs in its own first look-up.
    """
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    (folder / f"forked-{attempt}-{number}").touch()
    while len(list(folder.glob(f"forked-{attempt}-*"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.001)


def rank(request: dict[str, Any]) -> None:
    warnings.simplefilter("ignore")
    faulthandler.register(signal.SIGUSR1)  # says where each thread is
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a fork has that of the agent
    number, folder = int(os.environ.get("RANK", "0")), Path(request["folder"])
    (folder / f".pid-{number}").write_text(str(os.getpid()))
    os.replace(folder / f".pid-{number}", folder / f"pid-{number}")  # never half written
    wait_for_forks(folder, number)
    counted(folder, number)
    settings = Settings(**request["settings"])
    if request.get("failing") == number:
        threading.Thread(target=fail, args=(Path(settings.output),), daemon=True).start()
    run(settings)


def launch(request: dict[str, Any]) -> bool:
    folder = Path(request["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=request["ranks"], rdzv_backend="c10d", rdzv_endpoint="localhost:0",
        run_id=str(os.getpid()), max_restarts=request.get("restarts", 0), monitor_interval=0.1, start_method="fork",
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs"), redirects=Std.ALL),
    )  # fmt: skip
    try:
        elastic_launch(config, rank)(request)
    except ChildFailedError:
        return False
    return True


def serve(request: dict[str, Any]) -> None:
    """Runs a request in a process of its own."""
    if os.fork():
        return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    folder = Path(request["folder"])
    try:
        succeeded = launch(request)
        (folder / ".ended").write_text(json.dumps(succeeded))
        os.replace(folder / ".ended", folder / "ended")
    finally:
        os._exit(0)


if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how an agent ended
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        serve(json.loads(line))
