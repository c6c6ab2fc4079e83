"""Runs distillations in processes of their own, kills them at random moments, and has them resumed.

Forked from one process that has imported everything and computed nothing, so that each starts in no time.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import time
import warnings
from pathlib import Path

from streamkl.distillation import Settings
from streamkl.distillation.run import distill

STEPS = 20


def start(settings: Settings) -> int:
    pid = os.fork()
    if pid:
        return pid
    warnings.simplefilter("ignore")
    code = 1
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            distill(settings)
        code = 0
    finally:
        os._exit(code)


def logged(output: Path) -> int:
    """How many steps were logged."""
    log = output / "curves.jsonl"
    return log.read_text().count("\n") if log.exists() else 0


def main(model: str, text: str, folder: str, seed: int) -> None:
    def settings(output: str, resume: bool = False) -> Settings:
        return Settings(
            model=model, text=[text], output=output, length=64, steps=STEPS, head_dim=16, dtype="float32", device="cpu",
            log_every=1, save_every=2, warmup=2, needles=0.0, set=["disable_tqdm=true"], resume=resume, threads=1,
        )  # fmt: skip

    draw, killed = random.Random(seed), []
    whole, cut = Path(folder) / "whole", Path(folder) / "cut"
    assert os.waitpid(start(settings(str(whole))), 0)[1] == 0
    kills = sorted(draw.sample(range(2, STEPS - 1), 5))
    for kill in kills:
        pid = start(settings(str(cut), resume=True))
        until = time.monotonic() + 60
        while logged(cut) < kill and time.monotonic() < until:
            time.sleep(0.001)
        time.sleep(draw.random() * 0.05)
        os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        assert os.WIFSIGNALED(status), f"it ended before step {kill}"
        killed.append(logged(cut))
    assert os.waitpid(start(settings(str(cut), resume=True)), 0)[1] == 0
    print(json.dumps({"killed": killed}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
