"""Distils the attention of a teacher into a student: ``AttentionDistiller``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

import streamkl
from streamkl.integrations.transformers.capture import attentions_of, capture_attention, decoder_of, is_tensor_parallel
from streamkl.integrations.transformers.pairing import Heads, Layers, paired_heads, paired_layers
from streamkl.integrations.transformers.recording import Attended, Capture
from streamkl.sparse import AttentionCall

NOT_FOR_THE_TEACHER = ("labels", "shift_labels", "return_loss", "use_cache", "logits_to_keep", "num_items_in_batch")
"""Inputs of a student that its teacher does not get."""


class AttentionDistiller:
    """The KL divergence of a student's attention from a teacher's, over pairs of their layers, in linear memory.

    The student's forward comes first, and its q and k stay in its graph. Then the teacher runs without gradients, and
    each of its layers is compared right after its attention, so that no more than one layer of it is in memory.

    The two models have the same tokenizer; widths, depths, numbers of heads and attention implementations may differ.
    Batches may be padded on either side or packed by ``position_ids``. Both models run with ``use_cache=False``:
    transformers reads ``position_ids`` as packing only without a cache.

    Args:
        student: A model of transformers, or a wrapper of it: compiled, DDP, FSDP2, PEFT.
        teacher: A model of transformers. It gets no gradients, and is put into evaluation mode.
        layers: The pairs, as ``{student's layer: teacher's}``; ``"uniform"``: each layer of the student learns from
            the teacher's at the same relative depth, the last from the last; ``"last"``: only the last ones; ``{}``:
            none, to distil the logits alone with `AttentionDistillation`.
        heads: As ``{student's head: teacher's head, or a tuple of heads whose mean it learns}``, as many for each;
            heads that are left out do not learn. By default all: as many heads are compared one by one, and where the
            teacher has a multiple, a student's head learns the mean of consecutive ones.
        weight: Of the loss, or of each student's layer; not negative.
        divergence: ``"forward"`` for KL(teacher || student), ``"reverse"`` for KL(student || teacher).
        temperature: Divides the logits of both; the loss is not multiplied by its square.

    Raises:
        ValueError: Layers cannot be paired as asked; a model is tensor parallel; in a step, heads or sequences do not
            fit, or there is no graph.

    Examples:
        >>> import torch
        >>> from streamkl.integrations.transformers import AttentionDistiller
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> def model(layers, heads):
        ...     return LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64,
        ...         num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads))
        >>> student, teacher = model(2, 2), model(4, 4)
        >>> distiller = AttentionDistiller(student, teacher)
        >>> batch = {"input_ids": torch.arange(16)[None]}
        >>> with distiller.step() as step:
        ...     outputs = student(**batch, labels=batch["input_ids"], use_cache=False)
        ...     taught = step.teach(**batch)
        >>> (outputs.loss + step.loss()).backward()
        >>> sorted(step.losses), distiller.pairs
        ([0, 1], {0: 1, 1: 3})
    """

    def __init__(
        self,
        student: nn.Module,
        teacher: nn.Module,
        *,
        layers: Layers = "uniform",
        heads: Heads = None,
        weight: float | Mapping[int, float] = 1.0,
        divergence: Literal["forward", "reverse"] = "forward",
        temperature: float = 1.0,
    ) -> None:
        if decoder_of(student) is decoder_of(teacher):
            raise ValueError("student and teacher are one model: copy it, with copy.deepcopy, before it is trained")
        for what, model in (("student", student), ("teacher", teacher)):
            if is_tensor_parallel(model):
                raise ValueError(
                    f"the {what} is tensor parallel, and a process has some of its heads only: use DDP or FSDP2"
                )
        if not temperature > 0:
            raise ValueError(f"temperature must be positive: got {temperature}")
        if divergence not in ("forward", "reverse"):
            raise ValueError(f"divergence must be 'forward' or 'reverse': got {divergence!r}")
        self.student, self.teacher, self.heads, self.temperature = student, teacher.eval(), heads, temperature
        self.divergence: Literal["forward", "reverse"] = divergence
        self.pairs = paired_layers(layers, *(list(attentions_of(decoder_of(model))) for model in (student, teacher)))
        self.weights = dict(weight) if isinstance(weight, Mapping) else dict.fromkeys(self.pairs, weight)
        if min(self.weights.values(), default=0) < 0:
            raise ValueError(f"weight must not be negative: got {weight}")
        if set(self.weights) != set(self.pairs):
            raise ValueError(f"weight must have one per student's layer {sorted(self.pairs)}: got {dict(self.weights)}")

    @contextlib.contextmanager
    def step(self) -> Iterator[DistillationStep]:
        """One forward of the student, and then one of the teacher, inside of a ``with`` block.

        Run the student first, any way you like, with gradients. Then run the teacher, by `DistillationStep.teach` or
        otherwise. The backward comes after the block.
        """
        self.teacher.eval()  # a trainer may have put all modules into training mode
        with capture_attention(self.student, self.pairs, graph=True) as captured:
            step = DistillationStep(self, captured)
            with capture_attention(self.teacher, set(self.pairs.values()), each=step.learn, lse=True):
                yield step


class DistillationStep:
    """The losses of one step.

    Attributes:
        losses: The mean KL of each student's layer, without its weight, with its graph.
    """

    def __init__(self, distiller: AttentionDistiller, captured: Capture) -> None:
        self._distiller, self._captured = distiller, captured
        self.losses: dict[int, Tensor] = {}

    def teach(self, *, logits: bool = False, **inputs: Any) -> Any:
        """Runs the teacher without gradients.

        Args:
            logits: Whether its head runs, too.
            inputs: Those of the student; its labels are left out.

        Returns:
            The output of the teacher.
        """
        teacher: Any = self._distiller.teacher
        inputs = {name: value for name, value in inputs.items() if name not in NOT_FOR_THE_TEACHER}
        with torch.no_grad():
            return (teacher if logits else teacher.base_model)(**inputs, use_cache=False)

    def loss(self) -> Tensor:
        """The weighted mean over the pairs of layers; 0 if there are none.

        Raises:
            ValueError: The teacher did not run.
        """
        distiller = self._distiller
        if set(self.losses) != set(distiller.pairs):
            raise ValueError(
                "the teacher did not run in this step: call step.teach(**batch) after the student's forward"
            )
        return self._mean([distiller.weights[layer] * loss for layer, loss in sorted(self.losses.items())])

    def mean(self) -> Tensor:
        """The mean over the pairs of layers, without their weights and without a graph; 0 if there are none."""
        return self._mean([loss.detach() for loss in self.losses.values()])

    def _mean(self, losses: list[Tensor]) -> Tensor:
        if not losses:
            return torch.zeros((), device=next(self._distiller.student.parameters()).device)
        return torch.stack([loss.to(losses[0].device) for loss in losses]).mean()

    def learn(self, attended: Attended) -> None:
        """Compares the student's layers with the layer of the teacher that has just attended."""
        distiller = self._distiller
        for layer, taught_by in distiller.pairs.items():
            if taught_by != attended.layer:
                continue
            if layer not in self._captured:
                raise ValueError(
                    f"layer {layer} of the student has no graph: run the student with gradients, before the teacher; "
                    "checkpointing must be non-reentrant (use_reentrant=False)"
                )
            learner = self._captured[layer]  # which packs it
            student, teacher = learner.call, _moved(attended.call, learner.call.q.device)
            if attended.indices is not None or learner.indices is not None:
                raise ValueError(
                    f"layer {layer} of the student, or {taught_by} of the teacher, attends to selected keys only: "
                    f"attention is distilled between models that attend to all"
                )
            _check(student, teacher, layer, taught_by)
            with torch.enable_grad():  # the teacher runs without
                pair = paired_heads(distiller.heads, student, teacher)
                self.losses[layer] = streamkl.attention_kl(
                    pair.teacher_q, pair.teacher_k, pair.student_q, pair.student_k, causal=True, window=student.window,
                    cu_seqlens_q=student.cu_seqlens_q, cu_seqlens_k=student.cu_seqlens_k,
                    teacher_scale=_scale(teacher, distiller.temperature),
                    student_scale=_scale(student, distiller.temperature),
                    teacher_lse=pair.teacher_lse if distiller.temperature == 1 else None,
                    divergence=distiller.divergence,
                )  # fmt: skip


