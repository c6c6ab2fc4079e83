"""The definition: the divergence with both ``Nq x Nk`` matrices written out, differentiated by autograd.

It shares no code with the rest of the package, so that agreement with it means something. In float64 it is what every
engine is held to. In lower precision it is the eager implementation people write: products in the inputs' dtype,
everything after them in float32. A packed (varlen) batch is given by ``cu_seqlens_q`` and ``cu_seqlens_k``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def attention_kl(
    teacher_q: Tensor,
    teacher_k: Tensor,
    student_q: Tensor,
    student_k: Tensor,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    key_span: int = 1,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    topk_indices: Tensor | None = None,
    teacher_scale: float | None = None,
    student_scale: float | None = None,
    student_activation: str | None = None,
    teacher_rest: Tensor | None = None,
    row_weight: Tensor | None = None,
    divergence: str = "forward",
    target: str = "token",
    reduction: str = "mean",
) -> Tensor:
    """The definition of `streamkl.attention_kl`, with the same arguments, in O(Nq Nk) memory."""
    packed = cu_seqlens_q is not None and cu_seqlens_k is not None
    if packed:
        teacher_q, teacher_k, student_q, student_k = (
            x.transpose(0, 1)[None] for x in (teacher_q, teacher_k, student_q, student_k)
        )
        teacher_rest = None if teacher_rest is None else teacher_rest[None]
    nq, nk = teacher_q.shape[2], student_k.shape[2]
    allowed = allowed_pairs(nq, nk, causal, window, cu_seqlens_q, cu_seqlens_k, topk_indices, key_span)
    allowed = allowed.to(teacher_q.device)
    a = logits(teacher_q, teacher_k, teacher_scale)  # [B, H, Nq, Nk], or as many keys for each of the student's
    b = logits(student_q, student_k, student_scale)  # [B, R, Nq, Nk]
    if student_activation == "relu":
        b = b.relu()
    assert target != "token" or a.shape[3] == b.shape[3]
    return _reduced(*_rows(a, b, allowed, divergence, teacher_rest, target), row_weight, reduction, packed)


def indexer_kl(
    teacher_q: Tensor,
    teacher_k: Tensor,
    index_q: Tensor,
    index_k: Tensor,
    index_w: Tensor | None = None,
    *,
    activation: str | None = "relu",
    index_scale: float | None = None,
    topk_indices: Tensor | None = None,
    teacher_scale: float | None = None,
    teacher_rest: Tensor | None = None,
    causal: bool = True,
    window: tuple[int, int] | None = None,
    key_span: int = 1,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    row_weight: Tensor | None = None,
    target: str = "token",
    reduction: str = "mean",
) -> Tensor:
    """The definition of `streamkl.indexer_kl`, with the same arguments, in O(J Nq Nk) memory."""
    packed = cu_seqlens_q is not None and cu_seqlens_k is not None
    if packed:
        teacher_q, teacher_k, index_q = (x.transpose(0, 1)[None] for x in (teacher_q, teacher_k, index_q))
        index_k, index_w = index_k[None], None if index_w is None else index_w[None]
        teacher_rest = None if teacher_rest is None else teacher_rest[None]
    nq, nk = teacher_q.shape[2], index_k.shape[1]
    allowed = allowed_pairs(nq, nk, causal, window, cu_seqlens_q, cu_seqlens_k, topk_indices, key_span)
    allowed = allowed.to(teacher_q.device)
    a = logits(teacher_q.detach(), teacher_k.detach(), teacher_scale)  # [B, H, Nq, Nk], or several keys for each
    b = index_logits(index_q, index_k, index_w, index_scale, activation)  # [B, 1, Nq, Nk]
    assert target != "token" or a.shape[3] == b.shape[3]
    return _reduced(*_rows(a, b, allowed, "forward", teacher_rest, target), row_weight, reduction, packed)


def attention_lse(
    q: Tensor,
    k: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    key_span: int = 1,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    topk_indices: Tensor | None = None,
) -> Tensor:
    """The definition of `streamkl.attention_lse`, with the same arguments, in O(Nq Nk) memory."""
    packed = cu_seqlens_q is not None and cu_seqlens_k is not None
    if packed:
        q, k = q.transpose(0, 1)[None], k.transpose(0, 1)[None]
    nq, nk = q.shape[2], k.shape[2]
    allowed = allowed_pairs(nq, nk, causal, window, cu_seqlens_q, cu_seqlens_k, topk_indices, key_span)
    allowed = for_heads(allowed.to(q.device), q.shape[1])
    lse = _lse(logits(q, k, scale), allowed)
    return lse[0] if packed else lse


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    *,
    query_block: int = 1,
    scale: float | None = None,
    causal: bool = True,
    window: tuple[int, int] | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    page_table: Tensor | None = None,
    rest: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The definition of `streamkl.sparse.sparse_attention`, in O(Nq Nk) memory, and its log-sum-exp, a constant.

    The arguments are the same, but for ``rest [B, H, Nq]``, packed ``[H, Tq]``: sinks as rows.
    """
    packed = cu_seqlens_q is not None
    if page_table is not None and cu_seqlens_k is not None:
        k, v = (unpaged(x, page_table, cu_seqlens_k) for x in (k, v))
    allowed = selected_pairs(
        q.shape[0 if packed else 2], k.shape[0 if packed else 2], indices, query_block, causal, window, cu_seqlens_q,
        cu_seqlens_k,
    ).to(q.device)  # fmt: skip
    if packed:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    x = logits(q, k, scale)
    if rest is None:
        log_p = log_softmax(x, allowed)
    else:
        log_p = _joint_log_softmax(x, allowed, (rest[None] if packed else rest).to(x.dtype))
    p = torch.where(allowed, log_p.exp(), 0.0).to(v.dtype)
    out = p @ v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    lse = _lse(x.detach(), allowed)
    return (out[0].transpose(0, 1), lse[0]) if packed else (out, lse)


