"""One run of training, whatever it trains: from settings to results, resumed where there is a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import AutoConfig, AutoTokenizer

from streamkl.distillation import ranks
from streamkl.distillation.arguments import training_arguments
from streamkl.distillation.results import on_first, write_settings
from streamkl.distillation.resuming import alone, check_same, naming_the_last_checkpoint, resumed
from streamkl.distillation.samples import Samples
from streamkl.distillation.sequences import digest
from streamkl.distillation.settings import RunSettings
from streamkl.distillation.trainer import DistillationTrainer
from streamkl.integrations.transformers import probe
from streamkl.integrations.transformers.checkpoint import check_checkpoint, check_length
from streamkl.integrations.transformers.description import fingerprint
from streamkl.integrations.transformers.families import Family, family_of

T = TypeVar("T")


@dataclass(frozen=True)
class Loaded:
    """How a model was when it was loaded.

    Attributes:
        dtypes: The dtype of each weight, by its name.
        implementation: Of attention.
        fingerprint: Some of its weights, to recognise it.
    """

    dtypes: dict[str, torch.dtype]
    implementation: str
    fingerprint: list[float]

    @classmethod
    def of(cls, model: Any, family: Family) -> Loaded:
        """Of a model that was just loaded."""
        dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
        some = fingerprint(model, family).tolist()
        return cls(dtypes, model.config.get_text_config()._attn_implementation, some)

    def restore_dtypes(self, model: Any) -> None:
        """Gives each weight its dtype back."""
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data.to(self.dtypes[name])


@dataclass(frozen=True)
class Prepared:
    """The model and the samples of a run.

    Attributes:
        model: A `Distiller`, or another module that a `DistillationTrainer` takes.
        samples: The samples, in their order.
        loaded: How the model was when it was loaded.
    """

    model: Any
    samples: Samples
    loaded: Loaded


def train(
    settings: RunSettings,
    trainer: Callable[..., DistillationTrainer],
    prepare: Callable[[], Prepared],
    write: Callable[[Prepared], T],
) -> tuple[T | None, int]:
    """Trains.

    Args:
        settings: Of the run.
        trainer: Trains the model.
        prepare: Loads the model and the text, when arguments have been checked and ranks have met.
        write: Writes the results, on the rank that saves.

    Returns:
        The results, ``None`` on other ranks, and how many steps were skipped.
    """
    output = Path(settings.output)
    with naming_the_last_checkpoint(output), ExitStack() as running:
        args = training_arguments(settings)
        ranks.meet()
        running.enter_context(alone(output, args))
        last = resumed(settings, output, args)
        prepared = prepare()
        ranks.limit(args.ddp_timeout)
        about = {
            "settings": settings.training(),
            "global_batch": settings.batch * settings.accumulation * prepared.model.mesh.data,
            "tokens": digest(prepared.samples.sequences),
            "fingerprint": prepared.loaded.fingerprint,
        }
        if last is not None:
            check_same(last, about)
        on_first(args, "its settings could not be written", lambda: write_settings(output, settings))
        training = trainer(
            prepared.model, args, prepared.samples, about=about, topk=settings.measured,
            query_block=settings.query_block, keep=settings.keep,
            max_skipped=settings.max_skipped if settings.on_nan == "skip" else 0,
        )  # fmt: skip
        training.train(resume_from_checkpoint=None if last is None else str(last))
        what = "training has ended, but its results could not be written"
        written = on_first(args, what, lambda: write(prepared))
        training.accelerator.end_training()
    return written, training.skip.skipped


def loadable(settings: RunSettings) -> tuple[Any, Family, Any]:
    """Config, family and tokenizer of a model that can be trained on such sequences; nothing large is loaded."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # tokenizers warn when processes fork after their use
    if settings.threads:
        torch.set_num_threads(settings.threads)
    check_checkpoint(settings.model)
    config = AutoConfig.from_pretrained(settings.model)
    family = family_of(config)
    probe.check_config(config, family)  # before text is packed, or anything large loaded
    check_length(config, settings.length)
    return config, family, AutoTokenizer.from_pretrained(settings.model)
