"""The trainer of the joint stage: two learning rates, and checkpoints of all weights that are trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import TrainerState

from streamkl.distillation.trainer import DistillationTrainer

WEIGHTS = "trained.safetensors"
"""The weights that are trained, in a checkpoint."""


class JointTrainer(DistillationTrainer):
    """Trains a `JointModel`.

    Args:
        model: The model.
        args: The arguments of a `DistillationTrainer`.
        index_lr: The learning rate of the indexers.
        kwargs: Other arguments of a `DistillationTrainer`.
    """

    def __init__(self, model: Any, *args: Any, index_lr: float, **kwargs: Any) -> None:
        self.index_lr = index_lr
        super().__init__(model, *args, **kwargs)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """The optimizer of the arguments, with a learning rate of their own for the indexers."""
        if self.optimizer is None:
            kind, options = self.get_optimizer_cls_and_kwargs(self.args)
            indexers = list(self.distiller.indexers.parameters())
            own = {id(parameter) for parameter in indexers}
            rest = [p for p in self.distiller.parameters() if p.requires_grad and id(p) not in own]
            groups = [{"params": rest}, {"params": indexers, "lr": self.index_lr}]
            self.optimizer = kind(groups, **{**options, "weight_decay": self.args.weight_decay})
        return self.optimizer

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """Clips the gradients of the model and those of the indexers apart, so that neither scales the other."""
        self.accelerator.unscale_gradients()  # of both, and only once
        groups = self.create_optimizer().param_groups
        norms = [nn.utils.clip_grad_norm_(group["params"], self.args.max_grad_norm) for group in groups]
        return norms[0]

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """Writes the weights that are trained, and no others."""
        folder = Path(output_dir or self.args.output_dir or ".")
        folder.mkdir(parents=True, exist_ok=True)
        if self.args.should_save:
            save_file({name: p.detach().contiguous() for name, p in self._trained().items()}, folder / WEIGHTS)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        folder = Path(resume_from_checkpoint)
        saved, trained = load_file(folder / WEIGHTS), self._trained()
        if saved.keys() != trained.keys():
            odd = sorted(saved.keys() ^ trained.keys())[0]
            raise ValueError(f"{folder} was made with other weights to train, such as {odd}")
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter.copy_(saved[name])
        self._first_step = TrainerState.load_from_json(str(folder / "trainer_state.json")).global_step

    def _trained(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.distiller.named_parameters() if p.requires_grad}
