"""Attention distillation in trainers: a mixin for ``Trainer`` and for those of TRL."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from streamkl.integrations.transformers.capture import decoder_of
from streamkl.integrations.transformers.distiller import AttentionDistiller, DistillationStep


class AttentionDistillation:
    """Adds the loss of an `AttentionDistiller` to a trainer's own: a mixin, before the trainer's class.

    The loss is ``lm_weight`` times the trainer's own, plus the distiller's, plus ``logits_weight`` times the KL of the
    logits. All are means per micro-batch, divided by the accumulation steps as the trainer divides its own. They are
    logged without their weights, as ``lm_loss``, ``attention_kl`` (the mean over the pairs of layers) and
    ``logits_kl``. A weight of 0 still leaves zero gradients, which DDP and FSDP2 wait for. Evaluation is the trainer's
    own.

    With TRL's ``DistillationTrainer`` give both the same teacher: it runs once, for its logits and its attention.
    TRL's ``SFTTrainer`` makes no logits that have a graph, so ``logits_weight`` stays 0 there.

    Args:
        args: Of the trainer.
        distiller: The distiller, of the trainer's model.
        lm_weight: Of the trainer's own loss.
        logits_weight: Of KL(teacher || student) of the logits, mean over the tokens that have a label.
        log_layers: Whether the KL of each layer is logged, too, as ``attention_kl_layer_3``.
        kwargs: Of the trainer.

    Raises:
        ValueError: The distiller's student or teacher is not the trainer's; one process has several GPUs; several
            processes share a sequence; in a step, ``logits_weight`` has no logits of both models to compare.

    Examples:
        >>> from streamkl.integrations.transformers import AttentionDistillation
        >>> from transformers import Trainer
        >>> class DistillingTrainer(AttentionDistillation, Trainer):
        ...     "Takes distiller=AttentionDistiller(student, teacher) beside Trainer's arguments."
    """

    def __init__(
        self,
        *args: Any,
        distiller: AttentionDistiller,
        lm_weight: float = 1.0,
        logits_weight: float = 0.0,
        log_layers: bool = False,
        **kwargs: Any,
    ) -> None:
        self.distiller, self.lm_weight, self.logits_weight = distiller, lm_weight, logits_weight
        self._log_layers, self._parts = log_layers, {}
        super().__init__(*args, **kwargs)
        trainer: Any = self
        if decoder_of(trainer.model) is not decoder_of(distiller.student):
            raise ValueError("the distiller's student must be the trainer's model")
        teacher = getattr(trainer, "teacher_model", None)  # of TRL's DistillationTrainer
        if isinstance(teacher, nn.Module) and decoder_of(teacher) is not decoder_of(distiller.teacher):
            raise ValueError("the distiller's teacher must be the trainer's teacher_model")
        if trainer.args.n_gpu > 1:
            raise ValueError(
                f"one process with {trainer.args.n_gpu} GPUs would run replicas of the model, whose attention is not "
                f"captured: start one process per GPU, with torchrun or accelerate"
            )
        parallel = getattr(trainer.accelerator, "parallelism_config", None)
        if any(getattr(parallel, f"{name}_enabled", False) for name in ("cp", "sp")):
            raise ValueError(
                "attention is distilled over whole sequences: train without context and sequence parallelism"
            )
        if not hasattr(distiller.teacher, "hf_device_map"):
            distiller.teacher.to(trainer.args.device)

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The sum of the losses; the trainer's own where there are no gradients."""
        trainer, parent = cast(Any, self), cast(Any, super())
        if not torch.is_grad_enabled():
            return parent.compute_loss(
                model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
            )
        # Without a cache: transformers reads position_ids as packing only then.
        inputs = {**inputs, "use_cache": False}
        given, teacher = dict(inputs), None
        wanted = return_outputs or self.logits_weight != 0  # SFTTrainer runs the model again for them
        with self.distiller.step() as step:
            own = parent.compute_loss(model, inputs, return_outputs=wanted, num_items_in_batch=num_items_in_batch)
            own, outputs = own if wanted else (own, None)
            if not step.losses:  # a trainer of TRL may have run the teacher itself
                with trainer.accelerator.autocast():  # as the student runs; the model of a trainer does so itself
                    teacher = step.teach(logits=bool(self.logits_weight), **given)
        steps = self._steps_to_divide_by(num_items_in_batch)
        attention = step.loss()
        parts = {"lm_loss": own * steps, "attention_kl": step.mean()}
        loss = self.lm_weight * own + attention.to(own.device) / steps
        if self.logits_weight:
            parts["logits_kl"] = _logits_kl(outputs, teacher, given)
            loss = loss + self.logits_weight * parts["logits_kl"].to(own.device) / steps
        self._keep(parts, step)
        return (loss, outputs) if return_outputs else loss

    def _steps_to_divide_by(self, num_items_in_batch: Any) -> int:
        """By how many steps a mean must be divided: the trainer does not divide a loss that its own count scales."""
        trainer: Any = self
        scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
        if scaled is None:
            counted = trainer.model_accepts_loss_kwargs and num_items_in_batch is not None
            scaled = counted or trainer.compute_loss_func is not None
        return trainer.current_gradient_accumulation_steps if scaled else 1

    def _keep(self, parts: dict[str, Tensor], step: DistillationStep) -> None:
        layers = {f"attention_kl_layer_{n}": loss for n, loss in step.losses.items()} if self._log_layers else {}
        for name, value in {**parts, **layers}.items():
            total, count = self._parts.get(name, (0.0, 0))
            self._parts[name] = (total + value.detach(), count + 1)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Adds the means of the losses since the last time, over all processes."""
        trainer: Any = self
        if "loss" in logs and self._parts:
            device = trainer.args.device
            means = torch.stack([torch.as_tensor(total / count).to(device) for total, count in self._parts.values()])
            means = trainer.accelerator.reduce(means, "mean")
            logs.update(zip(self._parts, means.tolist(), strict=True))
            self._parts = {}
        parent: Any = super()
        parent.log(logs, *args, **kwargs)


def _logits_kl(student: Any, teacher: Any, inputs: dict[str, Any]) -> Tensor:
    """KL(teacher || student) of the next token, mean over the tokens that have a label, or that are no padding."""
    ours, theirs = getattr(student, "logits", None), getattr(teacher, "logits", None)
    if ours is None or not ours.requires_grad:
        raise ValueError(
            "this trainer's logits have no graph: leave logits_weight at 0, or use Trainer, or TRL's "
            "DistillationTrainer, whose own loss is that of the logits"
        )
    if theirs is None:
        raise ValueError("logits_weight compares with the teacher's logits, and it has none: give it with its head")
    if ours.shape != theirs.shape:
        raise ValueError(
            f"logits_weight compares logits over one vocabulary: the student's are {list(ours.shape)}, the teacher's "
            f"{list(theirs.shape)}"
        )
    theirs = theirs.to(ours.device)
    counted = inputs["labels"] != -100 if inputs.get("labels") is not None else inputs.get("attention_mask")
    log_p, log_q = (_log_softmax(x[:, :-1]) for x in (theirs, ours))
    rows = functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
    if counted is None:
        return rows.mean()
    weight = counted[:, 1:].to(rows)
    return (rows * weight).sum() / weight.sum().clamp(min=1)


def _log_softmax(logits: Tensor) -> Tensor:
    return logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