def _moved(call: AttentionCall, device: torch.device) -> AttentionCall:
    """A teacher's attention where its student is: their layers may lie on several devices."""
    if call.q.device == device:
        return call
    lse = None if call.lse is None else call.lse.to(device)
    return call._replace(q=call.q.to(device), k=call.k.to(device), lse=lse)


def _scale(call: AttentionCall, temperature: float) -> float:
    return (call.q.shape[-1] ** -0.5 if call.scale is None else call.scale) / temperature


def _check(student: AttentionCall, teacher: AttentionCall, layer: int, taught_by: int) -> None:
    """Refuses a pair whose queries do not see the same keys, and softmaxes that cover more than keys."""
    if student.rest is not None or teacher.rest is not None:
        raise ValueError(f"layer {layer} of the student, or {taught_by} of the teacher, has attention sinks")
    if student.window != teacher.window:
        raise ValueError(
            f"layer {layer} of the student has the window {student.window}, layer {taught_by} of the teacher "
            f"{teacher.window}: pair layers of the same window"
        )
    ours, theirs = student.cu_seqlens_q, teacher.cu_seqlens_q
    same = ours is theirs or (ours is not None and theirs is not None and torch.equal(ours, theirs.to(ours.device)))
    if not same or student.q.shape[-2 if ours is None else 0] != teacher.q.shape[-2 if ours is None else 0]:
        raise ValueError(
            f"student and teacher attend to different sequences, {list(student.q.shape)} and {list(teacher.q.shape)}: "
            f"give both the same input_ids, attention_mask and position_ids, and use_cache=False"
        )
