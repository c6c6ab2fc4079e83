"""Settings of training: a dataclass per command, for its flags and the keys of a YAML file."""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

DATASET = "dataset:"
"""The prefix of a source of the ``datasets`` library: ``dataset:NAME`` or ``dataset:NAME@SPLIT``."""

CHOICES = {
    "dtype": ("bfloat16", "float16", "float32"),
    "row_weight": ("uniform", "late"),
    "activation": ("relu", "none"),
    "on_nan": ("skip", "stop"),
    "keys": ("all", "selected"),
    "device": ("auto", "cpu"),
}
"""Settings with a fixed set of values."""

INITS = ("plain", "teacher")
"""How new indexers get their weights."""

NEEDED = {
    "model": "a folder, or a name on the hub",
    "text": "at least one file, folder or dataset to train on",
    "output": "the folder of results",
}
"""Settings without a default, and their descriptions."""

PLACES = ("model", "output", "init", "indexers")
"""Settings that are folders, or may be, in which ``~`` is the user's."""

LEAST = {
    **dict.fromkeys(("length", "steps", "batch", "accumulation", "heads", "head_dim", "query_block"), 1),
    **dict.fromkeys(("facts", "log_every", "save_every", "keep", "context_parallel", "tensor_parallel"), 1),
    **dict.fromkeys(("warmup", "weight_decay", "max_grad_norm", "seed", "topk", "max_skipped", "threads", "lora"), 0),
}
"""The smallest allowed values."""

FREE = (
    "output", "resume", "dry_run", "report_to", "log_every", "save_every", "keep", "topk", "query_block", "device",
    "threads", "max_skipped", "context_parallel", "tensor_parallel", "shard_teacher",
)  # fmt: skip
"""Settings that do not affect the trained weights."""

FREE_OF_SET = (
    "ddp_timeout", "ddp_backend", "disable_tqdm", "log_level", "log_level_replica", "log_on_each_node", "run_name",
    "project", "trackio_space_id", "dataloader_num_workers", "dataloader_persistent_workers",
    "dataloader_prefetch_factor", "dataloader_pin_memory",
)  # fmt: skip
"""Arguments that ``set`` may name and that do not affect them either."""


def _setting(default: Any, what: str) -> Any:
    """A field with its default and its text in ``--help``."""
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"help": what})
    return field(default=default, metadata={"help": what})


