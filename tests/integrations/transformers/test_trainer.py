"""The mixin gives trainers the gradients of the matrices, however a batch is cut into micro-batches."""

from __future__ import annotations

import copy
import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from streamkl.integrations.transformers import AttentionDistillation, AttentionDistiller
from streamkl.integrations.transformers.checkpointing import checkpoint_activations
from streamkl.testing.materialised import materialised_losses
from streamkl.testing.tiny_models import VOCAB, tiny_model, tokens

WORKER = Path(__file__).parents[2] / "workers" / "attention_distillation.py"
SAMPLES, TOKENS = 4, 12
GRADIENT, LEARNING_RATE = 1e-5, 0.5
needs_trl = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl")


class DistillingTrainer(AttentionDistillation, Trainer):
    """The two lines of the how-to."""


def models() -> tuple[Any, Any]:
    options = {"hidden_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
    return tiny_model("llama", **options), tiny_model("llama", seed=1, num_hidden_layers=4)


def samples() -> list[dict[str, Any]]:
    return [{"input_ids": ids, "labels": ids} for ids in tokens(SAMPLES, TOKENS).tolist()]


def arguments(folder: Path, micro_batch: int, steps: int, **options: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder), "per_device_train_batch_size": micro_batch, "gradient_accumulation_steps": steps,
        "max_steps": 1, "learning_rate": LEARNING_RATE, "optim": "sgd", "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0, "logging_steps": 1, "report_to": [], "save_strategy": "no", "use_cpu": True,
        "disable_tqdm": True, "bf16": False, **options,
    }  # fmt: skip


def wanted(student: Any, teacher: Any, attention: float, lm: float, logits: float) -> tuple[dict[str, Any], dict]:
    """The weights after a step of SGD on the losses of the matrices, and the losses."""
    ids = tokens(SAMPLES, TOKENS)
    student.zero_grad()
    losses, outputs = materialised_losses(student, teacher, {"input_ids": ids, "labels": ids}, {0: 1, 1: 3})
    kl = torch.stack(list(losses.values())).mean()
    with torch.no_grad():
        log_p = teacher(ids).logits[:, :-1].log_softmax(-1)
    log_q = outputs.logits[:, :-1].log_softmax(-1)
    next_token = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    (lm * outputs.loss + attention * kl + logits * next_token).backward()
    after = {name: p.detach() - LEARNING_RATE * p.grad for name, p in student.named_parameters()}
    student.zero_grad()
    return after, {"attention_kl": kl.item(), "lm_loss": outputs.loss.item(), "logits_kl": next_token.item()}


def check(trainer: Any, after: dict[str, torch.Tensor], losses: dict[str, float]) -> None:
    """Trains a step, and holds the weights to those after a step on the matrices."""
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    largest = max(float((after[name] - before[name]).abs().max()) for name in after)
    for name, parameter in trainer.model.named_parameters():
        error = float((parameter.detach() - after[name]).abs().max())
        assert error <= GRADIENT * max(largest, 1), f"{name}: {error:.1e} of {largest:.1e}"
    logged = next(line for line in trainer.state.log_history if "attention_kl" in line)
    for name, value in losses.items():
        assert logged[name] == pytest.approx(value, rel=1e-4), name


@pytest.mark.slow
@pytest.mark.parametrize(("micro_batch", "steps"), [(1, 4), (4, 1), (2, 2)])
@pytest.mark.parametrize(("lm", "logits"), [(1.0, 0.0), (0.0, 0.0), (0.5, 2.0)])
def test_a_step_is_that_of_the_matrices_however_a_batch_is_cut(lm, logits, micro_batch, steps, tmp_path) -> None:
    student, teacher = models()
    after, losses = wanted(student, teacher, 3.0, lm, logits)
    losses = losses if logits else {name: losses[name] for name in ("attention_kl", "lm_loss")}
    trainer = DistillingTrainer(
        student, TrainingArguments(**arguments(tmp_path, micro_batch, steps)), train_dataset=samples(),
        distiller=AttentionDistiller(student, teacher, weight=3.0), lm_weight=lm, logits_weight=logits,
        log_layers=True,
    )  # fmt: skip
    check(trainer, after, losses)
    assert any("attention_kl_layer_1" in line for line in trainer.state.log_history)


def test_so_is_one_of_the_logits_alone(tmp_path) -> None:
    student, teacher = models()
    after, losses = wanted(student, teacher, 0.0, 1.0, 2.0)
    trainer = DistillingTrainer(
        student, TrainingArguments(**arguments(tmp_path, 2, 2)), train_dataset=samples(),
        distiller=AttentionDistiller(student, teacher, layers={}), logits_weight=2.0,
    )  # fmt: skip
    check(trainer, after, {**losses, "attention_kl": 0.0})


