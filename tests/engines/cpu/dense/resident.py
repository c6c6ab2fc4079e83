"""Prints how many bytes a training step adds to the process's resident memory at most, with so many threads."""

import sys
from pathlib import Path

import torch

from streamkl import attention_kl, attention_lse


def status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def main(tokens: int, threads: int, window: int | None) -> None:
    torch.set_num_threads(threads)
    q, k, student_q, student_k = (torch.randn(1, 1, tokens, 64) for _ in range(4))
    options = {"causal": True, "window": None if window is None else (window, 0), "backend": "cpu"}

    def step(rows: int) -> None:
        teacher = [x[:, :, :rows] for x in (q, k)]
        student = [x[:, :, :rows].detach().requires_grad_() for x in (student_q, student_k)]
        lse = attention_lse(*teacher, **options)
        attention_kl(*teacher, *student, teacher_lse=lse, **options).backward()

    step(300)  # loads what is loaded once
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before = status("VmRSS")
    step(tokens)
    print(status("VmHWM") - before)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else None)
