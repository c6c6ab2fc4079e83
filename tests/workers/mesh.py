"""Distillation steps on meshes of real ranks, compared with those of one process.

Arguments: a JSON file with the requests, and a folder. Each request has ``ranks`` and ``cells``, which are the settings
of a run and the name of its problem; one with ``broken`` has a rank whose scores are not finite, one with ``mixed`` a
model that mixes tokens outside of attention, and of one with ``counted`` the exchanges are counted. One process writes
the step of each problem to the folder, several read it; what was found is ``found.json`` there. Ranks are started by
torchrun's own agent, which forks them from this process, so that everything is imported once.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from streamkl.distillation import Settings, ranks
from streamkl.distillation.arguments import training_arguments
from streamkl.distillation.replica import Replica
from streamkl.distillation.run import prepare
from streamkl.testing.traffic import Traffic

for name in (  # which a run imports when it needs them
    "torch._dynamo",
    "torch.distributed.fsdp",
    "transformers.distributed.fsdp",
    "transformers.models.deepseek_v32.modeling_deepseek_v32",
):
    importlib.import_module(name)


def step(cell: dict[str, Any]) -> tuple[dict[str, Tensor], Any]:
    """One step of a run in float64: losses and figures of each layer, and gradients of each indexer's parameter."""
    settings = Settings(**cell["settings"])
    training_arguments(settings)  # joins the ranks
    settings.dtype = "float64"
    prepared = prepare(settings)
    prepared.model.backbone.set_experts_implementation("eager")  # others have no float64
    for module in prepared.model.backbone.modules():
        if isinstance(module, LlamaRMSNorm):  # in float32, whose roundings flip where ranks differ by 1e-16
            module.forward = functools.partial(normalised, module)
    model, mesh = prepared.model, prepared.model.mesh
    replica = Replica(model) if ranks.count() > 1 else model
    first = ranks.number() // mesh.context * settings.batch
    rows = [prepared.samples[first + n] for n in range(settings.batch)]
    model.measure(settings.measured)
    replica(**{name: torch.stack([row[name] for row in rows]) for name in rows[0]}, backward=Tensor.backward)
    if isinstance(replica, Replica):
        replica.reduce_gradients()
    found = {
        f"{name} of layer {layer}": torch.tensor(value, dtype=torch.float64)
        for layer, figures in model.figures().items()
        for name, value in figures.items()
    }
    for value in found.values():
        if ranks.count() > 1:
            dist.all_reduce(value)
            value /= ranks.count()
    for name, parameter in model.indexers.named_parameters():
        assert parameter.grad is not None, name
        found[f"gradient of {name}"] = parameter.grad
    return found, prepared


def normalised(norm: LlamaRMSNorm, hidden: Tensor) -> Tensor:
    """The norm of transformers in the dtype of its input."""
    return norm.weight * (hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + norm.variance_epsilon))


def broken(cell: dict[str, Any]) -> dict[str, Any]:
    """A step in which the index scores of one rank alone are not finite: its losses, and the gradients after all."""
    settings = Settings(**cell["settings"])
    prepared = prepare(settings)
    model, replica = prepared.model, Replica(prepared.model)
    if ranks.number() == 1:
        for indexer in model.indexers.values():
            indexer.register_forward_hook(lambda _, __, index: index._replace(index_q=index.index_q * torch.nan))
    rows = [prepared.samples[n] for n in range(settings.batch)]
    replica(**{name: torch.stack([row[name] for row in rows]) for name in rows[0]}, backward=Tensor.backward)
    replica.reduce_gradients()
    gradients = [p.grad for p in model.indexers.parameters() if p.grad is not None]
    return {"broken": model.take_broken(), "finite": [bool(gradient.isfinite().any()) for gradient in gradients]}


def mixed(cell: dict[str, Any]) -> dict[str, Any]:
    """What the probe of shared sequences says of a model whose embeddings have those of the tokens before in them."""
    model = prepare(Settings(**cell["settings"])).model
    model.backbone.get_input_embeddings().register_forward_hook(lambda _, __, output: output + output.roll(1, 1))
    try:
        model._probe()
    except ValueError as error:
        return {"said": str(error)}
    return {"said": ""}


def counted(cell: dict[str, Any]) -> dict[str, Any]:
    """Bytes that this rank receives in a forward and the backward of all layers, by collective."""
    settings = Settings(**cell["settings"])
    training_arguments(settings)  # joins the ranks
    prepared = prepare(settings)
    rows = [prepared.samples[n] for n in range(settings.batch)]
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    with Traffic(prepared.model.mesh.context) as counter:
        prepared.model(**batch, backward=Tensor.backward)
    return {"settings": cell["settings"], "bytes": counter.bytes}


SPECIAL = {"broken": broken, "mixed": mixed, "counted": counted}
"""Cells that are not compared with one process."""


def resident(backbone: Any) -> int:
    """Bytes of the frozen model's weights on this rank, all that a step leaves behind."""
    tensors = {id(p): p for p in backbone.parameters() if not p.requires_grad}.values()
    return sum((p.to_local() if hasattr(p, "to_local") else p).nbytes for p in tensors)


def rank(cells: list[dict[str, Any]], folder: str) -> list[dict[str, Any]]:
    """What this rank finds."""
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a fork has that of the agent
    torch.set_num_threads(1)
    results = []
    for cell in cells:
        special = next((function for name, function in SPECIAL.items() if cell.get(name)), None)
        if special is not None:
            results.append({"cell": cell["name"], **special(cell)})
            continue
        found, prepared = step(cell)
        kept = Path(folder) / f"{cell['problem']}.pt"
        if ranks.count() == 1:
            torch.save(found, kept)
        wanted = torch.load(kept)
        assert found.keys() == wanted.keys()
        errors = {
            name: float((found[name] - wanted[name]).abs().max() / wanted[name].abs().max().clamp(min=1e-6))
            for name in wanted
        }
        results.append({"cell": cell["name"], "errors": errors, "resident": resident(prepared.model.backbone)})
    return results


def main() -> None:
    requests, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    found = {}
    for request in requests:
        config = LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=request["ranks"], rdzv_backend="c10d", rdzv_endpoint="localhost:0",
            run_id=f"{os.getpid()}-{request['ranks']}", monitor_interval=0.1, start_method="fork",
            logs_specs=DefaultLogsSpecs(),
        )  # fmt: skip
        found[request["ranks"]] = elastic_launch(config, rank)(request["cells"], str(folder))
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
