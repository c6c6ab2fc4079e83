"""What a run does: it learns, resumes, and says what is wrong."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from streamkl import cache
from streamkl.distillation import checkpoints
from streamkl.distillation.arguments import training_arguments
from streamkl.distillation.checkpoints import CheckpointError
from streamkl.distillation.run import distill
from streamkl.sparse import IndexerSelector


def curves(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "curves.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:a top-k of")
@pytest.mark.parametrize("options", [{}, {"heads": 4, "init": "teacher", "temperature": True, "row_weight": "late"}])
def test_indexers_learn_and_their_folder_makes_the_model_sparse(
    tiny: Any, llama: Path, prose: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    from transformers import AutoModelForCausalLM

    from streamkl.integrations.transformers import load_indexers

    result = distill(
        tiny.settings(
            llama, prose, tmp_path / "run", steps=40, lr=1e-2, dtype="bfloat16", log_every=20, save_every=40, **options
        )
    )
    lines = curves(tmp_path / "run")
    first, last = lines[0], lines[-1]
    print({name: (first[name], last[name]) for name in ("kl", "recall", "mass")})
    assert last["kl"] < 0.85 * first["kl"]
    assert last["mass"] > first["mass"]
    assert result.curves is not None
    assert result.curves.exists()
    model = AutoModelForCausalLM.from_pretrained(llama)
    indexers, selector = load_indexers(result.indexers, model)
    assert len(indexers) == 2
    assert selector == IndexerSelector(12, 64, normalise=True)  # an eighth of the length


@pytest.mark.filterwarnings("ignore:a top-k of")
def test_indexers_of_a_folder_are_trained_further_at_another_length(
    tiny: Any, llama: Path, prose: Path, tmp_path: Path
) -> None:
    first = distill(tiny.settings(llama, prose, tmp_path / "first", steps=30, lr=1e-2, heads=2, log_every=30))
    further = {"init": str(first.indexers), "length": 192, "lr": 1e-3}
    distill(tiny.settings(llama, prose, tmp_path / "further", steps=2, log_every=1, **further))
    distill(tiny.settings(llama, prose, tmp_path / "new", steps=1, length=192, heads=2, log_every=1))
    begun, new = (curves(tmp_path / run)[0]["kl"] for run in ("further", "new"))
    print(begun, new)
    assert begun < 0.9 * new
    with pytest.raises(ValueError, match=r"the indexers of .*first/indexers have heads = 2: got 4"):
        distill(tiny.settings(llama, prose, tmp_path / "other", heads=4, **further))
    with pytest.raises(ValueError, match="it is no folder of indexers"):
        distill(tiny.settings(llama, prose, tmp_path / "other", init=str(tmp_path)))


def test_a_nan_in_a_layers_activations_skips_the_step_counts_it_and_leaves_the_weights_whole(
    tiny: Any, prose: Path, tmp_path: Path
) -> None:
    model = broken(tiny, tmp_path, ord("Z"))
    text = tmp_path / "one.txt"
    text.write_text(prose.read_text()[:500] + "Z" + prose.read_text()[:1500])
    settings = tiny.settings(model, text, tmp_path / "run", steps=20, batch=1)
    with pytest.warns(RuntimeWarning, match="gradients are not finite, from layer 0 on; the step is skipped"):
        result = distill(settings)
    assert result.skipped == 1
    assert curves(tmp_path / "run")[-1]["skipped"] == 1
    assert curves(tmp_path / "run")[-1]["kl"] is not None
    from safetensors.torch import load_file

    assert all(x.isfinite().all() for x in load_file(result.indexers / "indexers.safetensors").values())


def test_a_run_that_is_never_finite_stops_with_the_name_of_the_layer(tiny: Any, prose: Path, tmp_path: Path) -> None:
    from streamkl.distillation.trainer import NotFiniteError

    settings = tiny.settings(broken(tiny, tmp_path, ord("a")), prose, tmp_path / "run", max_skipped=2)
    warnings.simplefilter("ignore")  # until the end of the test, as pytest has it
    with pytest.raises(NotFiniteError, match=r"step 3: .* from layer 0 on; 3 steps in a row"):
        distill(settings)


def broken(tiny: Any, folder: Path, byte: int) -> Path:
    """A model in which a character's embedding is not a number."""
    from transformers import AutoTokenizer, LlamaForCausalLM

    path = tiny.llama(folder / "broken")
    model = LlamaForCausalLM.from_pretrained(path)
    token = AutoTokenizer.from_pretrained(path)(chr(byte))["input_ids"][0]
    model.model.embed_tokens.weight.data[token] = torch.nan
    model.save_pretrained(path)
    return path


