"""From a caller's arguments to tensors in one layout and the numbers that describe them, or a ``ValueError``.

Shapes, dtypes and devices are checked on every call and cost nothing on the device; ``value_checks.py`` reads values.
A packed (varlen) batch is given by ``cu_seqlens_q`` and ``cu_seqlens_k``.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor, is_gradtrackingtensor

from streamkl import value_checks
from streamkl.autocasting import autocast

BACKENDS = ("auto", "reference", "triton", "cpu", "tiled")
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


class KLArguments(NamedTuple):
    """The checked arguments of a loss: q and k ``[B, H, N, D]``, row tensors ``[B, heads, Nq]``.

    An indexer is a head-summed student, with weights ``student_w`` or without. ``teacher_k`` has ``block`` keys for
    each of the student's, whose target is their sum, or their maximum if ``block_max``.
    """

    teacher_q: Tensor
    teacher_k: Tensor
    student_q: Tensor
    student_k: Tensor
    student_w: Tensor | None
    head_summed: bool
    keys: Keys
    teacher_lse: Tensor | None
    teacher_rest: Tensor | None
    row_weight: Tensor | None
    deterministic: bool
    block: int = 1
    block_max: bool = False


class LSEArguments(NamedTuple):
    """The checked arguments of ``attention_lse``: q and k ``[B, H, N, D]``."""

    q: Tensor
    k: Tensor
    keys: Keys


class SparseArguments(NamedTuple):
    """The checked arguments of ``sparse_attention``: q, k, v ``[B, H, N, D]``, ``indices [B, query_blocks, K]``.

    With a page table, k and v are ``[pages, Hkv, page_size, D]``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    indices: Tensor
    keys: Keys


def attention_kl_arguments(
    teacher_q: Tensor,
    teacher_k: Tensor,
    student_q: Tensor,
    student_k: Tensor,
    causal: bool,
    window: tuple[int, int] | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    topk_indices: Tensor | None,
    teacher_scale: float | None,
    student_scale: float | None,
    student_activation: str | None,
    teacher_lse: Tensor | None,
    teacher_rest: Tensor | None,
    row_weight: Tensor | None,
    divergence: str,
    reduction: str,
    deterministic: bool | None,
    backend: str,
    key_span: int = 1,
    target: str = "token",
) -> KLArguments:
    """Checks a call of ``attention_kl``; packed tensors come back as views with a batch of 1."""
    keys = _keys(causal, window, cu_seqlens_q, cu_seqlens_k, key_span)
    named = {"teacher_q": teacher_q, "teacher_k": teacher_k, "student_q": student_q, "student_k": student_k}
    teacher_q, teacher_k, student_q, student_k = _canonical(named, keys)
    _check_pair("teacher", teacher_q, teacher_k)
    _check_pair("student", student_q, student_k)
    of_keys = {"teacher_k": teacher_k, "student_k": student_k}
    block = _check_target(target, {"teacher_q": teacher_q, "student_q": student_q}, of_keys, keys.packed)
    heads, distributions = teacher_q.shape[1], student_q.shape[1]
    if heads % distributions != 0:
        raise ValueError(
            f"teacher_q heads must be a multiple of student_q heads, so that each student head gets a group of teacher "
            f"heads: got {heads} and {distributions}"
        )

    _check_scale("teacher_scale", teacher_scale)
    _check_scale("student_scale", student_scale)
    _check_choice("student_activation", student_activation, (None, "relu"))
    _check_choice("divergence", divergence, ("forward", "reverse"))
    _check_choice("reduction", reduction, ("mean", "sum", "none"))
    _check_choice("backend", backend, BACKENDS)
    _check_choice("deterministic", deterministic, (None, True, False))
    if divergence == "reverse" and heads != distributions:
        raise ValueError(
            f"divergence='reverse' is defined head by head, for as many teacher_q as student_q heads: "
            f"got {heads} and {distributions}"
        )
    if divergence == "reverse" and target != "token":
        raise ValueError(f"divergence='reverse' is defined for target='token': got {target!r}")
    wants_teacher = torch.is_grad_enabled() and (teacher_q.requires_grad or teacher_k.requires_grad)
    if wants_teacher and heads != distributions:
        raise ValueError(
            f"gradients to the teacher exist for as many teacher_q as student_q heads: got {heads} and "
            f"{distributions}; detach teacher_q and teacher_k"
        )
    if wants_teacher and target != "token":
        raise ValueError(
            f"gradients to the teacher exist for target='token': got {target!r}; detach teacher_q and teacher_k"
        )

    keys = _with_topk(keys, topk_indices, student_q, distributions, "student_q")
    _refuse_lse_of_block_max(target, teacher_lse)
    teacher_lse = _log_sum_exp("teacher_lse", teacher_lse, student_q, heads, keys)
    teacher_rest = _log_sum_exp("teacher_rest", teacher_rest, student_q, heads, keys)
    row_weight = _row_weight(row_weight, student_q, distributions, keys)
    _refuse_token_shards(dict(zip(named, (teacher_q, teacher_k, student_q, student_k), strict=True)), keys)
    return KLArguments(
        teacher_q, teacher_k, student_q, student_k, None, False, keys, teacher_lse, teacher_rest,
        row_weight, _deterministic(deterministic), block, target == "block_max",
    )  # fmt: skip


