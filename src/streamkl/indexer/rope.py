"""Rotary position embedding of the first dims of a head, in the two layouts that checkpoints use."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Layout = Literal["half", "interleaved"]
LAYOUTS = ("half", "interleaved")


def rope_tables(positions: Tensor, dim: int, base: float = 10000.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines of ``positions``, as transformers' ``position_embeddings``: the second half repeats the first.

    Args:
        positions: ``[...]``, integers or floats.
        dim: How many dims are rotated, even.
        base: The base of the frequencies, ``rope_theta`` of a checkpoint.

    Returns:
        ``cos`` and ``sin``, each ``[..., dim]``, float32.

    Examples:
        >>> import torch
        >>> from streamkl.indexer import rope_tables
        >>> cos, sin = rope_tables(torch.arange(5), dim=8)
        >>> cos.shape, bool((cos[0] == 1).all())
        (torch.Size([5, 8]), True)
    """
    if dim < 0 or dim % 2:
        raise ValueError(f"dim must be even and not negative, because dims are rotated in pairs: got {dim}")
    # float32 would lose the digits of an angle at a million positions; Apple's GPUs have nothing better.
    dtype = torch.float32 if positions.device.type == "mps" else torch.float64
    exponents = torch.arange(0, dim, 2, device=positions.device, dtype=dtype) / max(dim, 1)
    angles = positions.to(dtype)[..., None] * base**-exponents
    angles = torch.cat((angles, angles), -1)
    return angles.cos().float(), angles.sin().float()


def fewer_frequencies(table: Tensor, dim: int) -> Tensor:
    """A table of cosines or sines of ``dim`` dims: every n-th frequency of those that it has.

    Args:
        table: ``[..., D]``, where ``dim`` divides ``D``; its second half repeats the first.
        dim: How many dims are rotated, even.

    Returns:
        ``[..., dim]``.

    Examples:
        >>> import torch
        >>> from streamkl.indexer.rope import fewer_frequencies, rope_tables
        >>> cos, _ = rope_tables(torch.arange(5), dim=8)
        >>> fewer_frequencies(cos, 4).shape
        torch.Size([5, 4])
    """
    if table.shape[-1] == dim:
        return table
    half = table[..., : table.shape[-1] // 2][..., :: table.shape[-1] // dim]
    return torch.cat((half, half), -1)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, layout: Layout = "half") -> Tensor:
    """Rotates the first dims of ``x``, as many as ``cos`` has, and leaves the rest.

    ``"half"`` rotates dim ``i`` with dim ``i + dim/2`` (Llama, Qwen, DeepSeek-V3.2's indexer), ``"interleaved"`` dim
    ``2i`` with ``2i + 1`` (GLM's indexer). A q and a k of the same layout have the product that they have in
    transformers, which may store interleaved dims in another order.

    Args:
        x: ``[..., D]``.
        cos: ``[..., dim]`` with ``dim <= D``, broadcastable to ``x``; its second half repeats the first.
        sin: The same shape.
        layout: Which dims form a pair.

    Returns:
        The shape and dtype of ``x``.

    Examples:
        >>> import torch
        >>> from streamkl.indexer import apply_rope, rope_tables
        >>> x = torch.randn(2, 5, 16)
        >>> y = apply_rope(x, *rope_tables(torch.arange(5), dim=8), layout="interleaved")
        >>> torch.allclose(x.norm(dim=-1), y.norm(dim=-1)), bool((x[..., 8:] == y[..., 8:]).all())
        (True, True)
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(map(repr, LAYOUTS))}: got {layout!r}")
    dim = cos.shape[-1]
    if dim % 2 or dim > x.shape[-1] or sin.shape[-1] != dim:
        raise ValueError(
            f"cos and sin must have the same even number of dims, at most the {x.shape[-1]} of x: "
            f"got {dim} and {sin.shape[-1]}"
        )
    rotated, rest = x[..., :dim], x[..., dim:]
    cos, sin = cos[..., : dim // 2], sin[..., : dim // 2]
    if layout == "half":
        a, b = rotated.chunk(2, -1)
        rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    else:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
        rotated = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    rotated = rotated.to(x.dtype)
    return rotated if rotated.shape == x.shape else torch.cat((rotated, rest), -1)
