"""All that is asked of `ContextParallel` on real ranks, in one start of them: rank 0 writes what it found as JSON.

Arguments: the file to write, and how many seeded problems to run.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

import streamkl
import streamkl.flops
from streamkl.distributed import ContextParallel
from streamkl.indexer import HeadIndexer, rope_tables
from streamkl.testing import Case, check_accuracy, evaluate, random_case, random_indexer_case
from streamkl.testing.memory import counted_peak
from streamkl.testing.traffic import Traffic

TOKENS = 203
"""A length that neither 4 nor 8 chunks divide."""
ROUNDING = 1e-2
"""Outputs that are smaller throughout are compared as if they were this large: some are 0 but for rounding."""


class AsOne(torch.autograd.Function):
    """Runs whole tensors through shards, and gives the whole loss and whole gradients back."""

    @staticmethod
    def forward(ctx: Any, parallel: "Parallel", options: dict[str, Any], names: tuple[str, ...], *tensors: Tensor):
        with torch.enable_grad():
            leaves = [
                parallel.shard(name, x.detach()).requires_grad_(need)
                for name, x, need in zip(names, tensors, ctx.needs_input_grad[3:], strict=True)
            ]
            shared = ("cu_seqlens_q", "cu_seqlens_k")
            local = {
                name: parallel.shard(name, x) if isinstance(x, Tensor) and name not in shared else x
                for name, x in options.items()
            }
            loss = getattr(parallel.cp, parallel.function)(**dict(zip(names, leaves, strict=True)), **local)
        ctx.parallel, ctx.loss, ctx.names, ctx.leaves = parallel, loss, names, leaves
        return parallel.unshard("loss", loss.detach()) if loss.dim() else loss.detach()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor):  # pyright: ignore
        upstream = ctx.parallel.shard("loss", upstream) if upstream.dim() else upstream
        wanted = [leaf for leaf in ctx.leaves if leaf.requires_grad]
        gradients = iter(torch.autograd.grad(ctx.loss, wanted, upstream))
        whole = (
            ctx.parallel.unshard(name, next(gradients)) if leaf.requires_grad else None
            for name, leaf in zip(ctx.names, ctx.leaves, strict=True)
        )
        return None, None, None, *whole


class Parallel:
    """A function of `ContextParallel` that takes and gives whole tensors, as the public one does."""

    def __init__(self, mesh: DeviceMesh, case: Case) -> None:
        self.packed, self.function = "cu_seqlens_q" in case.options, case.function
        q, k = (case.tensors[f"teacher_{name}"].shape[0 if self.packed else 2] for name in "qk")
        self.cp = ContextParallel(mesh, q, k)

    def dim(self, name: str) -> int:
        if name in ("loss", "row_weight", "teacher_lse", "teacher_rest", "topk_indices"):
            return -2 if name == "topk_indices" else -1
        return 0 if self.packed else 1 if name in ("index_k", "index_w") else 2

    def shard(self, name: str, x: Tensor) -> Tensor:
        return (self.cp.keys if name.endswith("_k") else self.cp.queries).shard(x, self.dim(name))

    def unshard(self, name: str, x: Tensor) -> Tensor:
        dim = self.dim(name) % x.dim()
        return self.cp.gather(x, dim).whole() if name.endswith("_k") else self.cp.unshard(x, dim)

    def __call__(self, **arguments: Any) -> Tensor:
        names = tuple(name for name in arguments if name.split("_")[-1] in ("q", "k", "w") and "cu" not in name)
        options = {name: x for name, x in arguments.items() if name not in names}
        return AsOne.apply(self, options, names, *(arguments[name] for name in names))  # pyright: ignore


def problem(seed: int, dtypes: tuple[torch.dtype, ...]) -> Case:
    """Dense or packed, on selected keys, of an indexer: by turns."""
    if seed % 3 == 2:
        return random_indexer_case(seed, dtypes=dtypes)
    return random_case(seed, dtypes=dtypes, topk=seed % 3 == 1)


def difference(mesh: DeviceMesh, seed: int) -> dict[str, Any]:
    """The largest difference from one process in float64, relative to the largest value of each output.

    A row that sees one key has a loss of 0 and gradients of 0, or of what rounding leaves of them.
    """
    case = problem(seed, (torch.float64,))
    if "index_w" in case.tensors:
        case.tensors["index_w"] = case.tensors["index_w"].double()
    options = {**case.options, "teacher_lse": case.teacher_lse}
    got = evaluate(Parallel(mesh, case), case.tensors, case, **options).named()
    if mesh.get_rank() != 0:
        return {}
    wanted = evaluate(getattr(streamkl, case.function), case.tensors, case, **options).named()
    worst = 0.0
    for name, value in wanted.items():
        if not torch.equal(value.isnan(), got[name].isnan()):
            return {"seed": seed, "error": "other rows are nan", "case": str(case)}
        error, size = ((x.nan_to_num().abs().max().item() if x.numel() else 0.0) for x in (value - got[name], value))
        worst = max(worst, error / max(size, ROUNDING))
    return {"seed": seed, "error": worst, "case": str(case)}


def ratio(mesh: DeviceMesh, seed: int) -> dict[str, Any]:
    """The largest ratio of an error to what the accuracy rule allows, in float32 and bfloat16."""
    case = problem(seed, (torch.float32, torch.bfloat16))
    if mesh.get_rank() != 0:
        options = {**case.options, "teacher_lse": case.teacher_lse, "backend": "auto"}
        evaluate(Parallel(mesh, case), case.tensors, case, **options)
        return {}
    errors = check_accuracy(case, function=Parallel(mesh, case))
    return {"seed": seed, "error": errors.worst, "case": f"{errors}; {case}"}


def attention(mesh: DeviceMesh) -> dict[str, list[float]]:
    """The teacher's attention and its log-sum-exp in float64, against SDPA: differences by kind of heads."""
    found, rng = {}, torch.Generator().manual_seed(0)
    for kind, (heads, kv_heads, dim, width, ahead) in {
        "plain": (2, 2, 8, 8, 0), "gqa": (6, 2, 16, 16, 0), "narrow_values": (4, 1, 24, 16, 0),
        "wide_values": (2, 2, 8, 20, 0), "keys_ahead": (4, 2, 8, 8, 30), "short": (2, 1, 8, 8, 0),
    }.items():  # fmt: skip
        tokens = 3 if kind == "short" else TOKENS  # then some ranks have no token
        q, k, v = (
            torch.randn(2, n, tokens + more, d, generator=rng, dtype=torch.float64)
            for n, d, more in ((heads, dim, 0), (kv_heads, dim, ahead), (kv_heads, width, ahead))
        )
        cp = ContextParallel(mesh, tokens, tokens + ahead)
        output, lse = cp.attention(cp.queries.shard(q, 2), cp.keys.shard(k, 2), cp.gather(cp.keys.shard(v, 2)))
        output, lse = cp.unshard(output, 2), cp.unshard(lse, 2)
        every_k, every_v = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
        mask = torch.ones(tokens, tokens + ahead, dtype=torch.bool).tril(ahead)
        expected = functional.scaled_dot_product_attention(q, every_k, every_v, attn_mask=mask)
        logits = (q @ every_k.mT * dim**-0.5).masked_fill(~mask, -torch.inf)
        found[kind] = [(output - expected).abs().max().item(), (lse - logits.logsumexp(-1)).abs().max().item()]
    return found


