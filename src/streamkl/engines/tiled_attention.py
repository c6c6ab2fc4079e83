"""The plain PyTorch engine's sparse attention: the keys and values of a few lists are gathered at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from streamkl.problem import Sequence, Side, Support

GATHERED = 1 << 22
"""How many gathered elements, or logits, lists that are worked on together may have: 16 MB in float32."""


def sparse_attention(
    support: Support, side: Side, q: Tensor, k: Tensor, v: Tensor, indices: Tensor, block: int
) -> Tensor:
    """The output ``[B, H, Nq, Dv]`` in the dtype of ``q``; ``indices [B, lists, K]``."""
    out = torch.zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[3], dtype=q.dtype, device=q.device).transpose(1, 2)
    columns, group = indices.shape[2], side.heads // side.kv_heads
    widest = max(q.shape[3], v.shape[3], block * group)
    step = max(1, GATHERED // max(1, columns * widest))  # lists
    for seq, first_list in support.shared_lists(block):
        rows_of_any = seq.q_len if seq.k_len and columns else 0
        for i0 in range(0, rows_of_any, step * block):
            i1 = min(i0 + step * block, seq.q_len)
            at = first_list + i0 // block
            keys = indices[seq.batch, at : at - (i0 - i1) // block].long()
            rows = slice(seq.q_start + i0, seq.q_start + i1)
            out[seq.batch, :, rows] = _attend(support, side, q, k, v, seq, rows, keys, block)
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
    block: int,
) -> Tensor:
    """``[H, rows, Dv]`` for rows that begin a list, over their lists ``keys [lists, K]``."""
    count, missing = rows.stop - rows.start, -(rows.stop - rows.start) % block
    named = keys.repeat_interleave(block, 0)[:count]  # of each row
    allowed = support.allowed(named, rows.start - seq.q_start + seq.diagonal, seq.k_len)
    allowed = torch.nn.functional.pad(allowed, (0, 0, 0, missing)).unflatten(0, (-1, block))  # [lists, block, K]
    keys = torch.where((keys >= 0) & (keys < seq.k_len), keys, 0).flatten() + seq.k_start
    dtype, group = torch.promote_types(q.dtype, torch.float32), side.heads // side.kv_heads
    of_heads = []
    for kv in range(side.kv_heads):
        k_lists, v_lists = (
            x[seq.batch, kv].index_select(0, keys).to(dtype).unflatten(0, (len(allowed), -1)) for x in (k, v)
        )
        q_rows = q[seq.batch, kv * group : (kv + 1) * group, rows].to(dtype)  # [group, rows, D]
        q_rows = torch.nn.functional.pad(q_rows, (0, 0, 0, missing)).unflatten(1, (-1, block)).transpose(0, 1)
        x = torch.bmm(q_rows.flatten(1, 2), k_lists.mT).mul_(side.scale)  # [lists, group * block, K]
        x = x.unflatten(1, (group, block)).masked_fill_(~allowed[:, None], -torch.inf)
        top = x.amax(-1, keepdim=True)
        weight = x.sub_(torch.where(top == -torch.inf, 0.0, top)).exp_()
        total = weight.sum(-1, keepdim=True)
        # What no row of a list sees may hold anything.
        v_lists = v_lists.masked_fill(~allowed.any(1)[..., None], 0.0)
        y = torch.bmm(weight.flatten(1, 2), v_lists).unflatten(1, (group, block))
        y = torch.where(allowed.any(-1)[:, None, :, None], y / total, 0.0)
        of_heads.append(y.transpose(0, 1).flatten(1, 2)[:, :count])
    return torch.cat(of_heads)
