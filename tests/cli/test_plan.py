"""``streamkl plan``: what it prints, what it advises, and what it refuses."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from streamkl.cli import app

ROOT = Path(__file__).parents[2]
QWEN = ROOT / "benchmarks" / "configs" / "qwen3-30b-a3b.json"
SMALL = {
    "model_type": "llama", "num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9,
    "num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 49152, "tie_word_embeddings": True,
}  # fmt: skip


def call(*words: str) -> Any:
    return CliRunner().invoke(app, ["plan", *words])


def figures(*words: str) -> dict[str, Any]:
    result = call(*words, "--json")
    assert result.exit_code in (0, 1), result.output
    return json.loads(result.output)


@pytest.fixture
def small(tmp_path: Path) -> str:
    """A model that one device holds."""
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    return str(tmp_path)


def test_it_prints_memory_traffic_and_times_that_are_called_assumed_and_the_command_to_run() -> None:
    result = call("--model", str(QWEN), "--tokens", "1M", "--gpus", "64", "--heads", "4")
    assert result.exit_code == 0, result.output
    for words in (
        "30.5 billion frozen weights", "1,048,576 tokens on 64 GPUs: 16 x 4 (data x context parallel), teacher sharded",
        "memory per rank", "received by a rank", "s, assumed", "Assumed, not measured.",
        "torchrun --nnodes 8 --nproc-per-node 8",
        "--length 1048576 --heads 4 --head-dim 64 --context-parallel 4 --shard-teacher",
    ):  # fmt: skip
        assert words in result.output, words
    assert "The model was made for 40,960 tokens, and `streamkl distill` refuses longer sequences" in result.output
    assert "-m streamkl distill --model MODEL" in result.output, "the config lies apart from the model"


def test_where_one_device_is_enough_it_says_so_and_shards_nothing(small: str) -> None:
    result = call("--model", small, "--tokens", "128K")
    assert result.exit_code == 0, result.output
    assert "One device is enough: nothing is sharded." in result.output
    command = f"streamkl distill --model {small} --text TEXT --output OUTPUT --length 131072 --heads 1 --head-dim 64\n"
    assert command in result.output
    assert "made for" not in result.output, "its config does not say for how many tokens"
    assert "received by a rank" not in result.output
    assert "One device is enough; the others train" in call("--model", small, "--tokens", "4096", "--gpus", "4").output


def test_it_takes_the_fewest_ranks_per_sequence_that_fit_and_shards_the_teacher_only_where_it_has_to(
    small: str,
) -> None:
    chosen = {}
    for memory in ("80", "20", "10", "7"):
        found = figures("--model", small, "--tokens", "1M", "--gpus", "8", "--memory", memory)
        chosen[memory] = (found["run"]["context"], found["run"]["sharded"], found["fits"])
        assert found["fits"] == (found["memory"]["peak"] <= float(memory) * 0.9e9)
    assert chosen["80"] == (1, False, True)
    contexts = [context for context, *_ in chosen.values()]
    assert contexts == sorted(contexts)
    assert contexts[-1] > 1
    large = figures("--model", str(QWEN), "--tokens", "4096", "--gpus", "8", "--memory", "24")
    assert (large["run"]["context"], large["run"]["sharded"], large["fits"]) == (1, True, True)


def test_where_nothing_fits_it_says_by_how_much_and_exits_with_1(small: str) -> None:
    result = call("--model", small, "--tokens", "1M", "--memory", "1")
    assert result.exit_code == 1
    assert re.search(r"It does not fit: the smallest peak is [\d.]+ GB, and a GPU has 0.9 GB", result.output)


def test_a_layout_that_is_given_is_kept(small: str) -> None:
    words = ("--model", small, "--tokens", "4096", "--gpus", "8", "--context-parallel", "4", "--shard-teacher")
    found = figures(*words)
    assert (found["run"]["data"], found["run"]["context"], found["run"]["sharded"]) == (2, 4, True)
    assert found["flags"][-3:] == ["--context-parallel", "4", "--shard-teacher"]


def test_a_models_own_indexers_are_planned_and_the_file_has_what_is_printed(tmp_path: Path) -> None:
    words = ("--model", str(ROOT / "benchmarks" / "configs" / "deepseek-v3.2.json"), "--tokens", "128K", "--gpus", "64")
    found = figures(*words, "--output", str(tmp_path / "plan.json"))
    assert (found["run"]["index_heads"], found["run"]["index_dim"]) == (64, 128)
    assert json.loads((tmp_path / "plan.json").read_text()) == found


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--tokens", "some"), "tokens must be a whole number above 0, such as 4096, 128K or 1M: got 'some'"),
        (("--tokens", "1K", "--gpus", "6", "--context-parallel", "4"), "4 x 1 must divide the number of GPUs: got 6"),
        (("--tokens", "1K", "--dtype", "int8"), "dtype must be one of bfloat16, float16, float32: got 'int8'"),
        (("--tokens", "1K", "--loss", "0"), "loss must be a share, above 0 and up to 1: got 0.0"),
        (("--tokens", "1K", "--memory", "-1"), "memory must be above 0: got -1.0"),
        (("--tokens", "1K", "--headroom", "1"), "headroom must be a share, from 0 to below 1: got 1.0"),
        (
            ("--tokens", "1K", "--gpus", "6", "--tensor-parallel", "2"),
            "tensor_parallel = 2 does not divide the 9 query",
        ),
        (("--tokens", "1K", "--latent"), "a llama model has no latent attention"),
        (("--tokens", "_"), "tokens must be a whole number above 0, such as 4096, 128K or 1M: got '_'"),
        (("--tokens", "1K", "--output", "/nowhere/plan.json"), "the plan cannot be written"),
        (
            ("--tokens", "1K", "--gpus", "9", "--context-parallel", "3", "--tensor-parallel", "3"),
            "both share each sequence: got 3 and 3",
        ),
    ],
)
def test_wrong_options_are_errors_of_the_user(small: str, words: tuple[str, ...], message: str) -> None:
    result = call("--model", small, *words)
    assert result.exit_code == 2
    assert message in result.output


def test_a_sequence_of_a_model_with_windows_is_shared_as_distill_shares_it(tmp_path: Path) -> None:
    windows = {**SMALL, "layer_types": ["sliding_attention", "full_attention"] * 15, "sliding_window": 512}
    (tmp_path / "config.json").write_text(json.dumps(windows))
    words = ("--model", str(tmp_path), "--tokens", "256K", "--gpus", "4")
    whole = figures(*words)
    assert whole["run"]["context"] == 1
    less = str(0.7 * whole["memory"]["peak"] / 0.9e9)
    found = figures(*words, "--memory", less)
    assert (found["run"]["context"], found["fits"]) == (2, True)
    layer, learning = found["traffic"]["layer"], found["traffic"]["learning"]
    assert learning == 15 * (found["traffic"]["layer_total"] + 4) + 15 * (layer["keys"] + layer["values"])


def test_a_command_starts_as_many_processes_as_there_are_gpus(small: str) -> None:
    for gpus, launched in (
        ("8", "--nproc-per-node 8"),
        ("12", "--nnodes 2 --nproc-per-node 6"),
        ("24", "--nnodes 3 --nproc-per-node 8"),
        ("11", "--nnodes 11 --nproc-per-node 1"),
    ):
        assert f"torchrun {launched} " in call("--model", small, "--tokens", "1K", "--gpus", gpus).output


def test_ranks_that_share_heads_are_not_told_to_share_sequences_too_which_distill_refuses(small: str) -> None:
    words = ("--model", small, "--tokens", "1M", "--gpus", "12", "--tensor-parallel", "3", "--memory", "4")
    found = figures(*words)
    assert not found["fits"]
    assert (found["run"]["data"], found["run"]["context"], found["run"]["tensor"]) == (4, 1, 3)


def digits(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds < 10 else f"{seconds:,.1f}" if seconds < 100 else f"{seconds:,.0f}"


def row(found: dict[str, Any]) -> str:
    """A row of the cost table, without its first cell."""
    run, memory, seconds, traffic = (found[name] for name in ("run", "memory", "seconds", "traffic"))
    layout = f"{run['data']} x {run['context']}{', sharded' if run['sharded'] else ''}"
    parts = " / ".join(digits(seconds[name]) for name in ("projections", "attention", "loss", "keys", "rest"))
    peak = f"{memory['peak'] / 1e9:.0f} GB{'' if found['fits'] else ', does not fit'}"
    return (
        f"{layout} | {peak} | {traffic['layer_total'] / 1e6:,.0f} MB | {parts} | {digits(seconds['step'])} | "
        f"{found['tokens_per_second']:,.0f} | {found['gpu_hours_per_billion_tokens']:,.0f} |"
    )


def test_the_table_of_the_page_is_what_its_commands_print(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    section = page[page.index("## What a step costs") :]
    *_, block = re.findall(r"```bash\n(streamkl plan .*?)```", section[: section.index("| run |")], re.S)
    commands = [shlex.split(line, comments=True)[2:] for line in block.strip().splitlines()]
    table = section[section.index("| run |") :].split("\n\n")[0].splitlines()[2:]
    assert len(commands) == len(table) == 7
    for words, line in zip(commands, table, strict=True):
        assert line.split(" | ", 1)[1] == row(figures(*words)), words
