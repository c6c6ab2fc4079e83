"""Trains a one-head student to attend as the mean of a teacher's heads, on sequences with a structure to find.

    python examples/train_student.py

The teacher attends to earlier tokens of the same class as its own; the student sees embeddings of half the width.
"""

from __future__ import annotations

import torch
from torch import nn

from streamkl import attention_kl, attention_lse

BATCH, TOKENS, CLASSES, WIDTH, HEADS, DIM = 2, 512, 16, 64, 8, 32


class Student(nn.Module):
    """One query head and one key head over token embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, DIM, bias=False)
        self.k = nn.Linear(WIDTH, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys ``[B, 1, N, D]`` of embeddings ``[B, N, WIDTH]``."""
        return self.q(x).unsqueeze(1), self.k(x).unsqueeze(1)


def main(steps: int = 60) -> list[float]:
    """Runs the training and returns the losses."""
    torch.manual_seed(0)
    embedding = torch.randn(CLASSES, WIDTH)
    teacher_q = torch.randn(HEADS, WIDTH, DIM) / WIDTH**0.5
    teacher_k = teacher_q[::2] + 0.1 * torch.randn(HEADS // 2, WIDTH, DIM) / WIDTH**0.5  # two query heads per key head
    student = Student()
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        x = embedding[torch.randint(CLASSES, (BATCH, TOKENS))] + 0.1 * torch.randn(BATCH, TOKENS, WIDTH)
        with torch.no_grad():  # a frozen teacher, and the log-sum-exp that its attention would have computed
            q = torch.einsum("bnw,hwd->bhnd", x, teacher_q)
            k = torch.einsum("bnw,hwd->bhnd", x, teacher_k)
            lse = attention_lse(q, k, causal=True)
        loss = attention_kl(q, k, *student(x), causal=True, teacher_lse=lse)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 10 == 0 or step == steps - 1:
            print(f"step {step:3d}  KL {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()
