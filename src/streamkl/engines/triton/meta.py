"""What a kernel is compiled for: plain tuples that Triton takes as compile-time constants, and that people can read."""

from __future__ import annotations

import math
from typing import NamedTuple

from streamkl.problem import Problem, Side, Support


class Config(NamedTuple):
    """How one kernel is cut: a row of the tables in ``nvidia.py`` and ``amd.py``.

    ``rows`` and ``keys`` of a tile, warps of a program and stages of its software pipeline. Heads wider than ``hold``
    are not held but read in chunks of ``chunk``, and of their gradients ``grad`` columns are made at a time; heads of
    side ``a`` wider than ``hold_a``, if it is given.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    hold: int = 256
    chunk: int = 64
    grad: int = 128
    hold_a: int | None = None


KINDS = ("lse", "paired", "mixture", "keys_one", "keys_both", "keys_group", "queries_one", "queries_group", "lse_index",
         "mixture_index", "keys_index", "queries_index", "lse_listed", "paired_listed", "mixture_listed",
         "gradient_listed", "attention")  # fmt: skip
"""Kinds of kernels; each has rows for inputs that are ``_misaligned`` and for ``_float32``, too."""

FLOAT32 = {
    **{f"{kind}_float32": {1024: Config(32, 32, 4, 1, hold=64, chunk=32, grad=64)} for kind in KINDS},
    **{
        f"{kind}_float32": {1024: Config(32, 32, 4, 1, hold=16, chunk=32, grad=32)}
        for kind in ("queries_one", "queries_group", "queries_index")
    },
}
"""float32 is multiplied without tensor cores, to keep its digits."""


class SideMeta(NamedTuple):
    """One side in a kernel: heads of ``dim`` in ``block`` columns, all of them or, where ``chunked``, piece by piece.

    ``share`` query heads read one key head. ``grad`` columns of a gradient are made at a
    time. ``upcast`` multiplies in float32, for the interpreter, which cannot multiply bfloat16.
    Of an indexer, ``heads`` heads are summed, each times a weight of the row where they are ``weighted``.
    """

    dim: int
    block: int
    chunked: bool
    share: int
    relu: bool
    grad: int
    upcast: bool
    heads: int = 0
    weighted: bool = False

    @classmethod
    def of(cls, side: Side, config: Config, hold: int, upcast: bool, weighted: bool = False) -> SideMeta:
        """Cuts a side as the config says, in chunks where it is wider than ``hold``."""
        block = padded(side.dim)
        chunked = block > hold
        return cls(
            dim=side.dim,
            block=config.chunk if chunked else block,
            chunked=chunked,
            share=side.distributions // side.kv_heads,
            relu=side.relu,
            grad=config.grad if chunked else block,
            upcast=upcast,
            heads=summed_heads(side, weighted),
            weighted=weighted,
        )

    @property
    def pieces(self) -> int:
        """In how many pieces a gradient's columns are made."""
        return math.ceil(self.dim / self.grad)


class Mask(NamedTuple):
    """Which bounds the support has, and whether the batch is packed."""

    left: bool
    right: bool
    packed: bool

    @classmethod
    def of(cls, support: Support) -> Mask:
        """Reads a support."""
        return cls(support.left is not None, support.right is not None, support.cu_seqlens_q is not None)


class Group(NamedTuple):
    """The ``size`` heads of ``a`` behind one distribution: ``kv`` key heads in turn, ``each`` query heads to one.

    ``pack`` distributions that read the same key heads lie interleaved in the rows of a tile: row ``m`` is query
    ``m // pack`` of distribution ``m % pack``.
    """

    size: int
    kv: int
    each: int
    pack: int

    @classmethod
    def of(cls, problem: Problem) -> Group:
        """Reads a problem."""
        size, share = problem.head_group, problem.a.heads // problem.a.kv_heads
        if share % size == 0:
            return cls(size, 1, size, math.gcd(problem.b.heads // problem.b.kv_heads, share // size))
        if size % share == 0:
            return cls(size, size // share, share, 1)
        return cls(size, size, 1, 1)


def summed_heads(side: Side, weighted: bool) -> int:
    """How many heads a kernel has to sum: a single one without a weight is a head like any other, and none."""
    return side.heads if side.head_summed and (weighted or side.heads > 1) else 0


def padded(dim: int) -> int:
    """The power of two that a head dim is padded to; a product wants at least 16."""
    return max(16, 1 << (dim - 1).bit_length())