def test_logits_that_cannot_be_compared_are_refused(tmp_path) -> None:
    student, teacher = models()
    other = tiny_model("llama", vocab_size=2 * VOCAB)
    for taught_by, message in ((teacher.model, "it has none: give it with its head"), (other, "over one vocabulary")):
        trainer = DistillingTrainer(
            student, TrainingArguments(**arguments(tmp_path, 2, 2)), train_dataset=samples(),
            distiller=AttentionDistiller(student, taught_by, layers="last"), logits_weight=1.0,
        )  # fmt: skip
        with pytest.raises(ValueError, match=message):
            trainer.train()


def test_so_is_one_under_checkpointing_and_evaluation_is_the_trainers_own(tmp_path) -> None:
    student, teacher = models()
    after, losses = wanted(student, teacher, 1.0, 1.0, 0.0)
    word = "activation" if hasattr(TrainingArguments, "activation_checkpointing") else "gradient"  # before 5.23
    options = {f"{word}_checkpointing": True, f"{word}_checkpointing_kwargs": {"use_reentrant": False}}
    trainer = DistillingTrainer(
        student, TrainingArguments(**arguments(tmp_path, 2, 2, **options)), train_dataset=samples(),
        eval_dataset=samples(), distiller=AttentionDistiller(student, teacher),
    )  # fmt: skip
    assert trainer.evaluate()["eval_loss"] == pytest.approx(losses["lm_loss"], rel=1e-5)
    check(trainer, after, {name: losses[name] for name in ("attention_kl", "lm_loss")})


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """A tokenizer of words, each a number."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({str(n): n for n in range(VOCAB)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1")


@needs_trl
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # TRL's own
@pytest.mark.parametrize(("micro_batch", "steps"), [(1, 4), (4, 1), (2, 2)])
def test_so_is_one_of_trls_sft_trainer(micro_batch, steps, tokenizer, tmp_path) -> None:
    import trl
    from datasets import Dataset

    class DistillingSFTTrainer(AttentionDistillation, trl.SFTTrainer):
        pass

    student, teacher = models()
    after, losses = wanted(student, teacher, 1.0, 1.0, 0.0)
    rows = Dataset.from_dict({name: [sample[name] for sample in samples()] for name in ("input_ids", "labels")})
    trainer = DistillingSFTTrainer(
        student, trl.SFTConfig(**arguments(tmp_path, micro_batch, steps)), train_dataset=rows,
        processing_class=tokenizer, distiller=AttentionDistiller(student, teacher),
    )  # fmt: skip
    runs = []
    student.model.register_forward_hook(lambda *_: runs.append(1))
    check(trainer, after, {name: losses[name] for name in ("attention_kl", "lm_loss")})
    assert len(runs) == steps, "no second forward for logits that nobody reads"
    trainer.logits_weight = 1.0
    with pytest.raises(ValueError, match="this trainer's logits have no graph"):
        trainer.train()


@needs_trl
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # TRL's own
def test_so_are_the_gradients_in_trls_distillation_trainer_whose_teacher_runs_once(tokenizer, tmp_path) -> None:
    import trl
    from datasets import Dataset

    class Distilling(AttentionDistillation, trl.DistillationTrainer):
        pass

    student, teacher = models()
    trainer = Distilling(
        student, teacher, trl.DistillationConfig(**arguments(tmp_path, 2, 2)), Dataset.from_dict({"prompt": ["2 3"]}),
        processing_class=tokenizer, distiller=AttentionDistiller(student, teacher),
    )  # fmt: skip
    with pytest.raises(ValueError, match="the distiller's teacher must be the trainer's teacher_model"):
        Distilling(
            student, teacher, trainer.args, Dataset.from_dict({"prompt": ["2 3"]}), processing_class=tokenizer,
            distiller=AttentionDistiller(student, copy.deepcopy(teacher)),
        )  # fmt: skip
    trainer.current_gradient_accumulation_steps = 2
    ids, mask = tokens(2, TOKENS), torch.ones(2, TOKENS, dtype=torch.long)
    mask[0, :3] = 0
    cut = {"prompt": slice(0, 5), "completion": slice(5, None)}
    inputs = {f"{name}_ids": ids[:, part] for name, part in cut.items()}
    inputs |= {f"{name}_mask": mask[:, part] for name, part in cut.items()}
    student.train()
    runs = []
    teacher.model.register_forward_hook(lambda *_: runs.append(1))
    trainer.compute_loss(student, dict(inputs)).backward()
    assert len(runs) == 1
    got = {name: p.grad.clone() for name, p in student.named_parameters()}
    student.zero_grad()
    losses, _ = materialised_losses(student, teacher, {"input_ids": ids, "attention_mask": mask}, {0: 1, 1: 3})
    own = trl.DistillationTrainer.compute_loss(trainer, student, dict(inputs))
    (own + torch.stack(list(losses.values())).mean() / 2).backward()
    for name, parameter in student.named_parameters():
        assert float((got[name] - parameter.grad).abs().max()) <= GRADIENT * max(1, float(parameter.grad.abs().max()))


def in_two_processes(*given: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    result = subprocess.run(
        [*command, str(WORKER), *given], capture_output=True, text=True, timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-5000:]
    assert result.stdout.count("equal") == 2


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_so_is_one_of_a_distiller_in_two_processes(parallel) -> None:
    if parallel == "fsdp2" and not hasattr(torch.cpu.Stream, "record_event"):
        pytest.skip("FSDP2 of this torch does not run on CPUs")
    in_two_processes(parallel)


@pytest.mark.slow
def test_so_is_one_of_a_trainer_in_two_processes(tmp_path) -> None:
    after, losses = wanted(*models(), 3.0, 0.5, 2.0)
    student, teacher = models()
    given = {
        "student": student, "teacher": teacher, "samples": samples(), "weight": 3.0, "after": after, "losses": losses,
        "weights": {"lm_weight": 0.5, "logits_weight": 2.0}, "tolerance": GRADIENT,
        "arguments": arguments(tmp_path, 1, 2, ddp_backend="gloo"),
    }  # fmt: skip
    torch.save(given, tmp_path / "given.pt")
    in_two_processes("trainer", str(tmp_path / "given.pt"))


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_so_is_one_of_a_trainer_that_compiles(checkpointing, tmp_path) -> None:
    torch._dynamo.reset()
    student, teacher = models()
    after, losses = wanted(student, teacher, 1.0, 1.0, 0.0)
    options = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    if checkpointing:
        checkpoint_activations(student)
    trainer = DistillingTrainer(
        student, TrainingArguments(**arguments(tmp_path, 2, 2, **options)), train_dataset=samples(),
        distiller=AttentionDistiller(student, teacher),
    )  # fmt: skip
    check(trainer, after, {name: losses[name] for name in ("attention_kl", "lm_loss")})


def test_a_training_that_was_stopped_goes_on_as_if_it_had_not(tmp_path) -> None:
    ends = []
    for stops in ([2], [1, 2]):
        for last in stops:
            student, teacher = models()
            options = {"max_steps": last, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
            trainer = DistillingTrainer(
                student, TrainingArguments(**arguments(tmp_path / f"{len(stops)}", 2, 1, **options)),
                train_dataset=samples(), distiller=AttentionDistiller(student, teacher),
            )  # fmt: skip
            trainer.train(resume_from_checkpoint=last > stops[0])
        ends.append([p.detach().clone() for p in student.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_a_teacher_runs_under_the_autocast_of_the_trainer(tmp_path) -> None:
    student, teacher = models()
    dtypes = []
    teacher.lm_head.register_forward_hook(lambda module, given, made: dtypes.append(made.dtype))
    trainer = DistillingTrainer(
        student, TrainingArguments(**arguments(tmp_path, 2, 2, bf16=True)), train_dataset=samples(),
        distiller=AttentionDistiller(student, teacher), logits_weight=1.0,
    )  # fmt: skip
    trainer.train()
    assert dtypes == [torch.bfloat16] * 2
    assert all(math.isfinite(trainer.state.log_history[0][name]) for name in ("lm_loss", "attention_kl", "logits_kl"))


@pytest.mark.parametrize("dimension", ["cp", "sp"])
def test_a_sequence_over_several_processes_is_refused(dimension, monkeypatch, tmp_path) -> None:
    student, teacher = models()
    enabled = SimpleNamespace(**{f"{name}_enabled": name == dimension for name in ("cp", "sp")})
    given = TrainingArguments(**arguments(tmp_path, 2, 2))

    class ParallelTrainer(Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            monkeypatch.setattr(type(self.accelerator), "parallelism_config", enabled, raising=False)

    class DistillingParallelTrainer(AttentionDistillation, ParallelTrainer):
        pass

    with pytest.raises(ValueError, match="train without context and sequence parallelism"):
        DistillingParallelTrainer(student, given, distiller=AttentionDistiller(student, teacher))


def test_replicas_on_several_gpus_in_one_process_are_refused(tmp_path) -> None:
    student, teacher = models()
    given = TrainingArguments(**arguments(tmp_path, 2, 2))
    given._n_gpu = 2
    with pytest.raises(ValueError, match="start one process per GPU"):
        DistillingTrainer(student, given, distiller=AttentionDistiller(student, teacher))


def test_a_distiller_of_another_model_is_refused(tmp_path) -> None:
    student, teacher = models()
    with pytest.raises(ValueError, match="the distiller's student must be the trainer's model"):
        DistillingTrainer(
            tiny_model("llama"), TrainingArguments(**arguments(tmp_path, 1, 1)), train_dataset=samples(),
            distiller=AttentionDistiller(student, teacher),
        )  # fmt: skip
