"""Run under ``LD_PRELOAD`` of ``allocations.c``: prints the peak of what a selection takes from the allocator."""

import ctypes
import json
import sys

import torch

from streamkl.sparse import index_topk, oracle_topk


def main(kind: str, tokens: int, topk: int, query_block: int, backend: str) -> None:
    torch.set_num_threads(1)
    q, k = (torch.randn(1, 1, tokens, 32, dtype=torch.bfloat16) for _ in range(2))

    def select(n: int) -> None:
        if kind == "index":
            index_topk(q[:, :, :n], k[:, 0, :n], topk=topk, query_block=query_block, backend=backend)
        else:
            oracle_topk(q[:, :, :n], k[:, :, :n], topk=topk, query_block=query_block, backend=backend)

    select(64)  # what is built on first use is there
    hook = ctypes.CDLL(None)
    for name in ("allocations_made", "allocations_scratch_peak"):
        getattr(hook, name).restype = ctypes.c_long
    hook.allocations_count(1)
    select(tokens)
    hook.allocations_count(0)
    print(json.dumps({"allocations": hook.allocations_made(), "peak": hook.allocations_scratch_peak()}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
