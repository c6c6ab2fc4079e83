"""Run under ``LD_PRELOAD`` of ``allocations.c``: prints the peak of a forward's and backward's allocations as JSON."""

import ctypes
import json
import sys

import torch

from streamkl import attention_kl, attention_lse, indexer_kl, value_checks

INDEX_HEADS, SELECTED = 8, 96
"""Heads of an indexer, and selected keys of a row."""


def main(tokens: int, dtype: torch.dtype, path: str, backend: str, heads: int, teacher_dim: int, threads: int) -> None:
    torch.set_num_threads(threads)
    dim = 64
    q, k = (torch.randn(1, n, tokens, teacher_dim, dtype=dtype) for n in (heads, 1))
    student_q, student_k = (torch.randn(1, 1, tokens, dim, dtype=dtype) for _ in range(2))
    options = {"causal": True, "backend": backend}
    if path == "window":
        options["window"] = (8, 0)
    if path in ("one_pass", "window"):
        options["teacher_lse"] = attention_lse(q, k, **options)
    if path in ("topk", "indexer"):
        student_q, student_k = torch.randn(1, INDEX_HEADS, tokens, dim, dtype=dtype), student_k[:, 0]
    if path == "topk":
        rows, steps = torch.arange(tokens)[:, None], torch.arange(SELECTED)
        spread = rows - steps * (1 + rows // SELECTED)
        options["topk_indices"] = torch.where(spread >= 0, spread, -1)[None]
        value_checks.TOPK_CHUNK = 1 << 12  # or the check of the indices would take more than what is to be measured
    function = attention_kl if student_k.dim() == 4 else indexer_kl
    student_q.requires_grad_()
    student_k.requires_grad_()

    hook = ctypes.CDLL(None)
    hook.allocations_exclude.argtypes = (ctypes.c_int, ctypes.c_size_t)
    for name in ("allocations_made", "allocations_scratch_peak", "allocations_held_peak"):
        getattr(hook, name).restype = ctypes.c_long
    sizes = {
        "gradients": tuple(tokens * dim * size * n for size in (2, 4) for n in sorted({1, student_q.shape[1]})),
        "rows": (tokens, tokens * 4),
        "weights": (INDEX_HEADS * tokens * 4,),
    }
    for n, size in enumerate(sizes["gradients"] + sizes["rows"] + sizes["weights"]):
        hook.allocations_exclude(n, size)
    gradients = len(sizes["gradients"])
    hook.allocations_count(1)
    function(q, k, student_q, student_k, **options).backward()
    hook.allocations_count(0)
    result = {
        "allocations": hook.allocations_made(),
        "scratch": hook.allocations_scratch_peak(),
        "gradients": sum(hook.allocations_held_peak(n) for n in range(gradients)),
        "rows": sum(hook.allocations_held_peak(n) for n in range(gradients, gradients + len(sizes["rows"]))),
        "threads": threads,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(
        int(sys.argv[1]),
        getattr(torch, sys.argv[2]),
        sys.argv[3],
        sys.argv[4],
        int(sys.argv[5]),
        int(sys.argv[6]),
        int(sys.argv[7]),
    )
