"""The same weights on every rank, and gradients that are means over the sequences of all of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class Replica(nn.Module):
    """The model of one rank among several.

    `DistributedDataParallel` waits for one backward after the forward, and orders its buckets by the first step that a
    process runs, so that sums depend on where a run was resumed. Here the gradients of a layer are one buffer, summed
    in the order of the layers: the bits of a step depend on nothing that came before.

    Args:
        module: The model; what it trains becomes that of rank 0.
    """

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module
        for tensor in module.trained():
            dist.broadcast(tensor.data, 0)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """That of the model."""
        return self.module(*args, **kwargs)

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Replaces all gradients by their means over sequences, on all ranks, which all call it.

        Ranks that share a sequence have the gradients of their own tokens, whose sum is that of the sequence.
        """
        for parameters in self.module.buckets():
            for parameter in parameters:
                if parameter.grad is None:  # ranks sum buffers of one size
                    parameter.grad = torch.zeros_like(parameter)
            gradients = [p.grad for p in parameters if p.grad is not None]
            summed = torch.cat([gradient.flatten() for gradient in gradients]) / self.module.mesh.data
            dist.all_reduce(summed)
            for gradient, part in zip(gradients, summed.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient))
