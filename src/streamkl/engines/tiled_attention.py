"""The plain PyTorch engine's sparse attention: keys and values of a few query blocks are gathered at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from streamkl.problem import Sequence, Side, Support

GATHERED = 1 << 22
"""How many gathered elements, or logits, are held at a time: 16 MB in float32."""


def sparse_attention(
    support: Support, side: Side, q: Tensor, k: Tensor, v: Tensor, indices: Tensor, query_block: int
) -> Tensor:
    """The output ``[B, H, Nq, Dv]`` in the dtype of ``q``; ``indices [B, query_blocks, K]``."""
    out = torch.zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[3], dtype=q.dtype, device=q.device).transpose(1, 2)
    columns, group = indices.shape[2], side.heads // side.kv_heads
    widest = max(q.shape[3], v.shape[3], query_block * group)
    step = max(1, GATHERED // max(1, columns * widest))  # query blocks
    for seq, first_block in support.query_blocks(query_block):
        rows_of_any = seq.q_len if seq.k_len and columns else 0
        for i0 in range(0, rows_of_any, step * query_block):
            i1 = min(i0 + step * query_block, seq.q_len)
            at = first_block + i0 // query_block
            keys = indices[seq.batch, at : at - (i0 - i1) // query_block].long()
            rows = slice(seq.q_start + i0, seq.q_start + i1)
            out[seq.batch, :, rows] = _attend(support, side, q, k, v, seq, rows, keys, query_block)
    return out


def _attend(
    support: Support,
    side: Side,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seq: Sequence,
    rows: slice,
    keys: Tensor,
    query_block: int,
) -> Tensor:
    """``[H, rows, Dv]`` for the rows of some query blocks, over their keys ``[query_blocks, K]``."""
    count, missing = rows.stop - rows.start, -(rows.stop - rows.start) % query_block
    row_keys = keys.repeat_interleave(query_block, 0)[:count]  # [rows, K]
    allowed = support.allowed(row_keys, rows.start - seq.q_start + seq.diagonal, seq.k_len)
    allowed = torch.nn.functional.pad(allowed, (0, 0, 0, missing))
    allowed = allowed.unflatten(0, (-1, query_block))  # [query_blocks, query_block, K]
    keys = torch.where((keys >= 0) & (keys < seq.k_len), keys, 0).flatten() + seq.k_start
    dtype, group = torch.promote_types(q.dtype, torch.float32), side.heads // side.kv_heads
    of_heads = []
    for kv in range(side.kv_heads):
        k_tile, v_tile = (
            x[seq.batch, kv].index_select(0, keys).to(dtype).unflatten(0, (len(allowed), -1)) for x in (k, v)
        )
        q_rows = q[seq.batch, kv * group : (kv + 1) * group, rows].to(dtype)  # [group, rows, D]
        q_rows = torch.nn.functional.pad(q_rows, (0, 0, 0, missing)).unflatten(1, (-1, query_block)).transpose(0, 1)
        x = torch.bmm(q_rows.flatten(1, 2), k_tile.mT).mul_(side.scale)  # [query_blocks, group * query_block, K]
        x = x.unflatten(1, (group, query_block)).masked_fill_(~allowed[:, None], -torch.inf)
        top = x.amax(-1, keepdim=True)
        weight = x.sub_(torch.where(top == -torch.inf, 0.0, top)).exp_()
        total = weight.sum(-1, keepdim=True)
        # A value that no row of a query block sees may be anything, such as nan.
        v_tile = v_tile.masked_fill(~allowed.any(1)[..., None], 0.0)
        y = torch.bmm(weight.flatten(1, 2), v_tile).unflatten(1, (group, query_block))
        y = torch.where(allowed.any(-1)[:, None, :, None], y / total, 0.0)
        of_heads.append(y.transpose(0, 1).flatten(1, 2)[:, :count])
    return torch.cat(of_heads)
