"""Two ranks: a sparse model under FSDP2 and under DDP has the gradients of one rank with the whole batch."""

import copy
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from streamkl.integrations.transformers import new_indexers, sparsify
from streamkl.sparse import IndexerSelector
from streamkl.testing.tiny_models import tiny_model

TOKENS, KEYS, BLOCK = 32, 12, 4


def sparse(model: Any) -> Any:
    """The same model, sparse by new indexers, the same for every copy."""
    torch.manual_seed(1)
    sparsify(model, IndexerSelector(KEYS, BLOCK), new_indexers(model, head_dim=16).to(model.dtype))
    return model.train()


def gradients(model: Any, ids: Tensor, weights: Any) -> dict[str, Tensor]:
    """The gradients of a language-model loss, by the names of ``weights``."""
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    found = {name: p.grad for name, p in weights.named_parameters() if p.grad is not None}
    return {name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad for name, grad in found.items()}


def main() -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = tiny_model("llama").double()
    ids = torch.randint(5, 60, (4, TOKENS), generator=torch.Generator().manual_seed(0))
    own = ids[2 * rank : 2 * rank + 2]
    alone = sparse(copy.deepcopy(model))
    wanted = gradients(alone, ids, alone)
    dense = copy.deepcopy(model).train()
    other = gradients(dense, ids, dense)
    assert max(float((wanted[name] - other[name]).abs().max()) for name in wanted) > 1e-4, "it is sparse"

    sharded = sparse(copy.deepcopy(model))
    mesh = init_device_mesh("cpu", (2,))
    for layer in sharded.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    replicated = sparse(copy.deepcopy(model))
    for checkpointed in (False, True):
        if checkpointed:
            for each in (sharded, replicated):
                each.zero_grad()
                each.gradient_checkpointing_enable({"use_reentrant": False})
        found = {
            "fsdp2": gradients(sharded, own, sharded),
            "ddp": gradients(DistributedDataParallel(replicated), own, replicated),
        }
        for name, got in found.items():
            assert got.keys() == wanted.keys(), name
            for weight, grad in got.items():
                torch.testing.assert_close(grad, wanted[weight], rtol=1e-9, atol=1e-12, msg=f"{name} {weight}")
    dist.destroy_process_group()
    print("equal")


if __name__ == "__main__":
    main()