def indexer_kl_arguments(
    teacher_q: Tensor,
    teacher_k: Tensor,
    index_q: Tensor,
    index_k: Tensor,
    index_w: Tensor | None,
    activation: str | None,
    index_scale: float | None,
    topk_indices: Tensor | None,
    teacher_scale: float | None,
    teacher_lse: Tensor | None,
    teacher_rest: Tensor | None,
    causal: bool,
    window: tuple[int, int] | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    row_weight: Tensor | None,
    reduction: str,
    deterministic: bool | None,
    backend: str,
    key_span: int = 1,
    target: str = "token",
) -> KLArguments:
    """Checks a call of ``indexer_kl``; its teacher comes back detached, its key with one head."""
    keys = _keys(causal, window, cu_seqlens_q, cu_seqlens_k, key_span)
    if not isinstance(index_k, Tensor):
        raise ValueError(f"index_k must be a tensor: got {type(index_k).__name__}")
    if index_k.dim() != (2 if keys.packed else 3):
        wanted = "[tokens, dim] with cu_seqlens" if keys.packed else "[batch, tokens, dim]"
        raise ValueError(f"index_k must be of shape {wanted}, one key for all index heads: got {list(index_k.shape)}")
    named = {"teacher_q": teacher_q, "teacher_k": teacher_k, "index_q": index_q, "index_k": index_k.unsqueeze(1)}
    teacher_q, teacher_k, index_q, index_k = _canonical(named, keys)
    _check_pair("teacher", teacher_q, teacher_k)
    _check_pair("index", index_q, index_k)
    of_keys = {"teacher_k": teacher_k, "index_k": index_k}
    block = _check_target(target, {"teacher_q": teacher_q, "index_q": index_q}, of_keys, keys.packed)

    _check_scale("teacher_scale", teacher_scale)
    _check_scale("index_scale", index_scale)
    _check_choice("activation", activation, (None, "relu"))
    _check_choice("reduction", reduction, ("mean", "sum", "none"))
    _check_choice("backend", backend, BACKENDS)
    _check_choice("deterministic", deterministic, (None, True, False))

    if index_w is not None:
        index_w = _index_weight(index_w, index_q, keys)
    keys = _with_topk(keys, topk_indices, index_q, 1, "the indexer")
    _refuse_lse_of_block_max(target, teacher_lse)
    teacher_lse = _log_sum_exp("teacher_lse", teacher_lse, index_q, teacher_q.shape[1], keys)
    teacher_rest = _log_sum_exp("teacher_rest", teacher_rest, index_q, teacher_q.shape[1], keys)
    row_weight = _row_weight(row_weight, index_q, 1, keys)
    _refuse_token_shards(dict(zip(named, (teacher_q, teacher_k, index_q, index_k), strict=True)), keys)
    return KLArguments(
        teacher_q.detach(), teacher_k.detach(), index_q, index_k, index_w, True, keys, teacher_lse, teacher_rest,
        row_weight, _deterministic(deterministic), block, target == "block_max",
    )  # fmt: skip


