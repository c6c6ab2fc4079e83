"""Checks of single arguments, and of those that go together: shapes, dtypes, devices, options.

They are done on every call and cost nothing on the device; ``value_checks.py`` reads values. A packed (varlen) batch is
given by ``cu_seqlens_q`` and ``cu_seqlens_k``.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor, is_gradtrackingtensor

from streamkl.autocasting import autocast

FARTHEST = 2**40
"""A window that is wider than any sequence, as people write with ``sys.maxsize``, has no bound on that side."""
FARTHEST_SPAN = 2**20
"""The most tokens that a key stands for."""
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Keys(NamedTuple):
    """Which keys a row may see: ``right = 0`` is causal, ``None`` unbounded; ``cu_seqlens`` delimit packed sequences.

    ``topk [B, topk_heads, Nq, K]`` holds the selected keys of each row, if there is a selection. A key stands for
    ``key_span`` tokens.
    """

    left: int | None
    right: int | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    packed: bool
    topk: Tensor | None = None
    key_span: int = 1


def seen_keys(
    causal: bool,
    window: tuple[int, int] | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    key_span: int = 1,
) -> Keys:
    """Checks what says which keys a row may see."""
    if not isinstance(causal, bool):
        raise ValueError(f"causal must be True or False: got {causal!r}")
    left = right = None
    if window is not None:
        if not isinstance(window, (tuple, list)) or len(window) != 2 or not all(is_int(w) for w in window):
            raise ValueError(f"window must be two integers (left, right), negative for unbounded: got {window!r}")
        left, right = (None if side < 0 or side > FARTHEST else side for side in window)
    if causal:
        right = 0
    _check_key_span(key_span, causal, window)
    given = [name for name, cu in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)) if cu is not None]
    if len(given) == 1:
        raise ValueError(f"cu_seqlens_q and cu_seqlens_k go together: got {given[0]} alone")
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        for name, cu in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
            if not isinstance(cu, Tensor):
                raise ValueError(f"{name} must be a tensor: got {type(cu).__name__}")
            if cu.dim() != 1 or cu.shape[0] == 0:
                raise ValueError(f"{name} must be of shape [sequences + 1]: got {list(cu.shape)}")
            if cu.dtype not in (torch.int32, torch.int64):
                raise ValueError(f"{name} must be int32 or int64: got {cu.dtype}")
        if cu_seqlens_q.shape != cu_seqlens_k.shape:
            raise ValueError(
                f"cu_seqlens_q and cu_seqlens_k must have the same number of sequences: "
                f"got {cu_seqlens_q.shape[0] - 1} and {cu_seqlens_k.shape[0] - 1}"
            )
    return Keys(left, right, cu_seqlens_q, cu_seqlens_k, cu_seqlens_q is not None, key_span=key_span)


def _check_key_span(key_span: int, causal: bool, window: tuple[int, int] | None) -> None:
    if not is_int(key_span) or not 1 <= key_span <= FARTHEST_SPAN:
        raise ValueError(f"key_span must be an integer from 1 to {FARTHEST_SPAN}: got {key_span!r}")
    if key_span > 1 and not causal:
        raise ValueError(f"key_span is for causal=True: got key_span={key_span} with causal=False")
    if key_span > 1 and window is not None:
        raise ValueError(f"key_span has no window: got key_span={key_span} with window={window!r}")


def canonical_tensors(named: dict[str, Tensor], keys: Keys, layout: str | None = None) -> list[Tensor]:
    """Checks rank, dtype, layout and device; returns ``[B, H, N, D]`` views, cast as autocast asks."""
    if keys.packed:
        layout = "[tokens, heads, dim] with cu_seqlens"
    layout = layout or "[batch, heads, tokens, dim], or [tokens, heads, dim] with cu_seqlens_q and cu_seqlens_k"
    first_name, first = next(iter(named.items()))
    out = []
    for name, x in named.items():
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} must be a tensor: got {type(x).__name__}")
        if x.layout != torch.strided or x.is_nested:
            kind = "a nested tensor" if x.is_nested else f"layout {x.layout}"
            raise ValueError(f"{name} must be a dense tensor: got {kind}")
        if not torch.compiler.is_compiling() and (is_gradtrackingtensor(x) or is_batchedtensor(x)):
            raise RuntimeError(
                "streamkl: the transforms of torch.func (grad, vmap, jvp and others) are not supported; for gradients "
                "call backward() of the loss, or torch.autograd.grad"
            )
        if x.dim() != (3 if keys.packed else 4):
            raise ValueError(f"{name} must be of shape {layout}: got {list(x.shape)}")
        if x.dtype not in DTYPES:
            raise ValueError(f"{name} must be float64, float32, bfloat16 or float16: got {x.dtype}")
        if x.device != first.device:
            raise ValueError(f"{name} must be on the device of {first_name}, {first.device}: got {x.device}")
        view = autocast(x.transpose(0, 1).unsqueeze(0) if keys.packed else x)
        for axis, dim in (("head", 1), ("dimension", 3)):
            if view.shape[dim] == 0:
                raise ValueError(f"{name} must have at least one {axis}: got shape {list(x.shape)}")
        out.append(view)
    for name, cu in (("cu_seqlens_q", keys.cu_seqlens_q), ("cu_seqlens_k", keys.cu_seqlens_k)):
        if cu is not None and cu.device != first.device:
            raise ValueError(f"{name} must be on the device of {first_name}, {first.device}: got {cu.device}")
    return out


def check_pair(side: str, q: Tensor, k: Tensor, same_batch: bool = True) -> None:
    """Checks that queries and keys ``[B, H, N, D]`` of one side go together."""
    q_name, k_name = (f"{side}_q", f"{side}_k") if side else ("q", "k")
    if q.dtype != k.dtype:
        raise ValueError(f"{q_name} and {k_name} must share one dtype: got {q.dtype} and {k.dtype}")
    if same_batch and q.shape[0] != k.shape[0]:
        raise ValueError(f"{q_name} and {k_name} must have the same batch: got {q.shape[0]} and {k.shape[0]}")
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"{q_name} and {k_name} must have the same head dim: got {q.shape[3]} and {k.shape[3]}")
    if q.shape[1] % k.shape[1] != 0:
        raise ValueError(f"{q_name} heads must be a multiple of {k_name} heads: got {q.shape[1]} and {k.shape[1]}")


def check_target(target: str, queries: dict[str, Tensor], keys: dict[str, Tensor], packed: bool) -> int:
    """Checks that both sides have the same queries, and the same keys or blocks of them; how many keys a block has."""
    check_choice("target", target, ("token", "block_sum", "block_max"))
    if target == "token":
        _check_tokens(queries, keys, packed=packed)
        return 1
    _check_tokens(queries, packed=packed)
    (teacher_name, teacher), (student_name, student) = keys.items()
    _check_tokens({teacher_name: teacher[:, :, :0], student_name: student[:, :, :0]}, packed=packed)  # the batch
    tokens, blocks = teacher.shape[2], student.shape[2]
    if bool(tokens) != bool(blocks) or (blocks and tokens % blocks):
        raise ValueError(
            f"target={target!r} takes a whole number of {teacher_name} per {student_name}: got {tokens} and {blocks}"
        )
    return tokens // blocks if tokens else 1


def _check_tokens(*sides: dict[str, Tensor], packed: bool) -> None:
    """Checks that the tensors of both sides, ``[B, heads, tokens, dim]`` by name, have the same batch and tokens."""
    for (teacher_name, teacher), (student_name, student) in (side.items() for side in sides):
        for axis, dim in (("batch", 0), ("tokens", 2)):
            if teacher.shape[dim] != student.shape[dim]:
                raise ValueError(
                    f"{teacher_name} and {student_name} must have the same {axis}: got {teacher.shape[dim]} and "
                    f"{student.shape[dim]}, from [batch, heads, tokens, dim] = {list(teacher.shape)} and "
                    f"{list(student.shape)}{_swapped(teacher_name, teacher, student_name, student, packed)}"
                )


def _swapped(teacher_name: str, teacher: Tensor, student_name: str, student: Tensor, packed: bool) -> str:
    """A question, if heads and tokens look swapped: FlashAttention has tokens before heads, packed or not."""
    (t_heads, t_tokens), (s_heads, s_tokens) = teacher.shape[1:3], student.shape[1:3]
    if t_heads == s_heads and t_heads > max(t_tokens, s_tokens):
        whose = f"{teacher_name} and {student_name}"
    elif t_heads == s_tokens and t_heads > t_tokens:
        whose = teacher_name
    elif t_tokens == s_heads and s_heads > s_tokens:
        whose = student_name
    else:
        return ""
    return f"; did you mean {'.transpose(0, 1)' if packed else '.transpose(1, 2)'} of {whose}?"


def refuse_token_shards(named: dict[str, Tensor], keys: Keys) -> None:
    """Refuses DTensors ``[B, heads, tokens, dim]`` that are sharded by tokens where a row does not see all keys."""
    if keys.left is None and keys.right is None and keys.topk is None and not keys.packed:
        return
    for name, x in named.items():
        placements = getattr(x, "placements", ())
        if any(getattr(placement, "dim", None) == 2 for placement in placements):
            raise ValueError(
                f"{name} must not be sharded by tokens under a mask, since a shard does not know where in the sequence "
                f"it lies: got {placements}; streamkl.distributed.ContextParallel shards a sequence"
            )


def canonical_index_weight(x: Tensor, q: Tensor, keys: Keys) -> Tensor:
    """Checks ``index_w [B, Nq, J]``, packed ``[Tq, J]``; returns ``[B, J, Nq]``."""
    if not isinstance(x, Tensor):
        raise ValueError(f"index_w must be a tensor: got {type(x).__name__}")
    batch, heads, tokens = q.shape[:3]
    wanted = [tokens, heads] if keys.packed else [batch, tokens, heads]
    if list(x.shape) != wanted:
        raise ValueError(f"index_w must be of shape {wanted}, a weight per query and index head: got {list(x.shape)}")
    if x.layout != torch.strided:
        raise ValueError(f"index_w must be a dense tensor: got layout {x.layout}")
    if x.dtype not in DTYPES:
        raise ValueError(f"index_w must be float64, float32, bfloat16 or float16: got {x.dtype}")
    if x.dtype == torch.float64 and q.dtype != torch.float64:
        raise ValueError(f"index_w must be float64 only where index_q is: got {x.dtype} beside {q.dtype}")
    if x.device != q.device:
        raise ValueError(f"index_w must be on the device of the queries, {q.device}: got {x.device}")
    return (x.unsqueeze(0) if keys.packed else x).transpose(1, 2)


def with_topk(keys: Keys, topk: Tensor | None, q: Tensor, topk_heads: int | None, whose: str) -> Keys:
    """Checks ``topk_indices``: one head of them, or ``topk_heads`` (any divisor of the heads if ``None``)."""
    if topk is None:
        return keys
    if not isinstance(topk, Tensor):
        raise ValueError(f"topk_indices must be a tensor: got {type(topk).__name__}")
    batch, tokens = [] if keys.packed else [q.shape[0]], q.shape[2]
    given = topk.shape[-3] if topk_heads is None and topk.dim() == len(batch) + 3 else topk_heads
    if list(topk.shape[:-1]) not in ([*batch, tokens], [*batch, given, tokens]):
        short, full = (f"[{', '.join(map(str, shape))}]" for shape in (
            (*batch, tokens, "K"), (*batch, topk_heads or "topk_heads", tokens, "K"))
        )  # fmt: skip
        raise ValueError(f"topk_indices must be of shape {short} or {full}: got {list(topk.shape)}")
    if topk.layout != torch.strided:
        raise ValueError(f"topk_indices must be a dense tensor: got layout {topk.layout}")
    if topk.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"topk_indices must be int32 or int64: got {topk.dtype}")
    if topk.device != q.device:
        raise ValueError(f"topk_indices must be on the device of the queries, {q.device}: got {topk.device}")
    if keys.packed:
        topk = topk.unsqueeze(0)
    if topk.dim() == 3:
        topk = topk.unsqueeze(1)
    if topk_heads is None and (topk.shape[1] == 0 or q.shape[1] % topk.shape[1] != 0):
        raise ValueError(
            f"{whose} heads must be a multiple of topk_indices heads: got {q.shape[1]} and {topk.shape[1]}"
        )
    return keys._replace(topk=topk)


def canonical_lse(name: str, x: Tensor | None, q: Tensor, heads: int, keys: Keys) -> Tensor | None:
    """Checks a log-sum-exp of each row ``[B, heads, Nq]``, packed ``[heads, Tq]``; returns ``[B, heads, Nq]``."""
    if x is None:
        return None
    x = _row_tensor(name, x, q, heads, keys, False)
    if x.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"{name} must be float32 or float64, because its rounding scales every probability: got {x.dtype}"
        )
    return x


def canonical_row_weight(x: Tensor | None, q: Tensor, distributions: int, keys: Keys) -> Tensor | None:
    """Checks weights of rows, ``[B, heads, Nq]``, ``[B, Nq]`` or packed; returns ``[B, heads, Nq]``."""
    if x is None:
        return None
    x = _row_tensor("row_weight", x, q, distributions, keys, True)
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "row_weight is not differentiated: got one that requires a gradient; detach it, "
            "or weigh the rows of reduction='none'"
        )
    return x


def _row_tensor(name: str, x: Tensor, q: Tensor, heads: int, keys: Keys, shared: bool) -> Tensor:
    """Checks a tensor of one number per row and head, or, if ``shared``, per row; returns ``[B, heads, Nq]``."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be a tensor: got {type(x).__name__}")
    batch, tokens = q.shape[0], q.shape[2]
    full = [heads, tokens] if keys.packed else [batch, heads, tokens]
    short = [tokens] if keys.packed else [batch, tokens]
    if list(x.shape) != full and not (shared and list(x.shape) == short):
        wanted = f"{full} or {short}" if shared else f"{full}"
        raise ValueError(f"{name} must be of shape {wanted}: got {list(x.shape)}")
    if x.layout != torch.strided:
        raise ValueError(f"{name} must be a dense tensor: got layout {x.layout}")
    if x.dtype not in DTYPES:
        raise ValueError(f"{name} must be a floating-point tensor (a mask: mask.float()): got {x.dtype}")
    if x.device != q.device:
        raise ValueError(f"{name} must be on the device of the queries, {q.device}: got {x.device}")
    if keys.packed:
        x = x.unsqueeze(0)
    if x.dim() == 2:
        x = x.unsqueeze(1).expand(batch, heads, tokens)
    return x


def check_scale(name: str, scale: float | None) -> None:
    """Checks a scale of logits."""
    if scale is None:
        return
    if isinstance(scale, Tensor):
        raise ValueError(f"{name} must be a Python float: got a tensor; a learned temperature multiplies q instead")
    if isinstance(scale, bool) or not isinstance(scale, (int, float, torch.SymFloat, torch.SymInt)):
        raise ValueError(f"{name} must be a Python float: got {scale!r}")
    if not -math.inf < scale < math.inf:
        raise ValueError(f"{name} must be finite: got {scale}")


def check_choice(name: str, given: object, allowed: tuple[object, ...]) -> None:
    """Checks an option that is one of a few."""
    if not any(given is option or (isinstance(option, str) and given == option) for option in allowed):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}: got {given!r}")


def is_int(value: object) -> bool:
    """Whether a value is an integer, known or symbolic, and no bool."""
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)
