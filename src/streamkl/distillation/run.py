"""A distillation run, from its settings to a folder of trained indexers."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainingArguments
from transformers.integrations.integration_utils import get_available_reporting_integrations

from streamkl.distillation import checkpoints, curves
from streamkl.distillation.indexers import make_indexers
from streamkl.distillation.model import Distiller
from streamkl.distillation.packing import packed
from streamkl.distillation.samples import Samples
from streamkl.distillation.settings import Settings
from streamkl.distillation.trainer import INDEXERS, DistillationTrainer, write_indexers
from streamkl.integrations.transformers.checkpoint import check_checkpoint, check_length
from streamkl.integrations.transformers.families import GroupedQuery, family_of
from streamkl.integrations.transformers.folder import check_place

MODEL, SETTINGS = "model", "settings.json"
REPORTERS = ("tensorboard", "wandb", "mlflow", "comet_ml", "neptune", "clearml", "trackio", "swanlab", "dvclive")
"""Targets of logs that are packages of their own."""
AGAIN = "--resume continues the run with its settings; another run needs another --output"


@dataclass(frozen=True)
class Result:
    """The results of a run.

    Attributes:
        indexers: The folder of trained indexers, for `streamkl.integrations.transformers.sparsify`.
        model: The folder of the model, for plain transformers, if it has indexers of its own.
        curves: The plot, if there is matplotlib.
        skipped: How many steps were skipped because their gradients were not finite.
    """

    indexers: Path
    model: Path | None
    curves: Path | None
    skipped: int


def distill(settings: Settings) -> Result:
    """Trains indexers for a frozen model; see `Settings`.

    Raises:
        ValueError: A setting, the text or the model is unsuitable, or the output folder holds another run.
        CheckpointError: A checkpoint, or the results, could not be written.
        NotFiniteError: Too many steps in a row had gradients that are not finite.
    """
    output = Path(settings.output)
    if output.exists() and not output.is_dir():
        raise ValueError(f"{output} is a file: output names a folder")
    check_place(output / INDEXERS)  # before it is trained, and not after
    args = training_arguments(settings)
    resumed = _resumed(settings, output, args)
    prepared = prepare(settings, args.world_size)
    if _has_own_indexers(prepared):
        _check_model_place(output / MODEL)
    about = {"settings": settings.training(), "processes": args.world_size, "tokens": prepared.digest}
    if resumed is not None:
        _check_same(resumed, about)
    if args.should_save:
        output.mkdir(parents=True, exist_ok=True)
        (output / SETTINGS).write_text(json.dumps(settings.training(), indent=2) + "\n")
    trainer = DistillationTrainer(
        prepared.model, args, prepared.samples, about=about, topk=settings.measured, query_block=settings.query_block,
        keep=settings.keep, max_skipped=settings.max_skipped if settings.on_nan == "skip" else 0,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=None if resumed is None else str(resumed))
    result = Result(output / INDEXERS, None, None, trainer.skip.skipped)
    if args.should_save:
        result = _write_results(output, prepared, settings, result)
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()
    return result


@dataclass(frozen=True)
class Prepared:
    """The model and the samples of a run."""

    model: Distiller
    samples: Samples
    digest: str
    dtypes: dict[str, torch.dtype]


def prepare(settings: Settings, processes: int = 1) -> Prepared:
    """Loads the model, packs the text and makes the indexers.

    Args:
        settings: Of the run.
        processes: How many processes train together.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # tokenizers warn when processes fork after their use
    if settings.threads:
        torch.set_num_threads(settings.threads)
    check_checkpoint(settings.model)
    config = AutoConfig.from_pretrained(settings.model)
    family = family_of(config)  # before anything large is loaded
    check_length(config, settings.length)
    tokenizer = AutoTokenizer.from_pretrained(settings.model)
    count = settings.steps * settings.batch * settings.accumulation * processes
    sequences = packed(
        tokenizer, settings.text, settings.length, count, field=settings.field, encoding=settings.encoding
    )
    if len(sequences) < settings.batch * settings.accumulation * processes:
        warnings.warn(
            f"the text has {len(sequences)} sequences of {settings.length} tokens, fewer than one step takes: they are "
            f"repeated",
            RuntimeWarning,
            stacklevel=2,
        )
    samples = Samples(
        sequences, count, settings.seed, tokenizer=tokenizer, share=settings.needles, facts=settings.facts,
        answer_weight=settings.answer_weight, late=settings.row_weight == "late",
    )  # fmt: skip
    backbone = AutoModelForCausalLM.from_pretrained(settings.model, dtype=getattr(torch, settings.dtype))
    sparse: Any = getattr(backbone, "streamkl", None)
    if sparse is not None:  # saved as a sparse model; the teacher is dense
        sparse.remove()
    dtypes = {name: parameter.dtype for name, parameter in backbone.named_parameters()}
    model = Distiller(backbone, family, make_indexers(backbone, family, settings))
    return Prepared(model, samples, _digest(sequences), dtypes)