def layer(mesh: DeviceMesh, tokens: int, batch: int, dtype: torch.dtype, counter: Any) -> None:
    """One layer of distillation: attention and the loss of an indexer; what counts is counted."""
    rng = torch.Generator().manual_seed(1)
    cp = ContextParallel(mesh, tokens)

    def drawn(*shape: int, dim: int) -> Tensor:
        return cp.shard(torch.randn(shape, generator=rng).to(dtype), dim)

    query, key, value = (drawn(batch, heads, tokens, 16, dim=2) for heads in (4, 2, 2))
    index = drawn(batch, 3, tokens, 8, dim=2), drawn(batch, tokens, 8, dim=1), drawn(batch, tokens, 3, dim=1)
    index = [x.requires_grad_() for x in index]
    with counter:
        keys = cp.gather(key)
        _, lse = cp.attention(query, keys, value)
        cp.indexer_kl(query, keys, *index, teacher_lse=lse).backward()


def balance(mesh: DeviceMesh) -> list[float]:
    """Products of each rank in the loss of an indexer under a causal mask."""
    counter = FlopCounterMode(display=False)
    layer(mesh, TOKENS * 4, 1, torch.float32, counter)
    counts = counter.get_flop_counts()["Global"]
    ours = float(sum(n for op, n in counts.items() if "streamkl" in str(op)))
    every = torch.zeros(mesh.size(), dtype=torch.float64)
    every[mesh.get_local_rank()] = ours
    dist.all_reduce(every)
    return every.tolist()


def traffic(mesh: DeviceMesh) -> list[dict[str, Any]]:
    """Bytes that rank 0 receives for one layer, by collective."""
    found = []
    for tokens, batch, dtype in ((64, 1, torch.float32), (TOKENS, 2, torch.bfloat16)):
        counter = Traffic(mesh.size())
        layer(mesh, tokens, batch, dtype, counter)
        found.append({"tokens": tokens, "batch": batch, "dtype": str(dtype)[6:], "bytes": counter.bytes})
    return found


