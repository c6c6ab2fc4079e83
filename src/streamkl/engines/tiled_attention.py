"""The plain PyTorch engine's sparse attention: keys and values of a few query blocks are gathered at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from streamkl.problem import AttentionOutput, Sequence, Side, Support, compute_dtype, is_half

GATHERED = 1 << 22
"""How many gathered elements, or logits, are held at a time: 16 MB in float32."""


def sparse_attention(
    support: Support,
    side: Side,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    query_block: int,
    for_backward: bool,
    page_table: Tensor | None = None,
) -> AttentionOutput:
    """The output ``[B, H, Nq, Dv]`` in the dtype of ``q``, and its row stats; ``indices [B, query_blocks, K]``.

    With a ``page_table [sequences, n]``, ``k`` and ``v`` are ``[pages, Hkv, page_size, D]``.
    """
    dtype = compute_dtype(q.dtype)
    out = torch.zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[3], dtype=q.dtype, device=q.device).transpose(1, 2)
    rest = torch.zeros_like(out) if for_backward and is_half(q.dtype) else q.new_empty(0)
    m = torch.full(q.shape[:3], -torch.inf, dtype=dtype, device=q.device)
    ln_l = torch.zeros_like(m)
    for blocks in _walk(support, side, indices, query_block, max(q.shape[3], v.shape[3]), page_table):
        for kv in range(side.kv_heads):
            x = blocks.logits(blocks.rows(q, kv), blocks.gathered(k, kv))  # [query_blocks, rows, K]
            top = x.amax(-1)
            weight = x.sub_(torch.where(top == -torch.inf, 0.0, top)[..., None]).exp_()
            total = weight.sum(-1)
            # A value that no row of a query block sees may be anything, such as nan.
            v_tile = blocks.gathered(v, kv).masked_fill(~blocks.seen.any(1)[..., None], 0.0)
            y = torch.where(blocks.live[..., None], torch.bmm(weight, v_tile) / total[..., None], 0.0)
            blocks.write(out, kv, y)
            if rest.numel():
                blocks.write(rest, kv, y - y.to(out.dtype))
            blocks.write(m, kv, torch.where(blocks.live & (top == -torch.inf), torch.nan, top))
            blocks.write(ln_l, kv, torch.where(blocks.live, total.log(), 0.0))
    return AttentionOutput(out, rest, m, ln_l)


def sparse_attention_backward(
    support: Support,
    side: Side,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    query_block: int,
    output: AttentionOutput,
    d_out: Tensor,
    d_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients to ``q``, ``k`` and ``v``, in their dtypes."""
    dtype = compute_dtype(q.dtype)
    dq = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (k, v))
    for blocks in _walk(support, side, indices, query_block, max(q.shape[3], v.shape[3])):
        for kv in range(side.kv_heads):
            q_rows, d_rows = blocks.rows(q, kv), blocks.rows(d_out, kv)  # [query_blocks, rows, D], [..., Dv]
            k_tile, v_tile = blocks.gathered(k, kv), blocks.gathered(v, kv)  # [query_blocks, K, D], [..., Dv]
            # A row whose gradient is not finite makes nan of all that it reaches.
            ln_l = blocks.rows(output.ln_l, kv) + (d_rows * 0.0).sum(-1)
            log_p = (blocks.logits(q_rows, k_tile) - blocks.rows(output.m, kv)[..., None]) - ln_l[..., None]
            p = torch.where(blocks.seen, log_p.exp_(), 0.0)
            dp = torch.bmm(d_rows, v_tile.mT)
            delta = torch.where(blocks.seen, p * dp, 0.0).sum(-1, keepdim=True)
            if d_lse is None:  # The softmax of one logit is constant: rounding must not give it a gradient.
                factor = (blocks.seen.sum(-1) != 1).to(dtype)[..., None] * side.scale
            else:
                delta, factor = delta - blocks.rows(d_lse, kv)[..., None], side.scale
            dx = torch.where(blocks.seen, p * (dp - delta) * factor, 0.0)
            blocks.write(dq, kv, torch.bmm(dx, _finite(k_tile)))
            blocks.add(dk, kv, torch.bmm(dx.mT, _finite(q_rows)))
            blocks.add(dv, kv, torch.bmm(p.mT, _finite(d_rows)))
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _walk(
    support: Support, side: Side, indices: Tensor, query_block: int, width: int, page_table: Tensor | None = None
) -> Iterator[_Blocks]:
    """Walks the query blocks, as many at a time as the scratch allows; ``width`` is that of the widest head."""
    columns, group = indices.shape[2], side.heads // side.kv_heads
    step = max(1, GATHERED // max(1, columns * max(width, query_block * group)))  # query blocks
    for n, (seq, first_block) in enumerate(support.query_blocks(query_block)):
        pages = None if page_table is None else page_table[n].long()
        rows_of_any = seq.q_len if seq.k_len and columns else 0
        for i0 in range(0, rows_of_any, step * query_block):
            i1 = min(i0 + step * query_block, seq.q_len)
            at = first_block + i0 // query_block
            keys = indices[seq.batch, at : at - (i0 - i1) // query_block].long()
            yield _Blocks(support, side, seq, slice(i0, i1), keys, query_block, pages)


class _Blocks:
    """Some query blocks of a sequence, ``rows`` of it, and their ``keys [query_blocks, K]``.

    In tiles, the rows of a query block are its queries for each head that reads a key head, one head after another, and
    padded in the last query block. ``seen [query_blocks, rows, K]`` says which keys each row sees, ``live`` which rows
    see any. ``pages [n]`` are those of the sequence, if its keys lie in pages.
    """

    def __init__(
        self, support: Support, side: Side, seq: Sequence, rows: slice, keys: Tensor, query_block: int,
        pages: Tensor | None,
    ) -> None:  # fmt: skip
        self.pages = pages
        self.side, self.batch, self.query_block = side, seq.batch, query_block
        self.group, self.dtype = side.heads // side.kv_heads, compute_dtype(side.dtype)
        self.count = rows.stop - rows.start
        self.at = slice(seq.q_start + rows.start, seq.q_start + rows.stop)
        row_keys = keys.repeat_interleave(query_block, 0)[: self.count]  # [queries, K]
        allowed = self._padded(support.allowed(row_keys, rows.start + seq.diagonal, seq.k_len)[None])
        self.seen = allowed.expand(-1, self.group, -1, -1).flatten(1, 2)
        self.live = self.seen.any(-1)
        self.keys = torch.where((keys >= 0) & (keys < seq.k_len), keys, 0).flatten()
        if pages is None:
            self.keys += seq.k_start

    def _padded(self, x: Tensor) -> Tensor:
        """``[heads, queries, ...]`` as ``[query_blocks, heads, query_block, ...]``."""
        missing = -self.count % self.query_block
        x = torch.nn.functional.pad(x, (0, 0) * (x.dim() - 2) + (0, missing))
        return x.unflatten(1, (-1, self.query_block)).transpose(0, 1)

    def _heads(self, kv: int) -> slice:
        return slice(kv * self.group, (kv + 1) * self.group)

    def rows(self, x: Tensor, kv: int) -> Tensor:
        """The rows of ``x [B, H, Nq, ...]`` that read a key head, ``[query_blocks, rows, ...]``."""
        return self._padded(x[self.batch, self._heads(kv), self.at].to(self.dtype)).flatten(1, 2)

    def write(self, to: Tensor, kv: int, x: Tensor) -> None:
        """Writes rows, as `rows` has them, to ``to [B, H, Nq, ...]``."""
        heads = x.unflatten(1, (self.group, self.query_block)).transpose(0, 1).flatten(1, 2)
        to[self.batch, self._heads(kv), self.at] = heads[:, : self.count].to(to.dtype)

    def gathered(self, x: Tensor, kv: int) -> Tensor:
        """The selected keys of ``x [B, Hkv, Nk, D]``, or of pages, ``[query_blocks, K, D]``."""
        if self.pages is None:
            tile = x[self.batch, kv].index_select(0, self.keys)
        else:
            tile = x[self.pages[self.keys // x.shape[2]], kv, self.keys % x.shape[2]]
        return tile.to(self.dtype).unflatten(0, (len(self.seen), -1))

    def add(self, to: Tensor, kv: int, x: Tensor) -> None:
        """Adds to the selected keys of ``to [B, Hkv, Nk, D]``, in a fixed order on every device."""
        if to.is_cuda:
            to[self.batch, kv].index_put_((self.keys,), x.flatten(0, 1), accumulate=True)  # which sorts by key
        else:
            to[self.batch, kv].index_add_(0, self.keys, x.flatten(0, 1))

    def logits(self, q_rows: Tensor, k_tile: Tensor) -> Tensor:
        """The logits of a key head's rows, ``[query_blocks, rows, K]``; -inf at keys that a row does not see."""
        return torch.bmm(q_rows, k_tile.mT).mul_(self.side.scale).masked_fill_(~self.seen, -torch.inf)


def _finite(x: Tensor) -> Tensor:
    """``x`` with 0 where it is not finite: a pair that is not seen adds ``0 * x``; where it counts, dx is nan."""
    return torch.where(x.isfinite(), x, 0.0)