def test_a_run_resumes_only_if_told_to_and_only_with_the_same_settings_and_text(
    tiny: Any, llama: Path, prose: Path, tmp_path: Path
) -> None:
    run, other = tmp_path / "run", tmp_path / "other.txt"
    other.write_text(prose.read_text()[::-1])
    distill(tiny.settings(llama, prose, run, steps=3))
    with pytest.raises(ValueError, match="holds checkpoints of a run: resume it with --resume"):
        distill(tiny.settings(llama, prose, run, steps=3))
    with pytest.raises(ValueError, match=r"was made with lr = 0.001: got 0.1"):
        distill(tiny.settings(llama, prose, run, steps=3, lr=0.1, resume=True))
    with pytest.raises(ValueError, match="was made with another text"):
        distill(tiny.settings(llama, other, run, steps=3, resume=True))
    with pytest.raises(ValueError, match=r"was made with set = \[\]: got \['adam_beta2=0.95'\]"):
        distill(tiny.settings(llama, prose, run, steps=3, resume=True, set=["disable_tqdm=true", "adam_beta2=0.95"]))
    with pytest.raises(ValueError, match="was made with another model"):
        distill(tiny.settings(finetuned(llama, tmp_path / "finetuned"), prose, run, steps=3, resume=True))


def finetuned(folder: Path, to: Path) -> Path:
    """The model a few steps on: hardly another one."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.001)
    model.save_pretrained(to)
    AutoTokenizer.from_pretrained(folder).save_pretrained(to)
    return to


def test_two_runs_do_not_write_to_one_folder(tiny: Any, llama: Path, prose: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with cache.locked(tmp_path / "run.lock"), pytest.raises(ValueError, match="another run writes to"):
        distill(tiny.settings(llama, prose, run, steps=1))
    assert not run.exists()
    distill(tiny.settings(llama, prose, run, steps=1))


def test_places_may_begin_at_the_users_own(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "indexers").mkdir()
    found = tiny.settings("~/m", ["~/t.txt", "dataset:a~b"], "~/run", init="~/indexers")
    assert (found.model, found.output, found.init) == tuple(f"{tmp_path}/{name}" for name in ("m", "run", "indexers"))
    assert found.text == [f"{tmp_path}/t.txt", "dataset:a~b"]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("learning_rate=1", "set is for arguments without a flag of their own: got learning_rate"),
        ("nonsense=1", "TrainingArguments does not take an argument of set"),
        ("adam_beta2=[", "is not YAML"),
        ("adam_beta2", "set must be NAME=VALUE"),
        ("adam_beta2=high", "set 'adam_beta2=high' must be a number, such as adam_beta2=0.999"),
        ("save_total_limit=1", "set save_total_limit would have no effect: --keep says"),
        ("gradient_checkpointing=true", "`streamkl finetune` has --checkpointing"),
    ],
)
def test_what_set_names_is_an_argument_without_a_flag(entry: str, message: str, tiny: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        training_arguments(tiny.settings(tmp_path, tmp_path, tmp_path / "run", set=[entry]))


@pytest.mark.parametrize("text", ["1e-6", "1.0e-06", "0.000001", "1E-6"])
def test_numbers_may_have_exponents_wherever_they_are(text: str, tiny: Any, tmp_path: Path) -> None:
    entries = [f"adam_epsilon={text}", f"lr_scheduler_kwargs={{min_lr: {text}}}", "run_name=1e-6a"]
    options = {"set": entries, "schedule": "cosine_with_min_lr"}
    args = training_arguments(tiny.settings(tmp_path, tmp_path, tmp_path / "run", **options))
    assert (args.adam_epsilon, args.lr_scheduler_kwargs, args.run_name) == (1e-6, {"min_lr": 1e-6}, "1e-6a")


@pytest.mark.parametrize("entry", ["fsdp=full_shard", "fsdp_config={version: 2}", "ddp_bucket_cap_mb=1"])
def test_settings_that_would_shard_nothing_are_refused(entry: str, tiny: Any, tmp_path: Path) -> None:
    name = entry.partition("=")[0]
    with pytest.raises(ValueError, match=f"{name} would have no effect: indexers are small"):
        training_arguments(tiny.settings(tmp_path, tmp_path, tmp_path / "run", set=[entry]))


def test_logs_go_to_what_is_installed(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamkl.distillation.arguments.get_available_reporting_integrations", lambda: ["mlflow"])
    with pytest.raises(ValueError, match="report_to has packages that are not installed: wandb; pip install them"):
        training_arguments(tiny.settings(tmp_path, tmp_path, tmp_path / "run", report_to=["mlflow", "wandb"]))


def test_what_is_no_model_no_folder_or_too_long_is_refused_in_a_sentence(
    tiny: Any, llama: Path, prose: Path, tmp_path: Path
) -> None:
    for model, output, options, message in (
        (tmp_path / "none", "run", {}, "there is no folder .*none, so no model"),
        (prose.parent, "run", {}, "has no config.json: it is no model"),
        (llama, prose, {}, "prose.txt is a file: output names a folder"),
        (
            llama,
            "run",
            {"length": 100_000},
            "a length of 100,000 tokens is more than the .* that the model was made for",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            distill(tiny.settings(model, prose, tmp_path / output, **options))
    assert not (tmp_path / "run").exists()


def test_results_that_would_have_no_place_are_refused_before_training(
    tiny: Any, llama: Path, prose: Path, tmp_path: Path
) -> None:
    (tmp_path / "run" / "indexers").mkdir(parents=True)
    (tmp_path / "run" / "indexers" / "indexers.json").write_text("mine")
    with pytest.raises(ValueError, match=r"run/indexers is there already and holds no indexers"):
        distill(tiny.settings(llama, prose, tmp_path / "run", steps=1))
    assert not (tmp_path / "run" / "settings.json").exists()


def test_the_last_step_is_measured_whatever_its_number(tiny: Any, llama: Path, prose: Path, tmp_path: Path) -> None:
    distill(tiny.settings(llama, prose, tmp_path / "run", steps=5, log_every=3))
    lines = curves(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 3, 5]
    assert "recall" in lines[-1]
    assert lines[-1]["mass"] != lines[-2]["mass"], "that of the step before, told again"


def test_a_model_that_was_saved_sparse_is_a_dense_teacher(tiny: Any, llama: Path, prose: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from streamkl.integrations.transformers import sparsify
    from streamkl.sparse import WindowSelector

    model = AutoModelForCausalLM.from_pretrained(llama)
    sparsify(model, WindowSelector(2, 1)).save_pretrained(tmp_path / "sparse")
    AutoTokenizer.from_pretrained(llama).save_pretrained(tmp_path / "sparse")
    for folder, run in ((llama, "one"), (tmp_path / "sparse", "other")):
        distill(tiny.settings(folder, prose, tmp_path / run, steps=2))
    assert curves(tmp_path / "one")[-1]["layers"] == curves(tmp_path / "other")[-1]["layers"]


def test_results_without_room_are_written_by_a_resumed_run(
    tiny: Any, llama: Path, prose: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError("No space left on device")

    settings = {"steps": 2, "save_every": 2}
    with monkeypatch.context() as patched:
        patched.setattr("streamkl.distillation.run.write_indexers", full)
        with pytest.raises(CheckpointError, match="training has ended, but its results could not be written"):
            distill(tiny.settings(llama, prose, tmp_path / "run", **settings))
    assert distill(tiny.settings(llama, prose, tmp_path / "run", resume=True, **settings)).indexers.exists()


def test_a_run_does_not_resume_from_a_checkpoint_that_is_not_whole(
    tiny: Any, llama: Path, prose: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    distill(tiny.settings(llama, prose, run, steps=4, save_every=1, keep=4))
    assert checkpoints.latest(run) == run / "checkpoint-4"
    (run / "checkpoint-4" / "complete.json").unlink()
    with (run / "checkpoint-3" / "optimizer.pt").open("r+b") as file:
        file.truncate(100)
    (run / "checkpoint-2" / "indexers" / "indexers.safetensors").unlink()
    assert checkpoints.latest(run) == run / "checkpoint-1"
