"""Measures time to first token: dense and sparse alternate in one process; memory, each in a process of its own.

Run as ``python -m streamkl.bench.prefill.run REQUEST`` it makes one pass and prints the memory that it added.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from streamkl.bench import isolated, machine
from streamkl.bench.prefill import allocator, gate, models
from streamkl.bench.prefill.records import Prefill
from streamkl.bench.prefill.stopwatch import Stopwatch
from streamkl.integrations.transformers import SparseModel, new_indexers, sparsify
from streamkl.integrations.transformers.families import family_of
from streamkl.sparse import IndexerSelector, OracleSelector, WindowSelector

SELECTORS = {"indexer": IndexerSelector, "oracle": OracleSelector, "window": WindowSelector}


@dataclass(frozen=True)
class Job:
    """A measurement.

    Attributes:
        model: One of `models.SHAPES`, or the folder of a checkpoint.
        tokens: Of the random prompt.
        layers: How many of the model's layers; all if ``None``.
        selector: One of `SELECTORS`.
        indexers: The folder of indexers; untrained ones if ``None``.
        topk: Selected keys per query block.
        query_block: Queries that share their top-k.
        index_dim: Of untrained indexers.
        dtype: Of weights and activations.
        threads: CPU threads.
        rounds: How often each method runs.
        keep_memory: Whether freed memory stays with the process, dense and sparse (`allocator`).
    """

    model: str
    tokens: int
    layers: int | None = None
    selector: str = "indexer"
    indexers: str | None = None
    topk: int = 2048
    query_block: int = 64
    index_dim: int = 128
    dtype: str = "bfloat16"
    threads: int = 1
    rounds: int = 3
    keep_memory: bool = True


def run(job: Job, memory: bool) -> Iterator[Prefill]:
    """Measures dense and sparse attention of a job, and yields the dense record first."""
    torch.set_num_threads(job.threads)
    if job.keep_memory:
        allocator.keep_freed_memory()
    model, prompt = _prepared(job)
    gate.check(model, prompt, job.query_block)
    passes: dict[str, list[dict[str, float]]] = {"dense": [], job.selector: []}
    for _ in range(job.rounds):
        for method, seen in passes.items():
            seen.append(_one_pass(model, prompt, job, method))
    for method, seen in passes.items():
        totals = [sum(parts.values()) for parts in seen]
        middle = min(seen, key=lambda parts: abs(sum(parts.values()) - statistics.median(totals)))
        record = _record(job, model, method)
        yield replace(record, seconds=totals, parts=middle, extra_bytes=_memory_alone(job, method) if memory else None)


def _prepared(job: Job) -> tuple[PreTrainedModel, Tensor]:
    model = models.make(job.model, job.layers, getattr(torch, job.dtype))
    prompt = torch.randint(0, model.config.vocab_size, (1, job.tokens), generator=torch.Generator().manual_seed(0))
    return model, prompt


@torch.no_grad()
def _one_pass(model: PreTrainedModel, prompt: Tensor, job: Job, method: str) -> dict[str, float]:
    """Seconds of each part of one prefill."""
    handle = None if method == "dense" else _sparsify(model, job)
    watch, cls = Stopwatch(), SELECTORS[job.selector]
    choose = cls.select
    cls.select = watch.timed("selection", choose)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        with watch.watching(_parts(model, handle)):
            model(prompt, logits_to_keep=1)
    finally:
        cls.select = choose
        if handle is not None:
            handle.remove()
    return watch.seconds


def _sparsify(model: PreTrainedModel, job: Job) -> SparseModel:
    """The model with the selector of a job."""
    indexers = job.indexers
    if job.selector == "indexer" and indexers is None:
        torch.manual_seed(0)
        indexers = new_indexers(model, head_dim=job.index_dim).to(model.dtype)
    return sparsify(model, SELECTORS[job.selector](job.topk, job.query_block), indexers)


def _parts(model: PreTrainedModel, handle: SparseModel | None) -> dict[nn.Module, str]:
    """The modules whose time is measured apart: linear maps of the layers, attention, and indexers."""
    attentions = family_of(model.config).attentions(model)
    layers = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == len(attentions)]
    parts: dict[nn.Module, str] = {m: "projections" for m in layers[0].modules() if isinstance(m, nn.Linear)}
    parts |= dict.fromkeys(attentions.values(), "attention")
    return parts | ({} if handle is None else dict.fromkeys(handle.indexers.values(), "selection"))


def _record(job: Job, model: PreTrainedModel, method: str) -> Prefill:
    config, dense = model.config.get_text_config(), method == "dense"
    return Prefill(
        model=job.model, random_weights=job.model in models.SHAPES, layers=config.num_hidden_layers,
        all_layers=models.layers_of(job.model),
        tokens=job.tokens, method=method, topk=0 if dense else job.topk, query_block=0 if dense else job.query_block,
        dtype=job.dtype, threads=job.threads, keep_memory=job.keep_memory, machine=machine.facts(torch.device("cpu")),
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )  # fmt: skip


def _memory_alone(job: Job, method: str) -> int:
    """The memory that one pass adds to a process of its own at its peak."""
    request = json.dumps({"job": asdict(job), "method": method})
    result = subprocess.run([sys.executable, "-m", __name__, request], capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(f"{method} failed at {job.tokens:,} tokens: {result.stderr.strip()[-2000:]}")
    return int(result.stdout.splitlines()[-1])


def _main(request: dict[str, Any]) -> None:
    job = Job(**request["job"])
    torch.set_num_threads(job.threads)
    model, prompt = _prepared(job)
    _one_pass(model, prompt[:, :256], job, request["method"])  # loads or builds everything that first use does
    before = isolated.start_counting("cpu")
    _one_pass(model, prompt, job, request["method"])
    sys.stdout.write(f"{isolated.peak_resident() - before}\n")


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
