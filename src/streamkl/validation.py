"""From an operator's arguments to tensors in one layout and the numbers that describe them, or a ``ValueError``."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from streamkl import value_checks
from streamkl.argument_checks import (
    Keys,
    canonical_index_weight,
    canonical_lse,
    canonical_row_weight,
    canonical_tensors,
    check_choice,
    check_pair,
    check_scale,
    check_target,
    refuse_token_shards,
    seen_keys,
    with_topk,
)

BACKENDS = ("auto", "reference", "triton", "cpu", "tiled")


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
    keys = seen_keys(causal, window, cu_seqlens_q, cu_seqlens_k, key_span)
    named = {"teacher_q": teacher_q, "teacher_k": teacher_k, "student_q": student_q, "student_k": student_k}
    teacher_q, teacher_k, student_q, student_k = canonical_tensors(named, keys)
    check_pair("teacher", teacher_q, teacher_k)
    check_pair("student", student_q, student_k)
    of_keys = {"teacher_k": teacher_k, "student_k": student_k}
    block = check_target(target, {"teacher_q": teacher_q, "student_q": student_q}, of_keys, keys.packed)
    heads, distributions = teacher_q.shape[1], student_q.shape[1]
    if heads % distributions != 0:
        raise ValueError(
            f"teacher_q heads must be a multiple of student_q heads, so that each student head gets a group of teacher "
            f"heads: got {heads} and {distributions}"
        )

    check_scale("teacher_scale", teacher_scale)
    check_scale("student_scale", student_scale)
    check_choice("student_activation", student_activation, (None, "relu"))
    check_choice("divergence", divergence, ("forward", "reverse"))
    check_choice("reduction", reduction, ("mean", "sum", "none"))
    check_choice("backend", backend, BACKENDS)
    check_choice("deterministic", deterministic, (None, True, False))
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

    keys = with_topk(keys, topk_indices, student_q, distributions, "student_q")
    _refuse_lse_of_block_max(target, teacher_lse)
    teacher_lse = canonical_lse("teacher_lse", teacher_lse, student_q, heads, keys)
    teacher_rest = canonical_lse("teacher_rest", teacher_rest, student_q, heads, keys)
    row_weight = canonical_row_weight(row_weight, student_q, distributions, keys)
    refuse_token_shards(dict(zip(named, (teacher_q, teacher_k, student_q, student_k), strict=True)), keys)
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
    keys = seen_keys(causal, window, cu_seqlens_q, cu_seqlens_k, key_span)
    if not isinstance(index_k, Tensor):
        raise ValueError(f"index_k must be a tensor: got {type(index_k).__name__}")
    if index_k.dim() != (2 if keys.packed else 3):
        wanted = "[tokens, dim] with cu_seqlens" if keys.packed else "[batch, tokens, dim]"
        raise ValueError(f"index_k must be of shape {wanted}, one key for all index heads: got {list(index_k.shape)}")
    named = {"teacher_q": teacher_q, "teacher_k": teacher_k, "index_q": index_q, "index_k": index_k.unsqueeze(1)}
    teacher_q, teacher_k, index_q, index_k = canonical_tensors(named, keys)
    check_pair("teacher", teacher_q, teacher_k)
    check_pair("index", index_q, index_k)
    of_keys = {"teacher_k": teacher_k, "index_k": index_k}
    block = check_target(target, {"teacher_q": teacher_q, "index_q": index_q}, of_keys, keys.packed)

    check_scale("teacher_scale", teacher_scale)
    check_scale("index_scale", index_scale)
    check_choice("activation", activation, (None, "relu"))
    check_choice("reduction", reduction, ("mean", "sum", "none"))
    check_choice("backend", backend, BACKENDS)
    check_choice("deterministic", deterministic, (None, True, False))

    if index_w is not None:
        index_w = canonical_index_weight(index_w, index_q, keys)
    keys = with_topk(keys, topk_indices, index_q, 1, "the indexer")
    _refuse_lse_of_block_max(target, teacher_lse)
    teacher_lse = canonical_lse("teacher_lse", teacher_lse, index_q, teacher_q.shape[1], keys)
    teacher_rest = canonical_lse("teacher_rest", teacher_rest, index_q, teacher_q.shape[1], keys)
    row_weight = canonical_row_weight(row_weight, index_q, 1, keys)
    refuse_token_shards(dict(zip(named, (teacher_q, teacher_k, index_q, index_k), strict=True)), keys)
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
    keys = seen_keys(causal, window, cu_seqlens_q, cu_seqlens_k, key_span)
    q, k = canonical_tensors({"q": q, "k": k}, keys)
    check_pair("", q, k)
    check_scale("scale", scale)
    check_choice("backend", backend, BACKENDS)
    keys = with_topk(keys, topk_indices, q, None, "q")
    refuse_token_shards({"q": q, "k": k}, keys)
    return LSEArguments(q, k, keys)


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


def _refuse_lse_of_block_max(target: str, teacher_lse: Tensor | None) -> None:
    """Refuses a log-sum-exp that cannot be checked: the maxima of blocks sum to anything."""
    if target == "block_max" and teacher_lse is not None:
        raise ValueError(
            "teacher_lse is not taken with target='block_max', since no pass over its keys could check it: leave it out"
        )


def _deterministic(given: bool | None) -> bool:
    return torch.are_deterministic_algorithms_enabled() if given is None else given
