"""The dense twin of ``streamkl finetune``: the same model on the same text in the same steps, with dense attention.

What finetuning a sparse model was worth is its distance to a dense model that has learned as much. So this trains one,
with the flags of ``streamkl finetune`` (those of indexers and of the selection have no effect)::

    python benchmarks/finetune_dense.py --model path/to/model --text books/train --output dense --length 4096 --steps 30

``dense/model`` is then evaluated beside the sparse model: docs/how-to/finetune.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import typer
from torch import Tensor
from torch.utils.data import Sampler, SequentialSampler
from transformers import AutoModelForCausalLM, Trainer

from streamkl.cli.training import check_inputs, command
from streamkl.distillation.arguments import training_arguments
from streamkl.distillation.results import check_model_place, write_model
from streamkl.distillation.sequences import samples_of
from streamkl.distillation.settings import FinetuneSettings
from streamkl.distillation.training import loadable


class DenseTrainer(Trainer):
    """Trains by the language-model loss, on samples in their order."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler:
        return SequentialSampler(self.train_dataset)  # pyright: ignore[reportArgumentType]

    def compute_loss(self, model: Any, inputs: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        """The loss of every token, as the joint stage has it."""
        ids = inputs["input_ids"]
        return model(input_ids=ids, labels=ids, use_cache=False).loss / self.current_gradient_accumulation_steps


def run(settings: FinetuneSettings) -> None:
    """Trains, and writes the model."""
    check_inputs(settings)
    check_model_place(Path(settings.output) / "model")
    args = training_arguments(settings)
    args.save_strategy = "no"
    _, _, tokenizer = loadable(settings)
    model: Any = AutoModelForCausalLM.from_pretrained(settings.model, dtype=getattr(torch, settings.dtype))
    trainer = DenseTrainer(model, args, train_dataset=samples_of(settings, tokenizer, 1))
    trainer.train()
    print(f"The model is in {write_model(Path(settings.output), settings.model, model.save_pretrained)}.")


if __name__ == "__main__":
    typer.run(command(FinetuneSettings, run, "finetune_dense", __doc__ or ""))
