"""``benchmarks/attention_recipes.py``: its students are those it names, and it resumes a run that was stopped."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

ROOT = Path(__file__).parents[2]


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)  # where dataclasses look for their module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tiny() -> ModuleType:
    return load(ROOT / "tests" / "distillation" / "tiny.py")


@pytest.fixture(scope="module")
def recipes() -> ModuleType:
    return load(ROOT / "benchmarks" / "attention_recipes.py")


@pytest.fixture
def model(tiny: ModuleType, tmp_path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny.llama(tmp_path / "llama", num_hidden_layers=3)).eval()


IDS = torch.arange(24)[None] * 5 % 257


@torch.no_grad()
def test_scaled_positions_are_those_of_a_context_four_times_as_long(recipes, model) -> None:
    positions = torch.arange(24)[None]
    wanted = model(IDS, position_ids=positions).logits
    scaled = recipes.scale_positions(model).eval()
    # with a cache: without one, transformers takes positions that are not consecutive for packed sequences
    torch.testing.assert_close(scaled(IDS, position_ids=4 * positions, use_cache=True).logits, wanted)
    assert not torch.allclose(scaled(IDS).logits, wanted, atol=1e-2)


@torch.no_grad()
def test_equal_kv_heads_are_merged_into_one_that_does_the_same(recipes, model) -> None:
    for layer in model.model.layers:
        for projection in (layer.self_attn.k_proj, layer.self_attn.v_proj):
            projection.weight[16:] = projection.weight[:16]
    wanted = model(IDS).logits
    merged = recipes.merge_kv_heads(model).eval()
    assert merged.model.layers[0].self_attn.k_proj.weight.shape == (16, 64)
    torch.testing.assert_close(merged(IDS).logits, wanted)


@torch.no_grad()
def test_two_layers_of_three_are_kept_with_the_first_and_the_last(recipes, model) -> None:
    first, _, last = model.model.layers
    dropped = recipes.drop_layers(model)
    assert list(dropped.model.layers) == [first, last]
    past = dropped(IDS).past_key_values
    assert dropped.config.num_hidden_layers == len(past) == 2


def test_models_of_one_name_are_told_apart_by_their_weights(recipes, tiny, tmp_path) -> None:
    names = [recipes.name_of(tiny.llama(tmp_path / part / "final", **options))
             for part, options in (("a", {}), ("b", {"num_hidden_layers": 3}), ("c", {}))]  # fmt: skip
    assert names[0] == names[2] != names[1]
    assert all(name.startswith("final-") for name in names)


@pytest.mark.slow
def test_a_recipe_is_tuned_compared_and_resumed(recipes, tiny, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(recipes, "RATES", (1e-3, 1e-2))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    text, output = tiny.prose(tmp_path / "prose.txt"), tmp_path / "recipes.jsonl"
    arguments = [
        "continual", "--model", str(tiny.llama(tmp_path / "llama")), "--text", str(text), "--held-out", str(text),
        "--old", str(text), "--output", str(output), "--steps", "3", "--tuning-steps", "2", "--seeds", "2",
        "--tokens", "32", "--batch", "2", "--sequences", "4", "--tuning-sequences", "2", "--dtype", "float32",
        "--adapt", str(text),
    ]  # fmt: skip
    recipes.main(arguments)
    records = recipes.read(output)
    final = [record for record in records if record["trial"]["also"]]
    # Two rates for each loss, two more weights and one more choice of layers; four losses timed; the model as it is;
    # four losses with two seeds.
    assert (len(records), len(final)) == (4 * 2 + 2 + 1 + 4 + 1 + 4 * 2, 8)
    by_loss = {record["trial"]["loss"]: record["trial"] for record in final}
    assert by_loss["lm"]["weight"] == by_loss["logits"]["weight"] == 0 < by_loss["both"]["weight"]
    assert all(len(e["losses"]["old"]) == 4 for record in final for e in record["evaluations"].values())
    table = capsys.readouterr().out
    assert all(
        f"continual, {recipes.name_of(tmp_path / 'llama')}, float32, {name} text, equal {when}" in table
        for name in ("held-out", "old")
        for when in ("steps", "time")
    )
    assert table.count("| both | 2 |") == table.count("| before training | 1 | 0 | 0 |") == 4
    (untrained,) = (record for record in records if record["trial"]["loss"] == recipes.UNTRAINED)
    assert len(untrained["evaluations"]["0"]["losses"]["old"]) == 4

    whole = output.read_text()
    output.write_text(whole[:-20])  # killed while it wrote the last line
    recipes.main(arguments)
    again = recipes.read(output)
    assert len(again) == len(records)
    assert [record["trial"] for record in again] == [record["trial"] for record in records]
    recipes.main(["--output", str(output)])
    assert capsys.readouterr().out.endswith(recipes.tables(again) + "\n")
    assert recipes.tables(again).count("| attention | 0.01 |") >= 1
    half = [{**record, "dtype": "bfloat16"} for record in final if record["trial"]["loss"] == "lm"]
    assert recipes.tables([*again, *half]).startswith(recipes.tables(again)), "dtypes have tables of their own"


def bench_of(recipes, folder: Path, dtype: str = "float32", held_out: int = 8) -> Any:
    """A bench of no model, whose records are in a folder."""
    text = {"held-out": torch.arange(held_out)[None]}
    data = {"model": "model"}
    return recipes.Bench("", data, text["held-out"], text, text, folder / "x.jsonl", folder / "scratch", 1, dtype)


def test_a_record_is_of_the_training_the_tokens_and_the_dtype(recipes, tmp_path) -> None:
    trial, bench = recipes.Trial("rope", "lm", 0, 1e-4, 0.0, "all", 1), bench_of(recipes, tmp_path)
    bench._write(trial, evaluations={"1": {}})
    assert bench.found(trial, ("float32",)) == recipes.read(bench.output)[0]
    assert bench.found(dataclasses.replace(trial, seed=1), ("float32",)) is None
    assert bench_of(recipes, tmp_path, held_out=9).found(trial, ("float32",)) is None
    other = bench_of(recipes, tmp_path, "bfloat16")
    assert other.found(trial, ("bfloat16",)) is None
    assert other.run([trial], dtypes=recipes.DTYPES) == recipes.read(bench.output), "but for a choice"


def test_a_line_that_was_cut_off_is_replaced_by_the_next_one(recipes, tmp_path) -> None:
    output = tmp_path / "x.jsonl"
    recipes.append(output, {"n": 1})
    with output.open("a") as file:
        file.write('{"n": 2')
    assert recipes.read(output) == [{"n": 1}]
    recipes.append(output, {"n": 3})
    assert recipes.read(output) == [{"n": 1}, {"n": 3}]


def test_two_processes_share_the_trainings(recipes, tmp_path, monkeypatch) -> None:
    """Each training runs once; one that its process did not end runs again, and both have all records."""
    trials = [recipes.Trial("rope", "lm", seed, 1e-4, 0.0, "all", 1) for seed in range(6)]
    trained, lost = [], threading.Event()

    def train(bench, trial) -> None:
        trained.append(trial.seed)
        time.sleep(0.05)
        if trial.seed == 1 and not lost.is_set():
            lost.set()
            return  # killed before it wrote a record: the lock is free again
        bench._write(trial, evaluations={"1": {}})

    monkeypatch.setattr(recipes.Bench, "_train", train)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: bench_of(recipes, tmp_path).run(trials), range(2)))
    assert [[record["trial"]["seed"] for record in records] for records in found] == [[*range(6)]] * 2
    assert sorted(trained) == [0, 1, 1, 2, 3, 4, 5]


def test_a_recipe_that_is_unknown_or_without_text_is_refused(recipes, capsys) -> None:
    for arguments, message in (
        (["ropes"], "no recipe ropes"), (["rope"], "needs --text and --held-out"),
        (["--output", "typo.jsonl"], "no records in typo.jsonl"),
    ):  # fmt: skip
        with pytest.raises(SystemExit):
            recipes.main(arguments)
        assert message in capsys.readouterr().err