def training_arguments(settings: Settings) -> TrainingArguments:
    """The settings as transformers' arguments."""
    import yaml

    more: dict[str, Any] = {}
    for entry in settings.set:
        name, equals, value = entry.partition("=")
        if not equals:
            raise ValueError(f"set must be NAME=VALUE: got {entry!r}")
        try:
            more[name] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ValueError(f"the value of set {entry!r} is not YAML: {error}") from None
        usual_value = getattr(TrainingArguments, name, None)
        if isinstance(usual_value, (int, float)) and not isinstance(more[name], (int, float)):
            raise ValueError(f"set {entry!r} must be a number, such as {name}={usual_value}")
    _check_installed(settings.report_to)
    told: dict[str, Any] = {
        "output_dir": settings.output, "max_steps": settings.steps, "per_device_train_batch_size": settings.batch,
        "gradient_accumulation_steps": settings.accumulation, "learning_rate": settings.lr,
        "lr_scheduler_type": settings.schedule, "warmup_steps": settings.warmup, "weight_decay": settings.weight_decay,
        "max_grad_norm": settings.max_grad_norm, "seed": settings.seed, "logging_steps": settings.log_every,
        "save_steps": settings.save_every, "report_to": settings.report_to or "none",
        "use_cpu": settings.device == "cpu",
    }  # fmt: skip
    twice = sorted(told.keys() & more.keys())
    if twice:
        raise ValueError(f"set is for arguments without a flag of their own: got {', '.join(twice)}")
    usual = {
        "logging_first_step": True, "remove_unused_columns": False, "dataloader_pin_memory": False,
        "ddp_find_unused_parameters": False,
    }  # fmt: skip
    try:
        return TrainingArguments(**{**usual, **more, **told})
    except TypeError as error:
        raise ValueError(f"TrainingArguments does not take an argument of set: {error}") from None


def _check_installed(names: list[str]) -> None:
    """Refuses to log to packages that are not installed; transformers itself refuses names that it does not know."""
    missing = [name for name in names if name in REPORTERS and name not in get_available_reporting_integrations()]
    if missing:
        raise ValueError(
            f"report_to has packages that are not installed: {', '.join(missing)}; pip install them, or leave them out"
        )


def _resumed(settings: Settings, output: Path, args: TrainingArguments) -> Path | None:
    """The checkpoint to resume from.

    Raises:
        ValueError: There are checkpoints, and the run was not told to resume.
    """
    if not settings.resume:
        if checkpoints.steps(output):
            raise ValueError(f"{output} holds checkpoints of a run: resume it with --resume, or name another folder")
        return None
    if args.should_save:
        checkpoints.clean(output)
    return checkpoints.latest(output)


def _check_same(folder: Path, about: dict[str, Any]) -> None:
    """Refuses to resume with other settings or another text than a checkpoint was made with."""
    then = checkpoints.about(folder)
    assert then is not None, "it was found because it is whole"
    where = {"model", "text", "field", "encoding", "on_nan"}  # the weights and the tokens are compared instead
    for name, value in about["settings"].items():
        if name not in where and then["settings"].get(name) != value:
            raise ValueError(f"{folder} was made with {name} = {then['settings'].get(name)}: got {value}; {AGAIN}")
    if then["processes"] != about["processes"]:
        raise ValueError(f"{folder} was made by {then['processes']} processes: got {about['processes']}; {AGAIN}")
    if then["tokens"] != about["tokens"]:
        raise ValueError(f"{folder} was made with another text, or another tokenizer; {AGAIN}")


def _write_results(output: Path, prepared: Prepared, settings: Settings, result: Result) -> Result:
    try:
        write_indexers(output / INDEXERS, prepared.model, settings.measured, settings.query_block)
        folder = _write_model(output, prepared, settings) if _has_own_indexers(prepared) else None
        return Result(result.indexers, folder, curves.draw(output), result.skipped)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(output / checkpoints.STAGING, ignore_errors=True)
        raise checkpoints.CheckpointError(
            f"training has ended, but its results could not be written ({error}); make room, and --resume writes them"
        ) from error


def _write_model(output: Path, prepared: Prepared, settings: Settings) -> Path:
    """Writes a model with its trained indexers, under another name until it is complete."""
    staged, folder, backbone = output / checkpoints.STAGING / MODEL, output / MODEL, prepared.model.backbone
    for name, parameter in backbone.named_parameters():
        parameter.data = parameter.data.to(prepared.dtypes[name])
    backbone.set_attn_implementation("sdpa")
    backbone.save_pretrained(staged)
    AutoTokenizer.from_pretrained(settings.model).save_pretrained(staged)
    checkpoints.finish(staged, folder, {})
    shutil.rmtree(staged.parent)
    return folder


def _has_own_indexers(prepared: Prepared) -> bool:
    return not isinstance(prepared.model.family, GroupedQuery)


def _check_model_place(folder: Path) -> None:
    """Refuses to replace a model, or anything else, that no run wrote."""
    if folder.exists() and not (folder / checkpoints.MARKER).is_file():
        raise ValueError(f"{folder} is there already and was not written by a run: choose another output folder")


def _digest(sequences: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(sequences).data).hexdigest()
