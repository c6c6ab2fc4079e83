"""Run under ``LD_PRELOAD`` of ``allocations.c``: prints the peak of a forward's and backward's allocations as JSON."""

import ctypes
import json
import sys

import torch

from streamkl import attention_kl, attention_lse


def main(
    tokens: int, dtype: torch.dtype, one_sweep: bool, backend: str, heads: int, teacher_dim: int, threads: int
) -> None:
    torch.set_num_threads(threads)
    dim, shares = 64, threads
    q, k = (torch.randn(1, n, tokens, teacher_dim, dtype=dtype) for n in (heads, 1))
    student_q, student_k = (torch.randn(1, 1, tokens, dim, dtype=dtype) for _ in range(2))
    lse = attention_lse(q, k, causal=True) if one_sweep else None
    student_q.requires_grad_()
    student_k.requires_grad_()

    hook = ctypes.CDLL(None)
    hook.allocations_exclude.argtypes = (ctypes.c_int, ctypes.c_size_t)
    for name in ("allocations_made", "allocations_scratch_peak", "allocations_held_peak"):
        getattr(hook, name).restype = ctypes.c_long
    # The CPU engine keeps an accumulator of dK for each thread that works on one head, in one piece.
    sizes = {
        "gradients": (tokens * dim * 2, tokens * dim * 4),
        "rows": (tokens, tokens * 4),
        "shares": (shares * tokens * dim * 4,),
    }
    for n, size in enumerate(sizes["gradients"] + sizes["rows"] + sizes["shares"]):
        hook.allocations_exclude(n, size)
    hook.allocations_count(1)
    attention_kl(q, k, student_q, student_k, causal=True, teacher_lse=lse, backend=backend).backward()
    hook.allocations_count(0)
    result = {
        "allocations": hook.allocations_made(),
        "scratch": hook.allocations_scratch_peak(),
        "gradients": sum(hook.allocations_held_peak(n) for n in (0, 1)),
        "rows": sum(hook.allocations_held_peak(n) for n in (2, 3)),
        "threads": shares,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(
        int(sys.argv[1]),
        getattr(torch, sys.argv[2]),
        sys.argv[3] == "one_sweep",
        sys.argv[4],
        int(sys.argv[5]),
        int(sys.argv[6]),
        int(sys.argv[7]),
    )
