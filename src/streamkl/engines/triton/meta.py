"""Compile-time constants of kernels, as plain tuples that Triton takes and people can read."""

from __future__ import annotations

import math
from typing import NamedTuple

from streamkl.problem import Problem, Side, Support


class Config(NamedTuple):
    """The tile sizes of one kernel: a row of the tables in ``configs/``.

    ``rows`` and ``keys`` of a tile, warps of a program and stages of its software pipeline. Heads wider than ``hold``
    (on side ``a`` than ``hold_a``, if it is given) are not held but read in chunks of ``chunk``, and ``grad`` columns
    of their gradients are computed at a time.
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
         "mixture_index", "keys_index", "queries_index", "lse_gathered", "paired_gathered", "mixture_gathered",
         "gradient_gathered", "attention", "attention_queries", "attention_keys", "selection")  # fmt: skip
"""Kinds of kernels that read heads; each has rows for inputs that are ``_misaligned`` and for ``_float32``, too.

``ranking`` is one that reads scores. Of its row the warps are taken.
"""

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

    ``per_kv`` query heads read one key head. ``grad`` columns of a gradient are computed at a time. ``upcast``
    multiplies in float32, for the interpreter, which cannot multiply bfloat16. A head-summed side has ``heads`` heads,
    each with a weight per row if they are ``weighted``.
    """

    dim: int
    block: int
    chunked: bool
    per_kv: int
    relu: bool
    grad: int
    upcast: bool
    heads: int = 0
    weighted: bool = False

    @classmethod
    def of(cls, side: Side, config: Config, hold: int, upcast: bool, weighted: bool = False) -> SideMeta:
        """The constants of a side by a config, in chunks where it is wider than ``hold``."""
        block = padded(side.dim)
        chunked = block > hold
        return cls(
            dim=side.dim,
            block=config.chunk if chunked else block,
            chunked=chunked,
            per_kv=side.distributions // side.kv_heads,
            relu=side.relu,
            grad=config.grad if chunked else block,
            upcast=upcast,
            heads=summed_heads(side, weighted),
            weighted=weighted,
        )

    @property
    def pieces(self) -> int:
        """In how many pieces the columns of a gradient are computed."""
        return math.ceil(self.dim / self.grad)


class Mask(NamedTuple):
    """Which bounds the support has, whether the batch is packed, and how many tokens a key stands for."""

    left: bool
    right: bool
    packed: bool
    key_span: int = 1

    @classmethod
    def of(cls, support: Support) -> Mask:
        """Reads a support."""
        bounds = support.left is not None, support.right is not None
        return cls(*bounds, support.cu_seqlens_q is not None, support.key_span)


class Want(NamedTuple):
    """Which gradients a pass computes: of side ``a``, of side ``b``; and whether it sums the losses.

    ``half`` says that a side is float16. A pass over keys adds to ``dq``, or leaves it to one over queries; ``atomic``
    says that several programs add to a dK.
    """

    a: bool
    b: bool
    loss: bool
    half: bool
    dq: bool = False
    atomic_a: bool = False
    atomic_b: bool = False


class Group(NamedTuple):
    """The head group of ``a`` that a distribution is compared with: ``size`` heads, in ``runs`` of ``heads`` heads.

    A run has ``kv`` key heads of ``each`` heads.
    ``pack`` distributions that read the same key heads lie interleaved in the rows of a tile: row ``m`` is query
    ``m // pack`` of distribution ``m % pack``.
    """

    size: int
    kv: int
    each: int
    pack: int
    runs: int
    heads: int

    @classmethod
    def of(cls, problem: Problem) -> Group:
        """Reads a problem."""
        size, per_kv, runs = problem.head_group, problem.a.heads // problem.a.kv_heads, problem.runs
        heads = size // runs
        if per_kv % size == 0 and runs == 1:
            pack = math.gcd(problem.b.heads // problem.b.kv_heads, per_kv // size)
            return cls(size, 1, size, pack, runs, heads)
        if heads % per_kv == 0:
            return cls(size, heads // per_kv, per_kv, 1, runs, heads)
        return cls(size, heads, 1, 1, runs, heads)


def summed_heads(side: Side, weighted: bool) -> int:
    """How many heads a kernel has to sum: 0 for a single head without a weight, which is like any other head."""
    return side.heads if side.head_summed and (weighted or side.heads > 1) else 0


def padded(dim: int) -> int:
    """The power of two that a head dim is padded to; a product needs at least 16."""
    return max(16, 1 << (dim - 1).bit_length())
