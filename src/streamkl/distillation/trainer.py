"""Hugging Face's trainer, with checkpoints of only the indexers, and figures of each layer."""

from __future__ import annotations

import math
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from torch.utils.data import Sampler, SequentialSampler
from transformers import ProgressCallback, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from streamkl.distillation import checkpoints
from streamkl.distillation.checkpoints import CheckpointError
from streamkl.distillation.curves import FIGURES, Curves
from streamkl.distillation.model import Distiller
from streamkl.integrations.transformers.indexers import load_indexers, save_indexers
from streamkl.sparse import IndexerSelector

INDEXERS = "indexers"
"""The folder of indexers, in a checkpoint and among a run's results."""


class NotFiniteError(RuntimeError):
    """Too many steps had gradients that are not finite; the message names the first such layer."""


class DistillationTrainer(Trainer):
    """Trains a `Distiller`.

    Args:
        model: The model.
        args: The arguments of transformers.
        train_dataset: The samples, which are taken in their order.
        about: The content of a checkpoint's marker.
        topk: How many selected keys recall and mass are measured with.
        query_block: How many queries share their top-k where the indexers are used.
        keep: How many checkpoints are kept.
        max_skipped: How many steps in a row may be skipped because their gradients are not finite.
    """

    def __init__(
        self,
        model: Distiller,
        args: TrainingArguments,
        train_dataset: Any,
        *,
        about: dict[str, Any],
        topk: int,
        query_block: int,
        keep: int,
        max_skipped: int,
    ) -> None:
        self.distiller, self.about, self.topk, self.query_block, self.keep = model, about, topk, query_block, keep
        self.output = Path(args.output_dir or ".")
        self.curves: Curves | None = None
        self._staging, self._first_step = False, 0
        super().__init__(model, args, train_dataset=train_dataset)
        self.skip = SkipNotFinite(model, max_skipped)
        self.add_callback(self.skip)
        self.add_callback(Measure(model, topk))
        if not args.disable_tqdm:
            self.remove_callback(ProgressCallback)
            self.add_callback(Progress)

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler:
        return SequentialSampler(self.train_dataset if train_dataset is None else train_dataset)  # pyright: ignore[reportArgumentType]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the layers' means of KL, recall and mass, and writes the values of each layer to the curves."""
        if "loss" in logs:
            layers = self._figures()
            for name in FIGURES:
                values = [figures[name] for figures in layers.values() if name in figures]
                if values:
                    logs[name] = sum(values) / len(values)
            logs["skipped"] = self.skip.skipped
            if self.args.should_save:
                self._write_curves({"step": self.state.global_step, **logs, "layers": layers})
        super().log(logs, start_time)

    def _figures(self) -> dict[int, dict[str, float]]:
        """The layers' figures, means over the processes."""
        found = self.distiller.figures()
        names = [(layer, name) for layer, figures in found.items() for name in figures]
        values = torch.tensor([found[layer][name] for layer, name in names], device=self.args.device)
        values = self.accelerator.reduce(values, "mean")
        for (layer, name), value in zip(names, values.tolist(), strict=True):  # pyright: ignore[reportAttributeAccessIssue]
            found[layer][name] = value
        return found

    def _write_curves(self, line: dict[str, Any]) -> None:
        try:
            if self.curves is None:
                self.curves = Curves(self.output, self._first_step)
            self.curves.add(_with_nulls(line))
        except OSError as error:
            raise self._failed("the curves", error) from error

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """Writes the indexers, and nothing of the frozen model."""
        folder = Path(output_dir or self.args.output_dir or ".")
        folder.mkdir(parents=True, exist_ok=True)
        if self.args.should_save:
            write_indexers(folder / INDEXERS, self.distiller, self.topk, self.query_block)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        folder = Path(resume_from_checkpoint)
        loaded, _ = load_indexers(folder / INDEXERS, self.distiller.backbone)
        self.distiller.indexers.load_state_dict(loaded.state_dict())
        self._first_step = TrainerState.load_from_json(str(folder / "trainer_state.json")).global_step

    def _get_output_dir(self, trial: Any) -> str:
        return str(self.output / checkpoints.STAGING if self._staging else self.output)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Writes it under another name, and renames it when it is complete."""
        name = f"{checkpoints.PREFIX}{self.state.global_step}"
        staged = self.output / checkpoints.STAGING
        if self.args.should_save:
            shutil.rmtree(staged, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        self._staging = True
        try:
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                about = {"step": self.state.global_step, **self.about}
                checkpoints.finish(staged / name, self.output / name, about)
                shutil.rmtree(staged, ignore_errors=True)
                checkpoints.rotate(self.output, self.keep)
        except (OSError, RuntimeError, SafetensorError) as error:
            shutil.rmtree(staged, ignore_errors=True)
            raise self._failed(f"the checkpoint of step {self.state.global_step}", error) from error
        finally:
            self._staging = False

    def _failed(self, what: str, error: Exception) -> CheckpointError:
        last = checkpoints.latest(self.output)
        kept = "there is no checkpoint yet" if last is None else f"the last good checkpoint is {last}, and is kept"
        return CheckpointError(f"{what} could not be written ({error}): {kept}; make room, and resume with --resume")


def write_indexers(folder: Path, model: Distiller, topk: int, query_block: int) -> None:
    """Writes the trained indexers as a folder that `streamkl.integrations.transformers.sparsify` takes."""
    activation = next(iter(model.layers)).indexer.activation
    selector = IndexerSelector(topk, query_block, activation=activation, normalise=True)
    save_indexers(folder, model.backbone, model.indexers, selector)


class Measure(TrainerCallback):
    """Measures recall and mass in the steps that are logged, and logs the last step."""

    def __init__(self, model: Distiller, topk: int) -> None:
        self.model, self.topk = model, topk

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Before the batches of a step."""
        step = state.global_step + 1
        logged = step == 1 or step % int(args.logging_steps) == 0 or step == state.max_steps
        self.model.measure(self.topk if logged else 0)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """After a step: the last one is logged, whatever its number."""
        if state.global_step == state.max_steps:
            control.should_log = True