def attention_lse_arguments(
    q: Tensor,
    k: Tensor,
    scale: float | None,
    causal: bool,
    window: tuple[int, int] | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    topk_indices: Tensor | None,
    backend: str,
    key_span: int = 1,
) -> LSEArguments:
    """Checks a call of ``attention_lse``; packed tensors come back as views with a batch of 1."""
    keys = _keys(causal, window, cu_seqlens_q, cu_seqlens_k, key_span)
    q, k = _canonical({"q": q, "k": k}, keys)
    _check_pair("", q, k)
    _check_scale("scale", scale)
    _check_choice("backend", backend, BACKENDS)
    keys = _with_topk(keys, topk_indices, q, None, "q")
    _refuse_token_shards({"q": q, "k": k}, keys)
    return LSEArguments(q, k, keys)


def sparse_attention_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    query_block: int,
    scale: float | None,
    causal: bool,
    window: tuple[int, int] | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    page_table: Tensor | None,
    backend: str,
) -> SparseArguments:
    """Checks a call of ``sparse_attention``; packed tensors come back with a batch of 1."""
    keys = _keys(causal, window, cu_seqlens_q, cu_seqlens_k)
    axes = ("batch", "heads", "tokens")
    if page_table is None:
        q, k, v = _canonical({"q": q, "k": k, "v": v}, keys)
        _check_pair("", q, k)
    else:
        q, k, v = _paged(q, k, v, page_table, keys)
        axes = ("pages", "heads", "tokens per page")
    if v.dtype != q.dtype:
        raise ValueError(f"v must be of the dtype of q and k, {q.dtype}: got {v.dtype}")
    for dim, axis in enumerate(axes):
        if v.shape[dim] != k.shape[dim]:
            raise ValueError(f"k and v must have the same {axis}: got {k.shape[dim]} and {v.shape[dim]}")
    _check_scale("scale", scale)
    _check_choice("backend", backend, BACKENDS)
    check_query_block(query_block)
    if not isinstance(indices, Tensor):
        raise ValueError(f"indices must be a tensor: got {type(indices).__name__}")
    if indices.dim() != (2 if keys.packed else 3) or (not keys.packed and indices.shape[0] != q.shape[0]):
        wanted = "[query_blocks, K] with cu_seqlens" if keys.packed else f"[{q.shape[0]}, query_blocks, K]"
        raise ValueError(f"indices must be of shape {wanted}: got {list(indices.shape)}")
    if indices.dtype not in (torch.int32, torch.int64) or indices.device != q.device:
        raise ValueError(f"indices must be int32 or int64 on {q.device}: got {indices.dtype} on {indices.device}")
    return SparseArguments(q, k, v, indices.unsqueeze(0) if keys.packed else indices, keys)


def sink_rows(sink: Tensor, q: Tensor, packed: bool) -> Tensor:
    """Checks sinks ``[H]`` and returns them as rows ``[B, H, Nq]``, packed ``[H, Tq]``, in the dtype of an LSE."""
    _canonical({"q": q}, Keys(None, None, None, None, packed))
    is_sink = isinstance(sink, Tensor) and sink.shape == q.shape[1:2] and sink.is_floating_point()
    if not is_sink or sink.device != q.device:
        got = f"{sink.dtype} {list(sink.shape)} on {sink.device}" if isinstance(sink, Tensor) else type(sink).__name__
        raise ValueError(f"sink must be a tensor of [{q.shape[1]}] logits, one per head, on {q.device}: got {got}")
    rows = sink.to(torch.promote_types(q.dtype, torch.float32))[:, None]
    return rows.expand(-1, q.shape[0]) if packed else rows.expand(q.shape[0], -1, q.shape[2])


