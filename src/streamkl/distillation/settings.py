"""Settings of distillation: one dataclass, for the flags of the command and the keys of a YAML file."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any

DATASET = "dataset:"
"""The prefix of a source of the ``datasets`` library: ``dataset:NAME`` or ``dataset:NAME@SPLIT``."""

CHOICES = {
    "dtype": ("bfloat16", "float16", "float32"),
    "init": ("plain", "teacher"),
    "row_weight": ("uniform", "late"),
    "activation": ("relu", "none"),
    "on_nan": ("skip", "stop"),
    "device": ("auto", "cpu"),
}
"""Settings with a fixed set of values."""

NEEDED = {
    "model": "a folder, or a name on the hub",
    "text": "at least one file, folder or dataset to train on",
    "output": "the folder of results",
}
"""Settings without a default, and their descriptions."""

LEAST = {
    **dict.fromkeys(("length", "steps", "batch", "accumulation", "heads", "head_dim", "query_block"), 1),
    **dict.fromkeys(("facts", "log_every", "save_every", "keep"), 1),
    **dict.fromkeys(("warmup", "weight_decay", "max_grad_norm", "seed", "topk", "max_skipped", "threads"), 0),
}
"""The smallest allowed values."""

FREE = (
    "output", "resume", "dry_run", "report_to", "log_every", "save_every", "keep", "topk", "query_block", "device",
    "set", "threads", "max_skipped",
)  # fmt: skip
"""Settings that do not affect the trained weights."""


def _setting(default: Any, what: str) -> Any:
    """A field with its default and its text in ``--help``."""
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"help": what})
    return field(default=default, metadata={"help": what})


@dataclass
class Settings:
    """The settings of a distillation run. Every field is a flag of ``streamkl distill`` and a key of its YAML file."""

    model: str = _setting("", "The frozen model: a folder, or a name on the hub.")
    text: list[str] = _setting(  # noqa: RUF009
        [], "A file of text, a .jsonl file, a folder of such, or dataset:NAME@SPLIT; one or several."
    )
    output: str = _setting("", "The folder that checkpoints, curves and the trained indexers are written to.")
    field: str = _setting("text", "The field of a JSONL line or of a dataset's row that has the text.")
    encoding: str = _setting("utf-8", "The encoding of files of text.")
    length: int = _setting(2048, "Tokens of a sequence; text is packed into such.")
    steps: int = _setting(300, "Optimizer steps.")
    batch: int = _setting(1, "Sequences of a step on each process.")
    accumulation: int = _setting(1, "Batches of a step.")
    dtype: str = _setting("bfloat16", "Dtype of the frozen model; the indexers' own weights are float32.")
    heads: int = _setting(1, "Index heads; several are summed with per-query weights.")
    head_dim: int = _setting(64, "Width of an index head.")
    activation: str = _setting("relu", "Activation of index scores: relu or none.")
    init: str = _setting("plain", "plain, or teacher: from the query and key projections of the layer.")
    temperature: bool = _setting(False, "Learn a temperature of the scores.")
    row_weight: str = _setting("uniform", "uniform, or late: queries that see more keys weigh more.")
    needles: float = _setting(0.0, "The share of samples with numbers hidden in the text and asked for at the end.")
    facts: int = _setting(8, "The most questions of such a sample; some quote the text.")
    answer_weight: float = _setting(1.0, "The weight of the queries of questions and answers.")
    lr: float = _setting(1e-3, "Learning rate.")
    schedule: str = _setting("cosine", "Schedule of the learning rate, by its name in transformers.")
    warmup: int = _setting(10, "Steps in which the learning rate rises.")
    weight_decay: float = _setting(0.0, "Weight decay of AdamW.")
    max_grad_norm: float = _setting(
        0.0, "Gradients of all layers together are clipped to this norm; 0 for no clipping."
    )
    seed: int = _setting(0, "Seed of the indexers' weights and of the order of sequences.")
    topk: int = _setting(
        0,
        "Selected keys, for recall and mass and for the saved indexers; an eighth of the length if 0.",
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
        missing = [name for name in NEEDED if not getattr(self, name)]
        if missing:
            described = ", ".join(f"{name} ({NEEDED[name]})" for name in missing)
            raise ValueError(f"settings without a default must be given: {described}")
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}: got {getattr(self, name)!r}")
        for name, least in LEAST.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}: got {getattr(self, name)}")
        if not 0 <= self.needles <= 1:
            raise ValueError(f"needles must be from 0 to 1: got {self.needles}")
        for name in ("lr", "answer_weight"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0: got {getattr(self, name)}")

    @property
    def measured(self) -> int:
        """How many selected keys recall and mass are measured with."""
        return self.topk or max(1, self.length // 8)

    def training(self) -> dict[str, Any]:
        """The settings that affect the trained weights, for JSON: a run resumes only with the same ones."""
        return {name: value for name, value in asdict(self).items() if name not in FREE}


def split_sources(text: list[str]) -> tuple[list[str], list[str]]:
    """The files and folders of a text, and the datasets, without their prefix."""
    files = [source for source in text if not source.startswith(DATASET)]
    return files, [source.removeprefix(DATASET) for source in text if source.startswith(DATASET)]


def helps() -> dict[str, str]:
    """The texts of ``--help``, by the name of a setting."""
    return {f.name: f.metadata["help"] for f in fields(Settings)}
