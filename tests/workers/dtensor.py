"""Two ranks: losses and gradients of DTensors sharded by batch or heads equal those of whole tensors."""

import itertools

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from streamkl import attention_kl, attention_lse
from streamkl.testing import STUDENT, TEACHER, Heads, make_case


def run(tensors: dict, wanted: tuple, compiled: bool = False, **options: object) -> list:
    function = torch.compile(attention_kl, fullgraph=True, backend="aot_eager") if compiled else attention_kl
    leaves = {name: x.detach().requires_grad_(name in wanted) for name, x in tensors.items()}
    loss = function(**leaves, **options)
    if loss.dim():
        loss = loss.sum()
    return [loss.detach(), *torch.autograd.grad(loss, [leaves[name] for name in wanted])]


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    kinds = {
        "paired": (Heads(4, 2, 4, 2), False, STUDENT + TEACHER),
        "train": (Heads(8, 4, 4, 2), True, STUDENT),
        "mixture": (Heads(8, 4, 4, 2), False, STUDENT),
        "head_mean": (Heads(8, 4, 1, 1), True, STUDENT),
    }
    for (kind, (heads, lse, wanted)), placement, reduction, weighted in itertools.product(
        kinds.items(), (Shard(0), Shard(1), Replicate()), ("mean", "sum", "none"), (False, True)
    ):
        if kind == "head_mean" and placement == Shard(1):
            continue  # one student head: nothing to shard
        dtypes = (torch.float64, torch.float64)
        case = make_case(0, heads=heads, dtypes=dtypes, tokens=(9, 11), dims=(8, 8), guard=False, teacher_lse=lse)
        options = {"causal": True, "reduction": reduction}
        rows = {"row_weight": torch.rand(2, heads.student, 9, generator=torch.Generator().manual_seed(1)).double()}
        rows = rows if weighted else {}
        if lse:
            rows["teacher_lse"] = attention_lse(case.tensors["teacher_q"], case.tensors["teacher_k"], causal=True)
        expected = run(case.tensors, wanted, **rows, **options)
        tensors = {name: distribute_tensor(x, mesh, [placement]) for name, x in case.tensors.items()}
        rows = {name: distribute_tensor(x, mesh, [placement]) for name, x in rows.items()}
        got = run(tensors, wanted, **rows, **options)
        for name, ours, plain in zip(("loss", *wanted), got, expected, strict=True):
            assert isinstance(ours, DTensor), (kind, name)
            torch.testing.assert_close(whole(ours), plain, rtol=1e-12, atol=1e-12, msg=f"{kind} {placement} {name}")
            if name != "loss":
                assert ours.placements == (placement,), f"{kind} {name} was moved: {ours.placements}"
    expected = run(case.tensors, wanted, causal=True)
    got = run(tensors, wanted, causal=True, compiled=True)
    for ours, plain in zip(got, expected, strict=True):
        torch.testing.assert_close(whole(ours), plain, rtol=1e-12, atol=1e-12)
    lse = attention_lse(tensors["teacher_q"], tensors["teacher_k"])
    assert isinstance(lse, DTensor)
    dist.destroy_process_group()
    print("equal")


if __name__ == "__main__":
    main()
