"""Which layer and which heads of a teacher a student's learn from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from streamkl.sparse import AttentionCall

Layers = Literal["uniform", "last"] | Mapping[int, int]
Heads = Mapping[int, int | Sequence[int]] | None


def paired_layers(layers: Layers, student: Sequence[int], teacher: Sequence[int]) -> dict[int, int]:
    """The teacher's layer of each student's layer that learns.

    Args:
        layers: ``"uniform"``, ``"last"``, or the pairs; there may be none.
        student: The student's layers that attend.
        teacher: The teacher's.

    Raises:
        ValueError: There is no such pairing.

    Examples:
        >>> from streamkl.integrations.transformers.pairing import paired_layers
        >>> paired_layers("uniform", range(3), range(6)), paired_layers("last", range(3), range(6))
        ({0: 1, 1: 3, 2: 5}, {2: 5})
    """
    if layers == "last":
        return {student[-1]: teacher[-1]}
    if layers == "uniform":
        if len(student) > len(teacher):
            raise ValueError(
                f"uniform pairs need at least as many teacher layers: the student has {len(student)} layers that "
                f"attend, the teacher {len(teacher)}; give layers={{student's: teacher's}}"
            )
        return {n: teacher[(i + 1) * len(teacher) // len(student) - 1] for i, n in enumerate(student)}
    if not isinstance(layers, Mapping):
        raise ValueError(f"layers must be 'uniform', 'last' or a dict of student's to teacher's layers: got {layers!r}")
    for what, given, there in (("student", layers.keys(), student), ("teacher", layers.values(), teacher)):
        if not set(given) <= set(there):
            raise ValueError(
                f"the {what} has no attention in layers {sorted(set(given) - set(there), key=str)}: they are numbers, "
                f"of {list(there)}"
            )
    return dict(layers)


class Pair(NamedTuple):
    """The q and k of a pair of layers, for `streamkl.attention_kl`."""

    teacher_q: Tensor
    teacher_k: Tensor
    student_q: Tensor
    student_k: Tensor
    teacher_lse: Tensor | None


def paired_heads(heads: Heads, student: AttentionCall, teacher: AttentionCall) -> Pair:
    """The heads that are compared.

    Args:
        heads: ``None`` for all: a student's head learns from the mean of ``H / R`` consecutive heads of the teacher.
            Otherwise the teacher's head, or heads, of each student's head that learns.
        student: The student's attention.
        teacher: The teacher's.

    Raises:
        ValueError: The numbers of heads do not divide, or the map does not fit them.
    """
    ours, theirs = student.q.shape[1], teacher.q.shape[1]
    if heads is None:
        if theirs % ours:
            raise ValueError(
                f"the teacher's {theirs} heads are not a multiple of the student's {ours}: give heads={{student's "
                f"head: teacher's head, or a tuple of as many of them for each, such as (0, 1) and (1, 2)}}"
            )
        return Pair(teacher.q.detach(), teacher.k.detach(), student.q, student.k, teacher.lse)
    chosen = sorted(heads)
    groups = [_group(heads[head]) for head in chosen]
    if len({len(group) for group in groups}) != 1:
        raise ValueError(
            f"heads must give each student's head equally many of the teacher's, which may be in several of the "
            f"tuples: got {dict(heads)}"
        )
    taught = [head for group in groups for head in group]
    for what, given, count in (("student", chosen, ours), ("teacher", taught, theirs)):
        if not all(isinstance(head, int) and 0 <= head < count for head in given):
            raise ValueError(f"the {what} has heads 0 to {count - 1}: got heads={dict(heads)}")
    lse = None if teacher.lse is None else _chosen(teacher.lse, taught)
    return Pair(
        _chosen(teacher.q.detach(), taught), _keys(teacher.k.detach(), taught, theirs),
        _chosen(student.q, chosen), _keys(student.k, chosen, ours), lse,
    )  # fmt: skip


def _group(heads: Any) -> tuple[int, ...]:
    return (heads,) if isinstance(heads, int) else tuple(heads)


def _chosen(x: Tensor, heads: Sequence[int]) -> Tensor:
    """Heads of ``[B, H, ...]``, or of packed ``[T, H, D]``."""
    return x.index_select(1, torch.tensor(heads, device=x.device))


def _keys(k: Tensor, heads: Sequence[int], count: int) -> Tensor:
    """The key head of each of ``heads``, of ``count`` query heads."""
    group = count // k.shape[1]
    return _chosen(k, [head // group for head in heads])
