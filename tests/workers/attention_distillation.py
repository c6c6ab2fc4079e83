"""Two ranks: attention distillation under DDP or FSDP2 has the gradients of the matrices of the whole batch.

The loss is of attention alone, which leaves part of the last layer without gradients, unless the student's own loss is
added with a weight of 0. With ``trainer FILE`` each rank runs a step of Trainer with the losses, the arguments and the
samples of the file, and holds its weights to those in it.
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainingArguments

from streamkl.integrations.transformers import AttentionDistillation, AttentionDistiller
from streamkl.integrations.transformers.checkpointing import checkpoint_activations
from streamkl.testing.materialised import materialised_losses
from streamkl.testing.tiny_models import tiny_model, tokens


def check(parallel: str, dtype: torch.dtype, tolerance: float, checkpointing: bool) -> None:
    options = {"hidden_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
    alone, student = (tiny_model("llama", **options).to(dtype).train() for _ in range(2))
    teacher = tiny_model("llama", seed=1, num_hidden_layers=4).to(dtype)
    batch = {"input_ids": tokens(4, 12)}
    losses, _ = materialised_losses(alone, teacher, batch, {0: 1, 1: 3})
    torch.stack(list(losses.values())).mean().backward()
    if checkpointing:
        checkpoint_activations(student)
    distiller = AttentionDistiller(student, teacher)
    if parallel == "ddp":
        model = DistributedDataParallel(student)
    else:
        mesh = init_device_mesh("cpu", (2,))
        for layer in student.model.layers:
            fully_shard(layer, mesh=mesh)
        model = fully_shard(student, mesh=mesh)
    rank = dist.get_rank()
    mine = {name: x[2 * rank : 2 * rank + 2] for name, x in batch.items()}
    for _ in range(2):  # the second step finds what the first one left
        model.zero_grad()
        with distiller.step() as step:
            outputs = model(**mine, labels=mine["input_ids"], use_cache=False)
            step.teach(**mine)
        (step.loss() + 0 * outputs.loss).backward()
    wanted = {name: p.grad for name, p in alone.named_parameters()}
    largest = max(float(g.abs().max()) for g in wanted.values() if g is not None)
    for name, parameter in student.named_parameters():
        got = parameter.grad.full_tensor() if parallel == "fsdp2" else parameter.grad
        expected = torch.zeros_like(got) if wanted[name] is None else wanted[name]
        error = float((got - expected).abs().max())
        assert error <= tolerance * largest, f"{name}: {error:.1e} of {largest:.1e}"


class DistillingTrainer(AttentionDistillation, Trainer):
    """Trainer with the loss of a distiller."""


def check_trainer(path: str) -> None:
    given = torch.load(path, weights_only=False)
    student, arguments = given["student"], TrainingArguments(**given["arguments"])
    trainer = DistillingTrainer(
        student, arguments, train_dataset=given["samples"],
        distiller=AttentionDistiller(student, given["teacher"], weight=given["weight"]), **given["weights"],
    )  # fmt: skip
    assert arguments.world_size == 2
    trainer.train()
    for name, parameter in student.named_parameters():
        error = float((parameter.detach() - given["after"][name]).abs().max())
        assert error <= given["tolerance"], f"{name}: {error:.1e}"
    logged = next(line for line in trainer.state.log_history if "attention_kl" in line)
    for name, value in given["losses"].items():
        assert abs(logged[name] - value) <= 1e-4 * max(1, value), f"{name}: {logged[name]} instead of {value}"


if __name__ == "__main__":
    if sys.argv[1] == "trainer":
        check_trainer(sys.argv[2])
        print("equal")
        sys.exit()
    dist.init_process_group("gloo")
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        for checkpointing in (False, True):
            check(sys.argv[1], dtype, tolerance, checkpointing)
    dist.destroy_process_group()
    print("equal")