@dataclass
class RunSettings:
    """The settings that all kinds of training have."""

    model: str = _setting("", "The model: a folder, or a name on the hub.")
    text: list[str] = _setting(  # noqa: RUF009
        [],
        "A file of text, a .jsonl file, a folder of such, dataset:NAME@SPLIT, or token shards of `streamkl tokenize`; "
        "one or several.",
    )
    output: str = _setting("", "The folder that checkpoints, curves and results are written to.")
    field: str = _setting("text", "The field of a JSONL line or of a dataset's row that has the text.")
    encoding: str = _setting("utf-8", "The encoding of files of text.")
    length: int = _setting(2048, "Tokens of a sequence; text is packed into such.")
    steps: int = _setting(300, "Optimizer steps.")
    batch: int = _setting(1, "Sequences of a batch on each process, or on those that share them.")
    accumulation: int = _setting(1, "Batches of a step.")
    dtype: str = _setting("bfloat16", "Dtype of the model; indexers have weights in float32.")
    needles: float = _setting(0.0, "The share of samples with numbers hidden in the text and asked for at the end.")
    facts: int = _setting(8, "The most questions of such a sample; some quote the text.")
    answer_weight: float = _setting(1.0, "The weight of the queries of questions and answers.")
    lr: float = _setting(1e-3, "Learning rate.")
    schedule: str = _setting("cosine", "Schedule of the learning rate, by its name in transformers.")
    warmup: int = _setting(10, "Steps in which the learning rate rises.")
    weight_decay: float = _setting(0.0, "Weight decay of AdamW.")
    max_grad_norm: float = _setting(0.0, "Gradients are clipped to this norm, all together; 0 for no clipping.")
    seed: int = _setting(0, "Seed of new weights and of the order of sequences.")
    topk: int = _setting(
        0,
        "Selected keys: for recall and mass, and for the saved indexers; an eighth of the length if 0.",
    )
    query_block: int = _setting(64, "Queries that share their top-k where the trained indexers are used.")
    log_every: int = _setting(10, "Steps between two lines of the log, which have recall and mass.")
    save_every: int = _setting(100, "Steps between two checkpoints.")
    keep: int = _setting(2, "How many checkpoints are kept.")
    report_to: list[str] = _setting([], "Other targets of logs: tensorboard, wandb, ...")  # noqa: RUF009
    on_nan: str = _setting("skip", "What to do with a step whose gradients are not finite: skip, or stop.")
    max_skipped: int = _setting(10, "Steps in a row that may be skipped before the run stops.")
    device: str = _setting("auto", "auto, or cpu to use no accelerator.")
    threads: int = _setting(0, "CPU threads; torch's default if 0.")
    set: list[str] = _setting([], "NAME=VALUE: any other of transformers' TrainingArguments.")  # noqa: RUF009
    resume: bool = _setting(False, "Resume from the last complete checkpoint in the output folder.")
    dry_run: bool = _setting(
        False, "Run three steps, print an estimate of memory and time of the whole run, write nothing."
    )

    def __post_init__(self) -> None:
        for name in PLACES:
            if hasattr(self, name):
                setattr(self, name, os.path.expanduser(getattr(self, name)))
        self.text = [os.path.expanduser(source) for source in self.text]
        missing = [name for name in NEEDED if not getattr(self, name)]
        if missing:
            described = ", ".join(f"{name} ({NEEDED[name]})" for name in missing)
            raise ValueError(f"settings without a default must be given: {described}")
        for name, allowed in CHOICES.items():
            if getattr(self, name, allowed[0]) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}: got {getattr(self, name)!r}")
        for name, least in LEAST.items():
            if getattr(self, name, least) < least:
                raise ValueError(f"{name} must be at least {least}: got {getattr(self, name)}")
        if not 0 <= self.needles <= 1:
            raise ValueError(f"needles must be from 0 to 1: got {self.needles}")
        for name in ("lr", "index_lr", "answer_weight"):
            if not 0 < getattr(self, name, 1.0) < math.inf:
                raise ValueError(f"{name} must be above 0: got {getattr(self, name)}")

    @property
    def measured(self) -> int:
        """How many selected keys recall and mass are measured with."""
        return self.topk or max(1, self.length // 8)

    def training(self) -> dict[str, Any]:
        """The settings that affect the trained weights, for JSON: a run resumes only with the same ones."""
        kept = {name: value for name, value in asdict(self).items() if name not in FREE}
        return {**kept, "set": sorted(entry for entry in self.set if entry.partition("=")[0] not in FREE_OF_SET)}


@dataclass
class Settings(RunSettings):
    """The settings of a distillation run. Every field is a flag of ``streamkl distill`` and a key of its YAML file."""

    heads: int = _setting(1, "Index heads; several are summed with per-query weights.")
    head_dim: int = _setting(64, "Width of an index head.")
    activation: str = _setting("relu", "Activation of index scores: relu or none.")
    init: str = _setting(
        "plain",
        "plain; teacher: from the query and key projections of the layer; or a folder of indexers to train further.",
    )
    temperature: bool = _setting(False, "Learn a temperature of the scores.")
    keys: str = _setting(
        "all",
        "all, or selected: the frozen model attends to the keys that its indexers select per query, and the loss is "
        "over them: --topk of them, or as many as the model itself selects. For indexers that have learned from all "
        "keys.",
    )
    row_weight: str = _setting("uniform", "uniform, or late: queries that see more keys weigh more.")
    context_parallel: int = _setting(1, "Processes that share each sequence; the others train on other sequences.")
    tensor_parallel: int = _setting(1, "Processes among which the heads and widths of the frozen model are shared.")
    shard_teacher: bool = _setting(False, "Shard the frozen model over all processes; each layer is gathered to run.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.context_parallel > 1 and self.tensor_parallel > 1:
            raise ValueError(
                f"context_parallel and tensor_parallel both share each sequence: got {self.context_parallel} and "
                f"{self.tensor_parallel}; choose one"
            )
        if self.init not in INITS and not Path(self.init).is_dir():
            raise ValueError(f"init must be one of {', '.join(INITS)}, or a folder of indexers: got {self.init!r}")

    def training(self) -> dict[str, Any]:
        """The settings that affect the trained weights: the number of selected keys does where only they are seen."""
        return {**super().training(), **({"topk": self.topk} if self.keys == "selected" else {})}


@dataclass
class FinetuneSettings(RunSettings):
    """The settings of the joint stage. Every field is a flag of ``streamkl finetune`` and a key of its YAML file."""

    indexers: str = _setting("", "The folder of the model's indexers; none for a model with indexers of its own.")
    dtype: str = _setting("float32", "Dtype of the weights; `--set bf16=true` computes in bfloat16.")
    lr: float = _setting(1e-5, "Learning rate of the model.")
    index_lr: float = _setting(1e-4, "Learning rate of the indexers.")
    max_grad_norm: float = _setting(
        1.0, "Gradients of the model, and those of its indexers, are clipped to this norm; 0 for no clipping."
    )
    lora: int = _setting(0, "The rank of LoRA's adapters on all linear layers; 0 trains every weight.")
    checkpointing: bool = _setting(False, "Keep no activations inside of layers: run each layer again in the backward.")

    def training(self) -> dict[str, Any]:
        """The settings that affect the trained weights: those of the selection are among them."""
        return {**super().training(), "topk": self.measured, "query_block": self.query_block}


def split_sources(text: list[str]) -> tuple[list[str], list[str]]:
    """The files and folders of a text, and the datasets, without their prefix."""
    files = [source for source in text if not source.startswith(DATASET)]
    return files, [source.removeprefix(DATASET) for source in text if source.startswith(DATASET)]


def helps(kind: type[RunSettings]) -> dict[str, str]:
    """The texts of ``--help``, by the name of a setting."""
    return {f.name: f.metadata["help"] for f in fields(kind)}