def memory(mesh: DeviceMesh) -> list[dict[str, Any]]:
    """Bytes that one layer of distillation adds on rank 0: attention, and an indexer and its loss."""
    found = []
    for tokens, heads, dim in ((1024, 1, 64), (1024, 6, 32)):
        cp = ContextParallel(mesh, tokens)
        query, key, value = (torch.randn(1, h, cp.queries.length, dim) for h in (heads, 1, 1))
        hidden, tables = torch.randn(1, cp.queries.length, 16), rope_tables(cp.position_ids(), 64)
        indexer = HeadIndexer(16, head_dim=64)

        def step(cp=cp, query=query, key=key, value=value, hidden=hidden, tables=tables, indexer=indexer) -> None:
            keys = cp.gather(key)
            output, lse = cp.attention(query, keys, value)
            index = indexer(hidden, position_embeddings=tables)
            cp.indexer_kl(query, keys, *index, teacher_lse=lse).backward()
            del output

        step()
        # A thread of gloo may keep what it sent a moment longer, one time in ten: the least of five is the layer's own.
        least = min(counted_peak(step) for _ in range(5))
        found.append({"tokens": tokens, "heads": heads, "dim": dim, "bytes": least})
    return found


def refusals(mesh: DeviceMesh) -> dict[str, str]:
    """The messages of what is refused."""
    cp, found = ContextParallel(mesh, 16), {}
    q, local = torch.randn(1, 2, 16, 8), torch.randn(1, 2, cp.queries.length, 8)

    def message(what: str, call: Any) -> None:
        try:
            call()
        except ValueError as error:
            found[what] = str(error)

    sharded, whole = distribute_tensor(q, mesh, [Shard(2)]), distribute_tensor(q, mesh, [Replicate()])
    kl, lse = streamkl.attention_kl, streamkl.attention_lse
    message("queries by tokens", lambda: kl(sharded, whole, sharded, whole, causal=True))
    message("keys by tokens", lambda: kl(whole, sharded, whole, sharded, window=(3, 3)))
    message("lse by tokens", lambda: lse(sharded, whole, causal=True))
    index_k = distribute_tensor(q[:, 0], mesh, [Shard(1)])
    message("index keys by tokens", lambda: streamkl.indexer_kl(whole, whole, whole, index_k))
    message("DTensors", lambda: cp.attention_kl(sharded, sharded, sharded, sharded, causal=True))
    message("all tokens", lambda: cp.attention_kl(q, q, q, q))
    message("the reference", lambda: cp.attention_kl(local, local, local, local, backend="reference"))
    message("a teacher that learns", lambda: cp.attention(local.clone().requires_grad_(), local, local))
    message("no window", lambda: cp.attention(local, local, local, window=0))
    message("a part of the tokens", lambda: cp.heads_to_tokens(local))
    message("packed attention", lambda: cp.attention(local[0], local[0], local[0]))
    message("two dimensions", lambda: ContextParallel(init_device_mesh("cpu", (1, mesh.size())), 16))
    # Without a mask a DTensor is moved as it has to be, and the loss is that of whole tensors.
    with torch.no_grad():
        unmasked = kl(sharded, whole, sharded, whole).full_tensor()
    found["unmasked"] = str((unmasked - kl(q, q, q, q)).abs().item() < 1e-6)
    return found


def shared_keys_are_those_of_the_rank(mesh: DeviceMesh) -> bool:
    """Whether keys that the caller gathered give the bits of keys that the loss gathers, packed and not."""
    rng = torch.Generator().manual_seed(3)
    cp, same = ContextParallel(mesh, TOKENS), True
    for packed in (False, True):
        shapes = ((TOKENS, 4, 8), (TOKENS, 2, 8), (TOKENS, 2, 8), (TOKENS, 8)) if packed else (
            (2, 4, TOKENS, 8), (2, 2, TOKENS, 8), (2, 2, TOKENS, 8), (2, TOKENS, 8))  # fmt: skip
        dims = (0, 0, 0, 0) if packed else (2, 2, 2, 1)
        q, k, iq, ik = (cp.shard(torch.randn(s, generator=rng), d) for s, d in zip(shapes, dims, strict=True))
        ends = {name: torch.tensor([0, 20, 90, TOKENS - 1]) for name in ("cu_seqlens_q", "cu_seqlens_k") if packed}
        same &= torch.equal(
            cp.indexer_kl(q, k, iq, ik, **ends), cp.indexer_kl(q, cp.gather(k, dims[0]), iq, ik, **ends)
        )
    return bool(same)


def told(result: dict[str, Any]) -> dict[str, Any]:
    """Prints how far it is: 300 problems take a while."""
    if result:
        print(result["seed"], result["error"], file=sys.stderr, flush=True)
    return result


def main(to: str, seeds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))["cp"]
    found: dict[str, Any] = {
        "float64": [told(difference(mesh, seed)) for seed in range(seeds)],
        "rule": [told(ratio(mesh, seed)) for seed in range(seeds)],
        "attention": attention(mesh),
        "products": balance(mesh),
        "traffic": traffic(mesh),
        "memory": memory(mesh),
        "refusals": refusals(mesh),
        "shared_keys": shared_keys_are_those_of_the_rank(mesh),
    }
    if mesh.get_rank() == 0:
        Path(to).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
