"""Runs that end before their time, and runs on several processes."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

WORKERS = Path(__file__).parents[1] / "workers"
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "indexers" / "indexers.safetensors")


@pytest.mark.slow
def test_a_run_killed_five_times_and_resumed_ends_with_the_same_bits(llama: Path, prose: Path, tmp_path: Path) -> None:
    seed = random.randrange(10**6)
    command = [sys.executable, str(WORKERS / "killed.py"), str(llama), str(prose), str(tmp_path), str(seed)]
    done = subprocess.run(command, env=ONE_THREAD, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"seed {seed}\n{done.stdout}\n{done.stderr}"
    print(f"seed {seed}, killed after steps {json.loads(done.stdout.splitlines()[-1])['killed']}")
    whole, cut = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert whole.keys() == cut.keys()
    assert all(torch.equal(whole[name], cut[name]) for name in whole), f"seed {seed}"
    lines = [(tmp_path / run / "curves.jsonl").read_text() for run in ("whole", "cut")]
    assert [json.loads(line)["kl"] for line in lines[0].splitlines()] == [
        json.loads(line)["kl"] for line in lines[1].splitlines()
    ], f"seed {seed}"
    assert not (tmp_path / "cut" / ".writing").exists()


@pytest.fixture(params=["full disk", "file too large"])
def little_room(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """A folder on which a run's checkpoints do not all fit, and how many of them are kept."""
    if request.param == "file too large":  # trainer_state.json grows with each step, and the others do not
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (62_000, hard))
        yield tmp_path / "run"
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        return
    folder = tmp_path / "small"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("only root may mount a small disk")
    yield folder / "run"
    subprocess.run(["umount", folder], check=True)


@pytest.mark.slow
def test_a_run_without_room_keeps_its_last_good_checkpoint_and_says_so(
    tiny: Any, llama: Path, prose: Path, little_room: Path
) -> None:
    from streamkl.distillation import checkpoints
    from streamkl.distillation.checkpoints import CheckpointError
    from streamkl.distillation.run import distill

    settings = tiny.settings(llama, prose, little_room, steps=300, save_every=4, keep=1000)
    with pytest.raises(CheckpointError) as raised:
        distill(settings)
    last = checkpoints.latest(little_room)
    assert last is not None
    assert f"the last good checkpoint is {last}, and is kept" in str(raised.value)
    print(raised.value)
    assert not (little_room / ".writing").exists()
    assert checkpoints.about(last)["step"] == int(last.name.split("-")[1])  # pyright: ignore[reportOptionalSubscript]


@pytest.mark.slow
def test_two_processes_have_the_losses_of_one_with_the_same_global_batch(
    tiny: Any, llama: Path, prose: Path, tmp_path: Path
) -> None:
    from streamkl.distillation.run import distill

    alone, together = tmp_path / "alone", tmp_path / "together"
    options = {"steps": 6, "needles": 0.5, "answer_weight": 4.0, "length": 288, "accumulation": 2}
    distill(tiny.settings(llama, prose, alone, batch=2, **options))
    command = [
        sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1",
        "--mixed_precision", "no", "--dynamo_backend", "no", "--num_cpu_threads_per_process", "1", "-m", "streamkl",
        "distill", "--model", str(llama), "--text", str(prose), "--output", str(together), "--batch", "1",
        "--head-dim", "16", "--dtype", "float32", "--log-every", "1", "--warmup", "2", "--device", "cpu",
        *(part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))),
    ]  # fmt: skip
    done = subprocess.run(command, env=ONE_THREAD, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (together / "checkpoint-6" / "rng_state_1.pth").exists(), "there was one process"
    found = [
        torch.tensor([json.loads(line)["loss"] for line in (run / "curves.jsonl").read_text().splitlines()])
        for run in (alone, together)
    ]
    print("losses of one and of two:", *found)
    assert len(found[0]) == 6
    torch.testing.assert_close(*found, rtol=1e-5, atol=0)
    one, two = weights(alone), weights(together)
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=0, atol=1e-4)  # a tenth of a step
