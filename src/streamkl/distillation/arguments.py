"""The settings of a run as transformers' arguments, and the refusal of arguments that would do nothing."""

from __future__ import annotations

import os
import re
from typing import Any

from transformers import TrainingArguments
from transformers.integrations.integration_utils import get_available_reporting_integrations

from streamkl.distillation import ranks
from streamkl.distillation.settings import FinetuneSettings, RunSettings

REPORTERS = ("tensorboard", "wandb", "mlflow", "comet_ml", "neptune", "clearml", "trackio", "swanlab", "dvclive")
"""Targets of logs that are packages of their own."""
SHARDED = ("fsdp", "fsdp_config", "deepspeed", "parallelism_config")
"""Arguments of transformers that shard a model which is trained."""
INSTEAD = {
    "save_total_limit": "--keep says how many checkpoints are kept",
    "gradient_checkpointing": "`streamkl finetune` has --checkpointing, and nothing else needs it",
    "label_smoothing_factor": "the run has losses of its own",
    "torch_empty_cache_steps": "gradients are made layer by layer",
}
"""Arguments of transformers that a run does not read, and why."""
EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
"""Numbers that YAML 1.1 takes for words, if they have no point or the exponent has no sign."""


def training_arguments(settings: RunSettings) -> TrainingArguments:
    """The settings as transformers' arguments."""
    more = dict(map(_parsed, settings.set))
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
    }  # fmt: skip
    _check_used(more)
    _check_parallel(more, trains_model=isinstance(settings, FinetuneSettings))
    ranks.join(more.get("ddp_timeout", TrainingArguments.ddp_timeout), use_cpu=settings.device == "cpu")
    try:
        args = TrainingArguments(**{**usual, **more, **told})
    except TypeError as error:
        raise ValueError(f"TrainingArguments does not take an argument of set: {error}") from None
    if args.n_gpu > 1:
        args._n_gpu = 1  # a process trains on one device; a launcher starts one process per device
    return args


def _parsed(entry: str) -> tuple[str, Any]:
    """Name and value of ``NAME=VALUE``, whose value is YAML."""
    import yaml

    class Loader(yaml.SafeLoader):
        """Takes ``1e-6`` for a number, too."""

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", EXPONENT, [*"-+.0123456789"])
    name, equals, text = entry.partition("=")
    if not equals:
        raise ValueError(f"set must be NAME=VALUE: got {entry!r}")
    try:
        value = yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"the value of set {entry!r} is not YAML: {error}") from None
    usual = getattr(TrainingArguments, name, None)
    if isinstance(usual, (int, float)) and not isinstance(value, (int, float)):
        raise ValueError(f"set {entry!r} must be a number, such as {name}={usual}")
    return name, value


def _check_used(more: dict[str, Any]) -> None:
    """Refuses what a run does not read."""
    for name in more.keys() & INSTEAD.keys():
        raise ValueError(f"set {name} would have no effect: {INSTEAD[name]}; leave it out")


def _check_parallel(more: dict[str, Any], trains_model: bool) -> None:
    """Refuses what would shard nothing: the run itself shards what it can."""
    named = [name for name in SHARDED if more.get(name)]
    named += [name for name in more if name.startswith("ddp_") and name not in ("ddp_timeout", "ddp_backend")]
    launched = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED")  # set by `accelerate launch`
    named += [name for name in launched if os.environ.get(name, "false").lower() in ("1", "true")]
    if named:
        why, instead = "indexers are small", "shard the frozen model by --shard-teacher"
        if trains_model:
            why, instead = "each process has the whole model", "train adapters by --lora, in less memory"
        raise ValueError(
            f"{', '.join(named)} would have no effect: {why}, and the run itself reduces gradients; "
            f"leave it out, and {instead}"
        )


def _check_installed(names: list[str]) -> None:
    """Refuses to log to packages that are not installed; transformers itself refuses names that it does not know."""
    missing = [name for name in names if name in REPORTERS and name not in get_available_reporting_integrations()]
    if missing:
        raise ValueError(
            f"report_to has packages that are not installed: {', '.join(missing)}; pip install them, or leave them out"
        )
