"""Attention whose head groups select keys for themselves: each group is a sequence of a larger batch."""

from __future__ import annotations

from torch import Tensor


def by_group(indices: Tensor, *of_heads: Tensor) -> tuple[Tensor, ...]:
    """Selected keys and tensors of heads, for functions that take one selection for all heads.

    Args:
        indices: ``[B, R, Nq, K]``: the selected keys of ``R`` head groups; ``[B, Nq, K]`` are those of all heads, and
            nothing changes.
        of_heads: ``[B, H, ...]`` each, where ``R`` divides ``H``.

    Returns:
        ``[B R, Nq, K]``, and ``[B R, H/R, ...]`` each.
    """
    if indices.dim() == 3:
        return indices, *of_heads
    groups = indices.shape[1]
    return indices.flatten(0, 1), *(x.unflatten(1, (groups, -1)).flatten(0, 1) for x in of_heads)
