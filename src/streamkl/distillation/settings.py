"""What a distillation run is told: one dataclass, of which the command line's flags and a YAML file's keys are made."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any

DATASET = "dataset:"
"""What a source of the ``datasets`` library begins with: ``dataset:NAME`` or ``dataset:NAME@SPLIT``."""

CHOICES = {
    "dtype": ("bfloat16", "float16", "float32"),
    "init": ("plain", "teacher"),
    "row_weight": ("uniform", "late"),
    "activation": ("relu", "none"),
    "on_nan": ("skip", "stop"),
    "device": ("auto", "cpu"),
}
"""Settings that are one of a few words."""

NEEDED = {
    "model": "a folder, or a name on the hub",
    "text": "at least one file, folder or dataset to train on",
    "output": "the folder that results go to",
}
"""Settings without a default, and what they are."""

LEAST = {
    **dict.fromkeys(("length", "steps", "batch", "accumulation", "heads", "head_dim", "query_block"), 1),
    **dict.fromkeys(("facts", "log_every", "save_every", "keep"), 1),
    **dict.fromkeys(("warmup", "weight_decay", "max_grad_norm", "seed", "topk", "max_skipped", "threads"), 0),
}
"""The least that numbers may be."""

FREE = (
    "output", "resume", "dry_run", "report_to", "log_every", "save_every", "keep", "topk", "query_block", "device",
    "set", "threads", "max_skipped",
)  # fmt: skip
"""Settings that do not decide the trained weights."""


def _told(default: Any, what: str) -> Any:
    """A field with its default and what ``--help`` says of it."""
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"help": what})
    return field(default=default, metadata={"help": what})


@dataclass
class Settings:
    """A distillation run. Every field is a flag of ``streamkl distill`` and a key of its YAML file."""

    model: str = _told("", "The frozen model: a folder, or a name on the hub.")
    text: list[str] = _told(  # noqa: RUF009
        [], "A file of text, a .jsonl file, a folder of such, or dataset:NAME@SPLIT; one or several."
    )
    output: str = _told("", "The folder that checkpoints, curves and the trained indexers are written to.")
    field: str = _told("text", "The field of a JSONL line or of a dataset's row that has the text.")
    encoding: str = _told("utf-8", "The encoding of files of text.")
    length: int = _told(2048, "Tokens of a sequence; text is packed into such.")
    steps: int = _told(300, "Optimizer steps.")
    batch: int = _told(1, "Sequences of a step on each process.")
    accumulation: int = _told(1, "Batches of a step.")
    dtype: str = _told("bfloat16", "Of the frozen model; the indexers' own weights are float32.")
    heads: int = _told(1, "Index heads; several are added up with weights that the hidden state chooses.")
    head_dim: int = _told(64, "Width of an index head.")
    activation: str = _told("relu", "Of index scores: relu or none.")
    init: str = _told("plain", "plain, or teacher: from the query and key projections of the layer.")
    temperature: bool = _told(False, "Learn a temperature of the scores.")
    row_weight: str = _told("uniform", "uniform, or late: queries that see more keys weigh more.")
    needles: float = _told(0.0, "The share of samples with numbers hidden in the text and asked for at the end.")
    facts: int = _told(8, "How many questions such a sample asks at most; some quote the text.")
    answer_weight: float = _told(1.0, "How much the queries of questions and answers weigh.")
    lr: float = _told(1e-3, "Learning rate.")
    schedule: str = _told("cosine", "Of the learning rate, by the name that transformers has for it.")
    warmup: int = _told(10, "Steps in which the learning rate rises.")
    weight_decay: float = _told(0.0, "Of AdamW.")
    max_grad_norm: float = _told(0.0, "Gradients of all layers together are clipped to it; 0 for not at all.")
    seed: int = _told(0, "Of the indexers' weights and of the order of sequences.")
    topk: int = _told(
        0,
        "Keys that recall and mass are measured with, and that the trained indexers are saved with; an eighth of the "
        "length if 0.",
    )
    query_block: int = _told(64, "Queries that share a list of keys where the trained indexers are used.")
    log_every: int = _told(10, "Steps between two lines of the log, for which recall and mass are measured.")
    save_every: int = _told(100, "Steps between two checkpoints.")
    keep: int = _told(2, "How many checkpoints are kept.")
    report_to: list[str] = _told([], "What logs go to besides: tensorboard, wandb, ...")  # noqa: RUF009
    on_nan: str = _told("skip", "What a step does whose gradients are not finite: skip, or stop.")
    max_skipped: int = _told(10, "Steps in a row that may be skipped before the run stops.")
    device: str = _told("auto", "auto, or cpu where an accelerator is not wanted.")
    threads: int = _told(0, "CPU threads; what torch takes if 0.")
    set: list[str] = _told([], "NAME=VALUE: any other of transformers' TrainingArguments.")  # noqa: RUF009
    resume: bool = _told(False, "Go on from the last complete checkpoint in the output folder.")
    dry_run: bool = _told(False, "Run three steps, print what memory and time the whole run would take, write nothing.")

    def __post_init__(self) -> None:
        missing = [name for name in NEEDED if not getattr(self, name)]
        if missing:
            told = ", ".join(f"{name} ({NEEDED[name]})" for name in missing)
            raise ValueError(f"settings without a default must be given: {told}")
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
        """How many keys recall and mass are measured with."""
        return self.topk or max(1, self.length // 8)

    def training(self) -> dict[str, Any]:
        """What decides the trained weights, as JSON has it: a run is resumed with the same."""
        return {name: value for name, value in asdict(self).items() if name not in FREE}


def split_sources(text: list[str]) -> tuple[list[str], list[str]]:
    """The files and folders of a text, and the datasets, without what marks them as such."""
    files = [source for source in text if not source.startswith(DATASET)]
    return files, [source.removeprefix(DATASET) for source in text if source.startswith(DATASET)]


def helps() -> dict[str, str]:
    """What ``--help`` says, by the name of a setting."""
    return {f.name: f.metadata["help"] for f in fields(Settings)}
