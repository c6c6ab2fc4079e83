"""One sequence over ranks on CPUs: seconds, peak memory per rank and the loss of one layer, for the machine at hand.

Run alone it is one process; under ``torchrun`` the same sequence is shared by all ranks. The numbers of a token are a
function of its position, so the loss is the same however many ranks there are::

    python benchmarks/context_parallel.py --tokens 32768 --threads 2
    torchrun --standalone --nproc-per-node 2 benchmarks/context_parallel.py --tokens 32768 --threads 1
    torchrun --standalone --nproc-per-node 2 benchmarks/context_parallel.py --tokens 1048576 --heads 1 --index-heads 1
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from streamkl.distributed import ContextParallel

PIECE = 4096
"""How many tokens are drawn from one seed: a rank draws those of its own chunks."""


def drawn(cp: ContextParallel, name: int, heads: int, dim: int, dtype: torch.dtype) -> Tensor:
    """``[1, heads, n, dim]``: the tokens of this rank, each piece of the sequence from a seed of its own."""
    parts = []
    for start, end in cp.queries.spans:
        for piece in range(start // PIECE, -(-end // PIECE)):
            rng = torch.Generator().manual_seed(name * 1_000_003 + piece)
            whole = torch.randn(1, heads, PIECE, dim, generator=rng)
            inside = slice(max(start - piece * PIECE, 0), min(end - piece * PIECE, PIECE))
            parts.append(whole[:, :, inside].to(dtype))
    return torch.cat(parts, 2)


def peak() -> float:
    """The most that this process was resident with, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def layer(cp: ContextParallel, given: argparse.Namespace) -> tuple[float, dict[str, float]]:
    """The loss of a layer, and the seconds of its parts: the attention of the teacher; loss and gradients."""
    dtype = getattr(torch, given.dtype)
    heads = (given.heads, given.kv_heads, given.kv_heads)
    query, key, value = (drawn(cp, name, count, given.dim, dtype) for name, count in enumerate(heads))
    index_q = drawn(cp, 3, given.index_heads, given.index_dim, dtype).requires_grad_()
    index_k = drawn(cp, 4, 1, given.index_dim, dtype)[:, 0].requires_grad_()
    dist.barrier()
    start = time.perf_counter()
    keys = cp.gather(key)
    _, lse = cp.attention(query, keys, value)
    attended = time.perf_counter()
    loss = cp.indexer_kl(query, keys, index_q, index_k, teacher_lse=lse)
    loss.backward()
    dist.barrier()
    return loss.item(), {"attention": attended - start, "loss": time.perf_counter() - attended}


def main() -> None:
    """Runs one layer, after a small one that loads what is loaded once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tokens", 32768), ("threads", 1), ("heads", 4), ("kv-heads", 1), ("dim", 64),
                          ("index-heads", 4), ("index-dim", 64), ("repeats", 1)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="bfloat16", choices=["float64", "float32", "bfloat16", "float16"])
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layer(ContextParallel(mesh, 512), given)
    for _ in range(given.repeats):
        loss, seconds = layer(ContextParallel(mesh, given.tokens), given)
        parts = ", ".join(f"{name} {value:.2f} s" for name, value in seconds.items())
        print(
            f"rank {mesh.get_rank()} of {mesh.size()}, threads {given.threads}, {given.tokens:,} tokens, "
            f"{given.dtype}: {parts}, peak {peak():,.0f} MB, loss {loss:.9f}",
            flush=True,
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