class SkipNotFinite(TrainerCallback):
    """Skips a step if one of its gradients is not finite, counts such steps, and stops when there are too many."""

    def __init__(self, model: Distiller, most: int) -> None:
        self.model, self.most = model, most
        self.skipped, self.in_a_row = 0, 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Restores the count of the resumed run."""
        self.skipped = int(next((x["skipped"] for x in reversed(state.log_history) if "skipped" in x), 0))

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """After the gradients of all processes were reduced, so that all decide the same."""
        broken = self.model.take_broken()
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if not broken and norm.isfinite():
            self.in_a_row = 0
            return
        for parameter in parameters:
            parameter.grad = None  # an optimizer leaves such a parameter and its state unchanged
        self.skipped, self.in_a_row = self.skipped + 1, self.in_a_row + 1
        where = f"layer {broken[0]}" if broken else "another process, or the backward of a layer"
        what = f"step {state.global_step + 1}: gradients are not finite, from {where} on"
        if self.in_a_row > self.most:
            raise NotFiniteError(
                f"{what}; {self.in_a_row} steps in a row are: look at the model's dtype and at the text"
            )
        if args.should_log:
            warnings.warn(f"{what}; the step is skipped ({self.skipped} so far)", RuntimeWarning, stacklevel=2)


class Progress(ProgressCallback):
    """The progress bar, followed by the last logged values."""

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Shows KL, recall and mass."""
        if state.is_world_process_zero and self.training_bar is not None and logs is not None:
            shown = {name: f"{logs[name]:.3g}" for name in (*FIGURES, "skipped") if name in logs}
            self.training_bar.set_postfix(shown)


def _with_nulls(line: Any) -> Any:
    """A line whose floats are finite or ``None``, for JSON."""
    if isinstance(line, dict):
        return {key: _with_nulls(value) for key, value in line.items()}
    return None if isinstance(line, float) and not math.isfinite(line) else line