def _paged(q: Tensor, k: Tensor, v: Tensor, page_table: Tensor, keys: Keys) -> list[Tensor]:
    """Checks keys and values in pages; returns ``q [1, H, Tq, D]``, ``k`` and ``v [pages, Hkv, page_size, D]``."""
    if not keys.packed or keys.cu_seqlens_k is None:
        raise ValueError("page_table needs packed queries: give cu_seqlens_q and cu_seqlens_k, too")
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in (q, k, v)):
        raise ValueError(
            "sparse_attention has no gradients with a page_table: call it under torch.no_grad(), or without pages"
        )
    (q,) = _canonical({"q": q}, keys)
    pages = {
        name: x.transpose(1, 2) if isinstance(x, Tensor) and x.dim() == 4 else x for name, x in (("k", k), ("v", v))
    }
    k, v = _canonical(pages, keys._replace(packed=False), "[pages, page_size, heads, dim] with a page_table")
    sequences = keys.cu_seqlens_k.shape[0] - 1
    if not isinstance(page_table, Tensor) or page_table.dim() != 2 or page_table.shape[0] != sequences:
        got = list(page_table.shape) if isinstance(page_table, Tensor) else type(page_table).__name__
        raise ValueError(f"page_table must be of shape [{sequences}, pages], a row per sequence: got {got}")
    if page_table.dtype not in (torch.int32, torch.int64) or page_table.device != q.device:
        raise ValueError(
            f"page_table must be int32 or int64 on {q.device}: got {page_table.dtype} on {page_table.device}"
        )
    if k.device != q.device:
        raise ValueError(f"k must be on the device of q, {q.device}: got {k.device}")
    if k.shape[2] == 0:
        raise ValueError("a page of k must have at least one token: got none")
    _check_pair("", q, k, same_batch=False)
    return [q, k, v]


def check_query_block(query_block: int) -> None:
    """Checks how many queries share their top-k."""
    if not _is_int(query_block) or query_block < 1:
        raise ValueError(f"query_block must be a positive integer: got {query_block!r}")


def check_values(arguments: KLArguments | LSEArguments) -> None:
    """Checks what needs the tensors' values, for a caller that does not go through the operators."""
    keys = arguments.keys
    q, k = (arguments.q, arguments.k) if isinstance(arguments, LSEArguments) else arguments[2:4]
    value_checks.check_cu_seqlens(keys.cu_seqlens_q, keys.cu_seqlens_k, q.shape[2], k.shape[2])
    value_checks.check_topk(keys.topk, k.shape[2])
    if isinstance(arguments, KLArguments):
        value_checks.check_row_weight(arguments.row_weight)


def check_padding_mask(mask: Tensor, q: Tensor, k: Tensor, keys: Keys) -> None:
    """Checks a ``key_padding_mask [B, N]``, but for holes, beside ``q, k [B, heads, N, D]``."""
    if keys.key_span > 1:
        raise ValueError(
            f"key_padding_mask is for keys that are tokens: got it together with key_span={keys.key_span}; "
            "packed tensors with cu_seqlens_q and cu_seqlens_k take key_span"
        )
    if keys.packed:
        raise ValueError("key_padding_mask is for dense tensors: got it together with cu_seqlens")
    if q.shape[2] != k.shape[2]:
        raise ValueError(
            f"key_padding_mask is for as many queries as keys: got {q.shape[2]} and {k.shape[2]}; "
            "packed tensors with cu_seqlens_q and cu_seqlens_k can have different numbers"
        )
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"key_padding_mask must be of bool, true for real tokens: got {got}")
    if mask.shape != (k.shape[0], k.shape[2]):
        raise ValueError(f"key_padding_mask must have shape {[k.shape[0], k.shape[2]]}: got {list(mask.shape)}")
    if mask.device != k.device:
        raise ValueError(f"key_padding_mask must be on the device of the keys, {k.device}: got {mask.device}")


