"""The memory of a distillation step on CPUs: the peak of each rank over what is resident after a first step.

The model has the shape of SmolLM2-135M cut to a few layers, with random weights. Run alone it is one process; under
``torchrun`` all ranks share each sequence::

    python benchmarks/distill_memory.py --tokens 65536
    torchrun --standalone --nproc-per-node 4 benchmarks/distill_memory.py --tokens 65536

Weights are resident before the step, so they are not part of the figure.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from streamkl.bench.isolated import RETURNED, peak_resident, start_counting
from streamkl.distillation import Settings, ranks
from streamkl.distillation.indexers import make_indexers
from streamkl.distillation.mesh import Mesh
from streamkl.distillation.model import Distiller
from streamkl.integrations.transformers.families import family_of
from streamkl.testing.smollm2 import CONFIG

FIRST = 512
"""Tokens of the first step, which loads what is loaded once."""


def main() -> None:
    """Prints the peak of this rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tokens", 65536), ("layers", 2), ("heads", 1), ("head-dim", 64), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    ranks.join(1800, use_cpu=True)
    torch.manual_seed(0)
    config = LlamaConfig(
        **{**CONFIG, "num_hidden_layers": given.layers, "max_position_embeddings": max(given.tokens, FIRST)}
    )
    backbone: LlamaForCausalLM = LlamaForCausalLM(config).to(getattr(torch, given.dtype))  # pyright: ignore
    family = family_of(config)
    settings = Settings(model="none", text=["none"], output="none", heads=given.heads, head_dim=given.head_dim)
    model = Distiller(backbone, family, make_indexers(backbone, family, settings), mesh=Mesh(ranks.count()))
    optimizer = torch.optim.AdamW(model.indexers.parameters(), lr=0.0)  # its state counts; ranks keep equal weights
    before = 0
    for tokens in (FIRST, given.tokens):
        ids = torch.randint(CONFIG["vocab_size"], (1, tokens), generator=torch.Generator().manual_seed(0))
        before = start_counting("cpu")
        loss = float(model(ids, backward=torch.Tensor.backward)["loss"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    print(
        f"rank {ranks.number()} of {ranks.count()}, {given.tokens:,} tokens, {given.layers} layers, {given.dtype}: "
        f"peak {(peak_resident() - before) / 1e6:,.0f} MB over {before / 1e6:,.0f} MB resident, loss {loss:.9f}",
        flush=True,
    )


if __name__ == "__main__":
    if any(os.environ.get(name) != value for name, value in RETURNED.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **RETURNED})
    main()