def logits(q: Tensor, k: Tensor, scale: float | None) -> Tensor:
    """``scale * <q, k>`` for ``q [B, H, Nq, D]`` and ``k [B, Hkv, Nk, D]``: ``[B, H, Nq, Nk]``, float32 or float64."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    products = q @ k.transpose(-1, -2)
    products = products.to(torch.promote_types(products.dtype, torch.float32))
    return products * (q.shape[-1] ** -0.5 if scale is None else scale)


def index_logits(q: Tensor, k: Tensor, w: Tensor | None, scale: float | None, activation: str | None) -> Tensor:
    """The weighted sum over heads of ``q [B, J, Nq, D]``, ``k [B, Nk, D]`` and ``w [B, Nq, J]``: ``[B, 1, Nq, Nk]``."""
    x = logits(q, k[:, None], scale)
    if activation == "relu":
        x = x.relu()
    if w is not None:
        x = x * w.to(x.dtype).transpose(1, 2)[..., None]
    return x.sum(1, keepdim=True)


def log_softmax(x: Tensor, allowed: Tensor) -> Tensor:
    """Log-softmax over the allowed keys; 0, and no gradient, at the others and in rows that allow none."""
    alive = allowed.any(-1, keepdim=True)
    x = x.masked_fill(~(allowed | ~alive), -torch.inf)
    return x.log_softmax(-1).masked_fill(~allowed, 0.0)


def _lse(x: Tensor, allowed: Tensor) -> Tensor:
    """The log-sum-exp over the allowed keys; -inf in rows that allow none, nan in others whose logits are all -inf."""
    lse = x.masked_fill(~allowed, -torch.inf).logsumexp(-1)
    return lse.masked_fill((lse == -torch.inf) & allowed.any(-1), torch.nan)


def _joint_log_softmax(x: Tensor, allowed: Tensor, rest: Tensor) -> Tensor:
    """Log-softmax ``[B, H, Nq, Nk]`` over the allowed keys and ``rest [B, H, Nq]``, which is left out."""
    alive = allowed.any(-1)
    rest = torch.where(alive, rest, 0.0)
    joint = torch.cat((x.masked_fill(~allowed, -torch.inf), rest[..., None]), -1).log_softmax(-1)
    return joint[..., :-1].masked_fill(~allowed, 0.0)


def allowed_pairs(
    nq: int,
    nk: int,
    causal: bool,
    window: tuple[int, int] | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    topk_indices: Tensor | None = None,
    key_span: int = 1,
) -> Tensor:
    """Which keys each row may see, ``[Nq, Nk]`` of bool, aligned bottom-right within each sequence.

    A key stands for ``key_span`` tokens: a causal row sees it from its last token on. With ``topk_indices`` it is
    ``[B, topk_heads, Nq, Nk]``: of those, the row's selected keys.
    """
    if cu_seqlens_q is None or cu_seqlens_k is None:
        starts_q, starts_k = [0, nq], [0, nk]
    else:
        starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    allowed = torch.zeros(nq, nk, dtype=torch.bool, device="cpu")
    for n in range(len(starts_q) - 1):
        rows = torch.arange(starts_q[n + 1] - starts_q[n], device="cpu")[:, None]
        keys = torch.arange(starts_k[n + 1] - starts_k[n], device="cpu")
        on = rows + len(keys) - len(rows)  # the key on the diagonal
        block = torch.ones(len(rows), len(keys), dtype=torch.bool, device="cpu")
        if causal:
            token = rows + (len(keys) - len(rows) // key_span) * key_span  # the one that each row lies on
            block &= (keys + 1) * key_span <= token + 1
        if window is not None and window[0] >= 0:
            block &= keys >= on - window[0]
        if window is not None and window[1] >= 0:
            block &= keys <= on + window[1]
        allowed[starts_q[n] : starts_q[n + 1], starts_k[n] : starts_k[n + 1]] = block
    if topk_indices is None:
        return allowed
    topk = topk_indices.cpu().long()
    if cu_seqlens_q is not None:
        topk = topk[None]
    if topk.dim() == 3:
        topk = topk[:, None]
    first, count = (torch.zeros(nq, dtype=torch.int64, device="cpu") for _ in range(2))
    for n in range(len(starts_q) - 1):
        first[starts_q[n] : starts_q[n + 1]] = starts_k[n]
        count[starts_q[n] : starts_q[n + 1]] = starts_k[n + 1] - starts_k[n]
    # The last column takes indices that are no key.
    selected = torch.zeros(*topk.shape[:3], nk + 1, dtype=torch.bool, device="cpu")
    inside = (topk >= 0) & (topk < count[:, None])
    selected.scatter_(-1, torch.where(inside, topk + first[:, None], nk), True)
    return allowed & selected[..., :nk]


def selected_pairs(
    nq: int,
    nk: int,
    indices: Tensor,
    query_block: int,
    causal: bool,
    window: tuple[int, int] | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
) -> Tensor:
    """Which keys each row sees of ``indices [B, query_blocks, K]``, shared by a query block: ``[B, 1, Nq, Nk]``."""
    starts = [0, nq] if cu_seqlens_q is None else [*cu_seqlens_q.tolist(), nq]
    block_of_row, first = [], 0
    for n in range(len(starts) - 1):
        rows = torch.arange(starts[n + 1] - starts[n], device="cpu")
        block_of_row.append(first + rows // query_block)
        first += -(-len(rows) // query_block)
    topk_indices = indices.cpu()[..., torch.cat(block_of_row), :]
    return allowed_pairs(nq, nk, causal, window, cu_seqlens_q, cu_seqlens_k, topk_indices)


def unpaged(x: Tensor, page_table: Tensor, cu_seqlens_k: Tensor) -> Tensor:
    """Packed tokens ``[Tk, heads, dim]`` from their pages ``[pages, page_size, heads, dim]``."""
    tokens = [x[:0].flatten(0, 1)]
    for pages, length in zip(page_table.long(), cu_seqlens_k.diff().tolist(), strict=True):
        tokens.append(x[pages[: -(-length // x.shape[1])]].flatten(0, 1)[:length])
    return torch.cat(tokens)


def for_heads(allowed: Tensor, heads: int) -> Tensor:
    """The pairs that each of ``heads`` may see: a top-k head serves consecutive heads."""
    return allowed if allowed.dim() == 2 else allowed.repeat_interleave(heads // allowed.shape[1], dim=1)


def _rows(
    a: Tensor, b: Tensor, allowed: Tensor, divergence: str, teacher_rest: Tensor | None, target: str
) -> tuple[Tensor, Tensor]:
    """The divergence of each row, ``[B, R, Nq]``, and which rows see a key, from logits ``[B, heads, Nq, Nk]``.

    A probability of 0 adds 0 (``0 ln 0 = 0``), unless the other logit is not finite: that makes nan of the row. Where
    ``a`` has several keys for each of ``b``, their probabilities are summed, or the largest is taken.
    """
    dtype = torch.promote_types(a.dtype, b.dtype)
    allowed_a, allowed = (for_heads(allowed, x.shape[1]) for x in (a, b))
    block = a.shape[3] // max(b.shape[3], 1)
    if block > 1:
        allowed_a = allowed_a.repeat_interleave(block, dim=-1)
    if teacher_rest is None:
        log_p = log_softmax(a.to(dtype), allowed_a)
    else:
        log_p = _joint_log_softmax(a.to(dtype), allowed_a, teacher_rest.detach().to(dtype))
    log_p = log_p.unflatten(1, (b.shape[1], -1))
    log_p = log_p.logsumexp(2) - math.log(log_p.shape[2])  # from [B, R, H/R, Nq, Nk]
    if block > 1:
        log_p = log_p.unflatten(3, (-1, block))
        log_p = log_p.amax(4) if target == "block_max" else log_p.logsumexp(4)
    if teacher_rest is not None or target == "block_max":
        log_p = log_softmax(log_p, allowed)  # of what the mean has on the allowed keys
    log_q = log_softmax(b.to(dtype), allowed)
    if divergence == "reverse":
        log_p, log_q = log_q, log_p
    p, log_p = log_p.exp(), log_p.masked_fill(log_p == -torch.inf, 0.0)
    kl = torch.where(allowed, p * (log_p - log_q), 0.0).sum(-1)
    return kl + (kl - kl).detach(), allowed.any(-1)


def _reduced(kl: Tensor, alive: Tensor, row_weight: Tensor | None, reduction: str, packed: bool) -> Tensor:
    """The loss of row losses ``[B, R, Nq]``: rows that see no key, or have weight 0, do not count."""
    weight = torch.ones_like(kl) if row_weight is None else _as_rows(row_weight, kl, packed)
    weight = torch.where(alive, weight, 0.0)
    rows = torch.where(weight != 0, weight * kl, 0.0)
    if reduction == "none":
        return rows[0] if packed else rows
    if reduction == "sum":
        return rows.sum()
    total = weight.sum()
    return rows.sum() / torch.where(total == 0, 1.0, total)


def _as_rows(row_weight: Tensor, kl: Tensor, packed: bool) -> Tensor:
    """``[B, Nq]`` or ``[B, R, Nq]`` (packed: ``[Tq]`` or ``[R, Tq]``) as the shape and dtype of the row losses."""
    if packed:
        row_weight = row_weight[None]
    if row_weight.dim() == 2:
        row_weight = row_weight[:, None]
    return row_weight.to(kl.dtype).expand_as(kl)