def check_teacher_lse(arguments: KLArguments, lse: Tensor) -> None:
    """Checks a given ``teacher_lse`` against the teacher's own, of the caller's shape, where no engine does."""
    if arguments.teacher_lse is None or not value_checks.may_read(lse):
        return
    lse = lse.view_as(arguments.teacher_lse)
    mass = torch.where(lse == -torch.inf, 1.0, torch.exp(lse - arguments.teacher_lse))
    if arguments.row_weight is not None:
        counts = (arguments.row_weight != 0).repeat_interleave(mass.shape[1] // arguments.row_weight.shape[1], 1)
        mass = torch.where(counts, mass, 1.0)
    value_checks.check_teacher_mass(mass, arguments.teacher_lse)


def _keys(
    causal: bool,
    window: tuple[int, int] | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    key_span: int = 1,
) -> Keys:
    if not isinstance(causal, bool):
        raise ValueError(f"causal must be True or False: got {causal!r}")
    left = right = None
    if window is not None:
        if not isinstance(window, (tuple, list)) or len(window) != 2 or not all(_is_int(w) for w in window):
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
    if not _is_int(key_span) or not 1 <= key_span <= FARTHEST_SPAN:
        raise ValueError(f"key_span must be an integer from 1 to {FARTHEST_SPAN}: got {key_span!r}")
    if key_span > 1 and not causal:
        raise ValueError(f"key_span is for causal=True: got key_span={key_span} with causal=False")
    if key_span > 1 and window is not None:
        raise ValueError(f"key_span has no window: got key_span={key_span} with window={window!r}")


def _canonical(named: dict[str, Tensor], keys: Keys, layout: str | None = None) -> list[Tensor]:
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


def _check_pair(side: str, q: Tensor, k: Tensor, same_batch: bool = True) -> None:
    q_name, k_name = (f"{side}_q", f"{side}_k") if side else ("q", "k")
    if q.dtype != k.dtype:
        raise ValueError(f"{q_name} and {k_name} must share one dtype: got {q.dtype} and {k.dtype}")
    if same_batch and q.shape[0] != k.shape[0]:
        raise ValueError(f"{q_name} and {k_name} must have the same batch: got {q.shape[0]} and {k.shape[0]}")
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"{q_name} and {k_name} must have the same head dim: got {q.shape[3]} and {k.shape[3]}")
    if q.shape[1] % k.shape[1] != 0:
        raise ValueError(f"{q_name} heads must be a multiple of {k_name} heads: got {q.shape[1]} and {k.shape[1]}")


def _check_target(target: str, queries: dict[str, Tensor], keys: dict[str, Tensor], packed: bool) -> int:
    """Checks that both sides have the same queries, and the same keys or blocks of them; how many keys a block has."""
    _check_choice("target", target, ("token", "block_sum", "block_max"))
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


def _refuse_lse_of_block_max(target: str, teacher_lse: Tensor | None) -> None:
    """Refuses a log-sum-exp that cannot be checked: the maxima of blocks sum to anything."""
    if target == "block_max" and teacher_lse is not None:
        raise ValueError(
            "teacher_lse is not taken with target='block_max', since no pass over its keys could check it: leave it out"
        )


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


def _refuse_token_shards(named: dict[str, Tensor], keys: Keys) -> None:
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


def _index_weight(x: Tensor, q: Tensor, keys: Keys) -> Tensor:
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


def _with_topk(keys: Keys, topk: Tensor | None, q: Tensor, topk_heads: int | None, whose: str) -> Keys:
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


def _log_sum_exp(name: str, x: Tensor | None, q: Tensor, heads: int, keys: Keys) -> Tensor | None:
    if x is None:
        return None
    x = _row_tensor(name, x, q, heads, keys, False)
    if x.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"{name} must be float32 or float64, because its rounding scales every probability: got {x.dtype}"
        )
    return x


def _row_weight(x: Tensor | None, q: Tensor, distributions: int, keys: Keys) -> Tensor | None:
    if x is None:
        return None
    x = _row_tensor("row_weight", x, q, distributions, keys, True)
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "row_weight is not differentiated: got one that requires a gradient; detach it, "
            "or weigh the rows of reduction='none'"
        )
    return x


def _deterministic(given: bool | None) -> bool:
    return torch.are_deterministic_algorithms_enabled() if given is None else given


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


def _check_scale(name: str, scale: float | None) -> None:
    if scale is None:
        return
    if isinstance(scale, Tensor):
        raise ValueError(f"{name} must be a Python float: got a tensor; a learned temperature multiplies q instead")
    if isinstance(scale, bool) or not isinstance(scale, (int, float, torch.SymFloat, torch.SymInt)):
        raise ValueError(f"{name} must be a Python float: got {scale!r}")
    if not -math.inf < scale < math.inf:
        raise ValueError(f"{name} must be finite: got {scale}")


def _check_choice(name: str, given: object, allowed: tuple[object, ...]) -> None:
    if not any(given is option or (isinstance(option, str) and given == option) for option in allowed):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}: got {given!r}")


def _is_int(value: object) -> bool:
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)
