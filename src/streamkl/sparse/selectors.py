"""Selectors: interchangeable policies that select the keys of each query block of one attention call.

With a query block of more than one query, the keys on the block's diagonal (``i + Nk - Nq``) come first, by rising
index. Under a causal mask every query of the block sees the first of them, so that none is left without a key. A window
may hide it: then every query sees a key if ``topk + left >= query_block``; if not, the last
``query_block - topk - left`` queries of a full block see none. A ``topk`` of at most ``query_block`` holds nothing but
this diagonal: it is worth a warning. With ``topk`` of at least the number of keys it is dense attention. Tensors are
dense or packed (varlen).
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from streamkl.api import attention_lse
from streamkl.problem import Sequence, Support
from streamkl.sparse.arguments import IndexTensors, attention_support, check_selection
from streamkl.sparse.selection import index_topk, oracle_topk

DRAWN = 1 << 22
"""How many random numbers are held at a time."""


class AttentionCall(NamedTuple):
    """The inputs of a selector: one layer's queries and keys, after RoPE, and the mask.

    Attributes:
        q: ``[B, H, Nq, D]``, or packed ``[Tq, H, D]``.
        k: ``[B, Hkv, Nk, D]``, or packed ``[Tk, Hkv, D]``.
        scale: Multiplies the products; ``1/sqrt(D)`` if not given.
        causal: Query ``i`` sees keys ``j <= i + Nk - Nq``.
        window: ``(left, right)`` keys around key ``i + Nk - Nq``; a negative side is unbounded.
        cu_seqlens_q: ``[sequences + 1]``: where each packed sequence's queries start, and the end.
        cu_seqlens_k: The same for the keys.
        index: The tensors that an indexer computed from the layer's hidden states, if there is one.
        lse: ``[B, H, Nq]``, packed ``[H, Tq]``: the log-sum-exp of the dense attention, if it is known.
        rest: ``[B, H, Nq]``, packed ``[H, Tq]``: the log-sum-exp of what else the softmax covers, such as a sink.
        key_span: How many tokens a key stands for, as in `streamkl.indexer_kl`; selectors are given keys of one token.
    """

    q: Tensor
    k: Tensor
    scale: float | None = None
    causal: bool = True
    window: tuple[int, int] | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    index: IndexTensors | None = None  # pyright: ignore[reportIncompatibleMethodOverride]  # by name, as the others
    lse: Tensor | None = None
    rest: Tensor | None = None
    key_span: int = 1


class Selector(Protocol):
    """Selects ``topk`` keys for each query block of ``query_block`` queries."""

    @property
    def topk(self) -> int:
        """How many keys are selected per query block, padding included."""
        ...

    @property
    def query_block(self) -> int:
        """How many consecutive queries of a sequence share their top-k."""
        ...

    def select(self, call: AttentionCall) -> Tensor:
        """The selected keys, ``[B, query_blocks, topk]``, packed ``[query_blocks, topk]``, for `sparse_attention`.

        Those of several head groups are ``[B, G, query_blocks, topk]``, packed ``[G, query_blocks, topk]``.
        """
        ...


@dataclass(frozen=True)
class _Selector:
    topk: int
    query_block: int

    def __post_init__(self) -> None:
        check_selection(self.topk, self.query_block, "auto")
        self._check()
        if self.query_block > 1 and self.topk <= self.query_block:
            warnings.warn(  # at the caller's line, beyond the dataclass's own __init__
                f"a top-k of {self.topk} keys shared by a query block of {self.query_block} holds only keys on the "
                f"block's diagonal: select more than {self.query_block} keys, or use a smaller query_block",
                stacklevel=3,
            )

    def _check(self) -> None:
        """Checks what a selector has beside ``topk`` and ``query_block``."""


@dataclass(frozen=True)
class OracleSelector(_Selector):
    """The keys that dense attention attends to most (`oracle_topk`): the upper bound of a budget, at a dense cost.

    Attributes:
        topk: How many keys are selected per query block.
        query_block: How many consecutive queries of a sequence share their top-k.
        per_kv_head: Whether the heads of each KV head select for themselves, by their own mean.
    """

    per_kv_head: bool = False

    def select(self, call: AttentionCall) -> Tensor:
        """The selected keys of a call; if it has no ``lse``, another pass computes it.

        What else the softmax covers is part of it: a head counts by the share of its attention that lies on keys.
        """
        lse = call.lse
        if call.rest is not None:
            if lse is None:
                lse = attention_lse(
                    call.q, call.k, scale=call.scale, causal=call.causal, window=call.window,
                    cu_seqlens_q=call.cu_seqlens_q, cu_seqlens_k=call.cu_seqlens_k,
                )  # fmt: skip
            lse = torch.logaddexp(lse, call.rest.to(lse))
        return oracle_topk(
            call.q, call.k, topk=self.topk, query_block=self.query_block, scale=call.scale, causal=call.causal,
            window=call.window, cu_seqlens_q=call.cu_seqlens_q, cu_seqlens_k=call.cu_seqlens_k, lse=lse,
            groups=call.k.shape[1] if self.per_kv_head else 1,
        )  # fmt: skip


@dataclass(frozen=True)
class IndexerSelector(_Selector):
    """The keys of an indexer's highest scores (`index_topk`).

    Attributes:
        topk: How many keys are selected per query block.
        query_block: How many consecutive queries of a sequence share their top-k.
        activation: What the indexer's products go through before they are summed: ``"relu"``, or ``None`` for none. It
            must be that of the indexer's training.
        normalise: Whether the queries of a block compare probabilities instead of scores. ``None`` takes the setting
            that a folder of indexers was saved with, and ``False`` if there is no folder.
    """

    activation: Literal["relu"] | None = "relu"
    normalise: bool | None = None

    def select(self, call: AttentionCall) -> Tensor:
        """The selected keys of a call that has ``index``; those of a per-query top-k in any order."""
        if call.index is None:
            raise ValueError("call.index must hold an indexer's tensors for an IndexerSelector: got None")
        return index_topk(
            *call.index, topk=self.topk, query_block=self.query_block, normalise=bool(self.normalise),
            sort=self.query_block > 1, activation=self.activation, causal=call.causal, window=call.window,
            cu_seqlens_q=call.cu_seqlens_q, cu_seqlens_k=call.cu_seqlens_k,
        )  # fmt: skip


@dataclass(frozen=True)
class WindowSelector(_Selector):
    """The window baseline: the first keys and the nearest ones, first those before the block, then those after it.

    Attributes:
        topk: How many keys are selected per query block.
        query_block: How many consecutive queries of a sequence share their top-k.
        sinks: How many of the first keys of a sequence are always selected.

    Examples:
        >>> import torch
        >>> from streamkl.sparse import AttentionCall, WindowSelector
        >>> q = k = torch.zeros(1, 1, 8, 4)
        >>> WindowSelector(topk=4, query_block=2, sinks=1).select(AttentionCall(q, k))[0]
        tensor([[ 0,  1, -1, -1],
                [ 2,  3,  0,  1],
                [ 4,  5,  0,  3],
                [ 6,  7,  0,  5]], dtype=torch.int32)
    """

    sinks: int = 4

    def _check(self) -> None:
        if isinstance(self.sinks, bool) or not isinstance(self.sinks, int) or self.sinks < 0:
            raise ValueError(f"sinks must be an integer and not negative: got {self.sinks!r}")

    def select(self, call: AttentionCall) -> Tensor:
        """The selected keys of a call."""
        support, packed = attention_support(*call[:7])
        out, column = _empty(support, self, call.q.device), torch.arange(self.topk, device=call.q.device)
        for seq, at in support.query_blocks(self.query_block):
            seen = _Seen.of(support, seq, self.query_block, call.q.device)
            own = seen.last - seen.first
            sinks = (seen.first.clamp(max=self.sinks) - seen.low).clamp(min=0)
            before, after = seen.first - seen.low - sinks, seen.high - seen.last
            n, keys = column, torch.full((len(own), self.topk), -1, device=call.q.device)
            for count, key, step in (
                (own, seen.first, 1), (sinks, seen.low, 1), (before, seen.first - 1, -1), (after, seen.last, 1)
            ):  # fmt: skip
                keys = torch.where((n >= 0) & (n < count), key + step * n, keys)
                n = n - count
            out[seq.batch, at : at + len(keys)] = keys.int()
        return out[0] if packed else out


@dataclass(frozen=True)
class RandomSelector(_Selector):
    """Random keys that some query of the block may see, drawn without repetition; equal calls draw equal keys.

    Attributes:
        topk: How many keys are selected per query block.
        query_block: How many consecutive queries of a sequence share their top-k.
        seed: Of the random numbers.
    """

    seed: int = 0

    def select(self, call: AttentionCall) -> Tensor:
        """The selected keys of a call."""
        support, packed = attention_support(*call[:7])
        out, rng = _empty(support, self, call.q.device), torch.Generator().manual_seed(self.seed)
        step = max(1, DRAWN // max(1, support.nk))
        for seq, at in support.query_blocks(self.query_block):
            seen = _Seen.of(support, seq, self.query_block, call.q.device)
            for start in range(0, len(seen.first), step):
                part = _Seen(*(x[start : start + step] for x in seen))
                keys = part.drawn(seq.k_len, min(self.topk, seq.k_len), rng)
                out[seq.batch, at + start : at + start + len(keys), : keys.shape[1]] = keys.int()
        return out[0] if packed else out


class _Seen(NamedTuple):
    """The keys that each query block sees: those on its diagonal ``[first, last)``, all ``[low, high)``.

    Each is ``[query_blocks, 1]``.
    """

    first: Tensor
    last: Tensor
    low: Tensor
    high: Tensor

    @classmethod
    def of(cls, support: Support, seq: Sequence, query_block: int, device: torch.device) -> _Seen:
        """The ranges of a sequence's query blocks; empty for a block that sees no key."""
        first_live, last_live = support.live_rows(seq)
        starts = torch.arange(0, seq.q_len, query_block, device=device)[:, None]
        start, end = starts.clamp(min=first_live), (starts + query_block).clamp(max=last_live)
        live, on = start < end, seq.diagonal
        low = torch.zeros_like(start) if support.left is None else (start + on - support.left).clamp(min=0)
        high = (
            torch.full_like(end, seq.k_len)
            if support.right is None
            else (end + on + support.right).clamp(max=seq.k_len)
        )
        first, last = (start + on).clamp(min=0), (end + on).clamp(min=0)
        return cls(*(torch.where(live, x, 0) for x in (first, last, low, high)))

    def drawn(self, k_len: int, count: int, rng: torch.Generator) -> Tensor:
        """``[query_blocks, count]``: keys on the diagonal by rising index, then random others, then -1."""
        key = torch.arange(k_len, device=self.first.device)
        lot = torch.rand(len(self.first), k_len, generator=rng, device="cpu").to(key.device)
        lot = lot.masked_fill((key < self.low) | (key >= self.high), -1.0)
        own = (key >= self.first) & (key < self.last)
        lot = torch.where(own, 2.0 + (self.last - key), lot)
        lot, keys = lot.topk(count, -1)
        return keys.masked_fill(lot < 0, -1)


def _empty(support: Support, selector: Selector, device: torch.device) -> Tensor:
    """A selection of no key, ``[B, query_blocks, topk]``."""
    shape = (support.batch, support.query_block_count(selector.query_block), selector.topk)
    return torch.full(shape, -1, dtype=torch.int32, device=device)
