"""The bare products of a forward: operands packed beforehand, two products per tile, nothing else.

They are a lower bound for any implementation on this matrix engine.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

BLOCK_Q = 256
BLOCK_K = 256
"""The tile for which the products alone ran fastest, of 64 to 256 rows by 64 to 1,024 keys."""
PADDING = 16
"""Columns after a tile, so that its rows are not a power of two apart and do not fall on a few sets of the cache."""


def bare_products(
    a_q: Tensor, a_k: Tensor, b_q: Tensor, b_k: Tensor, causal: bool, block_q: int = BLOCK_Q, block_k: int = BLOCK_K
) -> Callable[[], Tensor]:
    """Packs ``q [B, H, N, D]`` and ``k [B, Hkv, N, D]`` of both sides, and returns the call to time.

    The call returns the sum of each row block's last products, which proves that they were computed.
    """
    from streamkl.engines.cpu import build

    build.load()
    if not torch.ops.streamkl_cpu.native(a_q.dtype):
        a_q, a_k, b_q, b_k = (x.float() for x in (a_q, a_k, b_q, b_k))
    operands = (_rows(a_q), _tiles(a_k, block_k), _rows(b_q), _tiles(b_k, block_k))
    return lambda: torch.ops.streamkl_cpu.bare_products(*operands, block_q, block_k, causal)


def _rows(q: Tensor) -> Tensor:
    """``[B, H, N, D]``, with ``D`` made even."""
    return functional.pad(q, (0, q.shape[-1] % 2)).contiguous()


def _tiles(k: Tensor, block_k: int) -> Tensor:
    """``[B, Hkv, tiles, D, block_k + PADDING]``: each tile transposed, half precision in pairs of ``D``."""
    k = functional.pad(k, (0, k.shape[-1] % 2, 0, -k.shape[-2] % block_k)).unflatten(2, (-1, block_k))
    k = functional.pad(k, (0, 0, 0, PADDING))
    if k.dtype == torch.float32:
        return k.transpose(-1, -2).contiguous()
    pairs = k.unflatten(-1, (-1, 2)).transpose(-2, -3)  # [B, Hkv, tiles, D / 2, block_k + PADDING, 2]
    return pairs.reshape(*k.shape[:-2], k.shape[-1], block_k + PADDING)
