"""Hugging Face's trainer, with checkpoints of only the indexers, and figures of each layer."""

from __future__ import annotations

import math
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.data import Sampler
from transformers import ProgressCallback, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from streamkl.distillation import checkpoints, ranks
from streamkl.distillation.checkpoints import CheckpointError
from streamkl.distillation.curves import FIGURES, Curves
from streamkl.distillation.model import Distiller
from streamkl.distillation.replica import Replica
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
        dataset: Any = self.train_dataset if train_dataset is None else train_dataset
        return SharedSamples(len(dataset), int(self.args.per_device_train_batch_size), self.distiller.mesh.context)

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """A `Replica` under a launcher, even of one rank; accelerate then wraps it no further."""
        if not ranks.are_joined() or isinstance(model, Replica):
            return model
        self.accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)  # for autocast
        return Replica(self.distiller)

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Adds the gradients of a batch, layer by layer; the last batch of a step reduces them over the ranks."""
        batches, scaler = self.current_gradient_accumulation_steps, self.accelerator.scaler

        def backward(loss: Tensor) -> None:
            gradient = torch.ones_like(loss)
            loss.backward((gradient if scaler is None else scaler.scale(gradient)) / batches)

        model.train()
        with self.compute_loss_context_manager():
            loss = model(**self._prepare_inputs(inputs), backward=backward)["loss"]
        if isinstance(model, Replica) and self.accelerator.sync_gradients:
            model.reduce_gradients()
        return loss / batches

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the layers' means of KL, recall and mass, and writes the values of each layer to the curves."""
        if "loss" in logs:
            layers = self._figures()
            for name in FIGURES:
                values = [figures[name] for figures in layers.values() if name in figures]
                if values:
                    logs[name] = sum(values) / len(values)
            logs.update(self._overall(), skipped=self.skip.skipped)
            self._write_curves({"step": self.state.global_step, **logs, "layers": layers})
        super().log(logs, start_time)

    def _overall(self) -> dict[str, float]:
        """Figures that are of no layer, means over the processes."""
        found = self.distiller.overall()
        if not found:
            return {}
        values: Any = self.accelerator.reduce(torch.tensor([*found.values()], device=self.args.device), "mean")
        return dict(zip(found, values.tolist(), strict=True))

    def _figures(self) -> dict[int, dict[str, float]]:
        """The layers' figures, means over the processes; one that a process lacks is left out."""
        found = self.distiller.figures()
        names = [(layer, name) for layer in found for name in FIGURES]
        values = torch.tensor([found[layer].get(name, math.nan) for layer, name in names], device=self.args.device)
        values = self.accelerator.reduce(values, "mean")
        for (layer, name), value in zip(names, values.tolist(), strict=True):  # pyright: ignore[reportAttributeAccessIssue]
            if name == "kl" or not math.isnan(value):
                found[layer][name] = value
            else:
                found[layer].pop(name, None)
        return found

    def _write_curves(self, line: dict[str, Any]) -> None:
        with self._agreed("the curves"):
            if self.args.should_save:
                if self.curves is None:
                    self.curves = Curves(self.output, self._first_step)
                self.curves.add(_with_nulls(line))

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """Writes the indexers, and nothing of the frozen model."""
        folder = Path(output_dir or self.args.output_dir or ".")
        folder.mkdir(parents=True, exist_ok=True)
        if self.args.should_save:
            write_indexers(folder / INDEXERS, self.distiller, self.topk, self.query_block)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        folder = Path(resume_from_checkpoint)
        with _quiet_of_small_topk():
            loaded, _ = load_indexers(folder / INDEXERS, self.distiller.backbone)
        self.distiller.indexers.load_state_dict(loaded.state_dict())
        self._first_step = TrainerState.load_from_json(str(folder / "trainer_state.json")).global_step

    def _get_output_dir(self, trial: Any) -> str:
        return str(self.output / checkpoints.STAGING if self._staging else self.output)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Writes it under another name, and renames it when it is complete."""
        name = f"{checkpoints.PREFIX}{self.state.global_step}"
        staged = self.output / checkpoints.STAGING
        what = f"the checkpoint of step {self.state.global_step}"
        if self.args.should_save:
            shutil.rmtree(staged, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        self._staging = True
        try:
            with self._agreed(what):
                super()._save_checkpoint(model, trial)
            with self._agreed(what):
                if self.args.should_save:
                    about = {"step": self.state.global_step, **self.about}
                    checkpoints.finish(staged / name, self.output / name, about)
                    shutil.rmtree(staged, ignore_errors=True)
                    checkpoints.rotate(self.output, self.keep)
        finally:
            self._staging = False

    @contextmanager
    def _agreed(self, what: str) -> Iterator[None]:
        """Ends with a `CheckpointError` on all ranks if writing failed on any, when none of them writes any more."""
        error: Exception | None = None
        try:
            yield
        except (OSError, RuntimeError, SafetensorError) as raised:
            error = raised
        wrong = ranks.agree(error)
        if wrong is None:
            return
        if self.args.should_save:
            shutil.rmtree(self.output / checkpoints.STAGING, ignore_errors=True)
        last = checkpoints.latest(self.output)
        kept = "there is no checkpoint yet" if last is None else f"the last good checkpoint is {last}, and is kept"
        raise CheckpointError(
            f"{ranks.prefix()}{what} could not be written ({wrong}): {kept}; make room, and resume with --resume"
        ) from error


@contextmanager
def _quiet_of_small_topk() -> Iterator[None]:
    """No warning of a top-k that holds only the diagonal of its query block: the command says so, once, at the end."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "a top-k of .* holds only")
        yield


class SharedSamples(Sampler[int]):
    """The numbers of all samples in their order, each batch once for each of the ranks that share it.

    Batches go to the ranks in turn, and ranks that share a sequence are next to each other.

    Args:
        count: How many samples there are.
        batch: Sequences of a batch.
        ranks: How many ranks share a sequence.
    """

    def __init__(self, count: int, batch: int, ranks: int) -> None:
        self.count, self.batch, self.ranks = count, batch, ranks

    def __len__(self) -> int:
        return self.count * self.ranks

    def __iter__(self) -> Iterator[int]:
        for first in range(0, self.count, self.batch):
            for _ in range(self.ranks):
                yield from range(first, min(first + self.batch, self.count))


def write_indexers(folder: Path, model: Distiller, topk: int, query_block: int) -> None:
    """Writes the trained indexers as a folder that `streamkl.integrations.transformers.sparsify` takes.

    Indexers that select late, by a rule of their model, are saved with the model's own top-k.
    """
    activation = next(iter(model.layers)).indexer.activation
    with _quiet_of_small_topk():
        selector = IndexerSelector(topk, query_block, activation=activation, normalise=True)
    if model.family.selects_late:
        selector = model.family.selector(model.backbone.config) or selector
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
        if norm.isfinite():  # not by `broken`, which is of this process alone
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
