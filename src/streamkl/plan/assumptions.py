"""What a plan assumes about the hardware: nothing here was measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Assumptions:
    """Speeds and sizes of the GPUs. Shares are of ``flops``; exchanges do not overlap with products.

    Attributes:
        memory: GB of a GPU.
        headroom: The share of it that is left for the allocator, kernels and the process itself.
        flops: TFLOP/s of a GPU in the dtype of the teacher.
        projections: The share of it in projections and MLPs.
        attention: The share of it in the teacher's attention.
        loss: The share of it in the passes of the loss.
        bandwidth: GB/s that a GPU receives from others of its node.
        node_bandwidth: GB/s that a GPU receives from other nodes.
        node: GPUs of a node.
    """

    memory: float = 80.0
    headroom: float = 0.1
    flops: float = 989.0
    projections: float = 0.45
    attention: float = 0.5
    loss: float = 0.3
    bandwidth: float = 350.0
    node_bandwidth: float = 40.0
    node: int = 8

    def __post_init__(self) -> None:
        for name in ("memory", "flops", "bandwidth", "node_bandwidth", "node"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0: got {getattr(self, name)}")
        for name in ("projections", "attention", "loss"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be a share, above 0 and up to 1: got {getattr(self, name)}")
        if not 0 <= self.headroom < 1:
            raise ValueError(f"headroom must be a share, from 0 to below 1: got {self.headroom}")

    @property
    def usable(self) -> float:
        """Bytes of a GPU that a plan may fill."""
        return self.memory * 1e9 * (1 - self.headroom)

    def seconds(self, received: float, ranks: int) -> float:
        """Time to receive so many bytes from ranks that share an exchange: of one node, or of several."""
        return received / 1e9 / (self.bandwidth if ranks <= self.node else self.node_bandwidth)
