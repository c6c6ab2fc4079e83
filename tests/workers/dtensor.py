"""Two ranks: losses and gradients of DTensors sharded by batch or heads equal those of whole tensors."""

import itertools

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from streamkl import attention_kl, attention_lse, indexer_kl
from streamkl.testing import INDEX, STUDENT, TEACHER, Heads, IndexerHeads, make_case, make_indexer_case


def run(tensors: dict, wanted: tuple, compiled: bool = False, function=attention_kl, **options: object) -> list:
    function = torch.compile(function, fullgraph=True, backend="aot_eager") if compiled else function
    leaves = {name: x.detach().requires_grad_(name in wanted) for name, x in tensors.items()}
    loss = function(**leaves, **options)
    if loss.dim():
        loss = loss.sum()
    return [loss.detach(), *torch.autograd.grad(loss, [leaves[name] for name in wanted])]


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def selected_keys(mesh) -> None:
    """Indexers sharded by batch, with and without topk; heads sharded with one top-k head for all, or one for each."""
    dtypes = (torch.float64, torch.float64)
    topk = torch.rand(2, 9, 11, generator=torch.Generator().manual_seed(2)).argsort(-1)[..., :4]
    index = make_indexer_case(0, heads=IndexerHeads(4, 2, 2), dtypes=dtypes, tokens=(9, 11), guard=False)
    heads = make_case(0, heads=Heads(8, 4, 4, 2), dtypes=dtypes, tokens=(9, 11), guard=False)
    calls = [
        (indexer_kl, index, INDEX, None, Shard(0)),
        (indexer_kl, index, INDEX, topk, Shard(0)),
        (indexer_kl, index, INDEX, topk, Replicate()),
        (attention_kl, heads, STUDENT, topk, Shard(0)),
        (attention_kl, heads, STUDENT, topk, Shard(1)),
        (attention_kl, heads, STUDENT, topk[:, None].expand(2, 4, 9, 4).contiguous(), Shard(1)),
    ]
    for (function, case, wanted, indices, placement), reduction in itertools.product(calls, ("mean", "none")):
        options = {"causal": True, "reduction": reduction}
        expected = run(case.tensors, wanted, function=function, topk_indices=indices, **options)
        tensors = {name: distribute_tensor(x, mesh, [placement]) for name, x in case.tensors.items()}
        if indices is not None:
            alone = placement == Shard(1) and indices.dim() == 3
            indices = distribute_tensor(indices, mesh, [Replicate() if alone else placement])
        got = run(tensors, wanted, function=function, topk_indices=indices, **options)
        for name, ours, plain in zip(("loss", *wanted), got, expected, strict=True):
            assert isinstance(ours, DTensor), name
            torch.testing.assert_close(whole(ours), plain, rtol=1e-12, atol=1e-12, msg=f"{function} {placement} {name}")
            if name != "loss":
                assert ours.placements == (placement,), f"{name} was moved: {ours.placements}"


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    kinds = {
        "paired": (Heads(4, 2, 4, 2), False, STUDENT + TEACHER),
        "train": (Heads(8, 4, 4, 2), True, STUDENT),
        "mixture": (Heads(8, 4, 4, 2), False, STUDENT),
        "head_mean": (Heads(8, 4, 1, 1), True, STUDENT),
    }
    every = itertools.product(kinds.items(), (Shard(0), Shard(1), Replicate()), ("mean", "sum", "none"), (False, True))
    # One of five: prime to 2, 3 and 4, so that all values take part.
    for (kind, (heads, lse, wanted)), placement, reduction, weighted in itertools.islice(every, 0, None, 5):
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
    selected_keys(mesh)
    lse = attention_lse(tensors["teacher_q"], tensors["teacher_k"])
    assert isinstance(lse, DTensor)
    dist.destroy_process_group()
    print("equal")


if __name__ == "__main__":
    main()
