"""Two ranks: a module that calls the loss, under FSDP2, trains as on one rank with the whole batch."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from streamkl import attention_kl


class Student(nn.Module):
    """Projections of a student that learns the head mean of a frozen teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(16, 8, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x: torch.Tensor, teacher_q: torch.Tensor, teacher_k: torch.Tensor) -> torch.Tensor:
        return attention_kl(teacher_q, teacher_k, self.q(x)[:, None], self.k(x)[:, None], causal=True)


def train(model: nn.Module, batch: tuple[torch.Tensor, ...], average: bool) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
    losses = []
    for _ in range(5):
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        if average:
            dist.all_reduce(loss)
            loss /= 2
        losses.append(loss.item())
    return losses


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    batch = tuple(torch.randn(shape) for shape in ((4, 12, 16), (4, 4, 12, 8), (4, 2, 12, 8)))
    alone, sharded = Student(), Student()
    sharded.load_state_dict(alone.state_dict())
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
    expected = train(alone, batch, average=False)
    got = train(sharded, tuple(x[2 * rank : 2 * rank + 2] for x in batch), average=True)
    torch.testing.assert_close(torch.tensor(got), torch.tensor(expected))
    assert got[-1] < got[0]
    dist.destroy_process_group()
    print("equal")


if __name__ == "__main__":
    main()
