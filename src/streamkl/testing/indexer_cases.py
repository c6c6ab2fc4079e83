"""Seeded problems over the contract of ``indexer_kl``: `make_indexer_case` builds one, `random_indexer_case` draws one.

They are as hostile as those of ``problems.py``: nan around every tensor, and wherever nothing may be read. Tensors are
dense or packed (varlen).
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from streamkl.testing.problems import (
    DTYPES,
    INFINITE,
    REST,
    Case,
    Infinite,
    draw_infinite,
    draw_key_span,
    draw_lse,
    draw_rest,
    draw_row_weight,
    draw_sequences,
    draw_topk,
    draw_values,
    draw_window,
    make_infinite,
    mask_options,
    place_case,
    poison,
)

INDEX = ("index_q", "index_k", "index_w")
"""The indexer's tensors in a `Case` of an indexer: as ``wanted``, they are those that gradients are asked for."""
TEACHERS = ((1, 1), (2, 1), (4, 2), (6, 3), (8, 1), (9, 3), (24, 4))
WIDE_TEACHERS = ((32, 8), (128, 1))
TEACHER_DIMS = (16, 40, 59, 64, 128, 192, 576)
INDEX_HEADS = (1, 1, 2, 3, 4, 8, 16, 32, 64)
INDEX_DIMS = (16, 32, 59, 64, 128)


class IndexerHeads(NamedTuple):
    """How many heads the teacher and the indexer have.

    Attributes:
        teacher: Query heads of the teacher.
        teacher_kv: Key heads of the teacher.
        indexer: Index heads.
    """

    teacher: int = 4
    teacher_kv: int = 2
    indexer: int = 4


def make_indexer_case(
    seed: int = 0,
    *,
    heads: IndexerHeads = IndexerHeads(),  # noqa: B008
    dims: tuple[int, int] = (32, 32),
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32),
    weight_dtype: torch.dtype | None = torch.float32,
    batch: int = 2,
    tokens: tuple[int, int] = (50, 50),
    cu_seqlens: tuple[list[int], list[int]] | None = None,
    teacher_lse: bool = False,
    teacher_rest: bool = False,
    row_weight: Tensor | None = None,
    wanted: tuple[str, ...] = INDEX,
    spread: tuple[float, float] = (1.0, 1.0),
    offset: tuple[float, float] = (0.0, 0.0),
    infinite: Infinite | None = None,
    guard: bool = True,
    device: str | torch.device = "cpu",
    **options: Any,
) -> Case:
    """Builds one problem; the same arguments give the same problem.

    Args:
        seed: Draws values, strides and upstream gradient.
        heads: How many heads of each kind.
        dims: Head dims of teacher and indexer.
        dtypes: Dtypes of teacher and indexer.
        weight_dtype: Dtype of ``index_w``; ``None`` for a call without weights.
        batch: Batch size; 1 for packed sequences.
        tokens: Queries and keys of a batch element, or of all packed sequences and the tokens past them.
        cu_seqlens: Starts of packed queries and keys.
        teacher_lse: Whether the call is given one.
        teacher_rest: Whether the call is given one.
        row_weight: ``[B, Nq]`` or ``[B, 1, Nq]``, packed ``[Tq]`` or ``[1, Tq]``.
        wanted: The names of the tensors that want a gradient; ``index_w`` only if it is given.
        spread: Approximate standard deviations of teacher logits and index scores.
        offset: Added to the first element of each query and key.
        infinite: A token that is infinite.
        guard: Puts the tensors into larger ones filled with nan, with random strides.
        device: Where the tensors live; their values do not depend on it.
        options: Keyword arguments of ``indexer_kl``.

    Examples:
        >>> from streamkl.testing import check_accuracy, make_indexer_case
        >>> check_accuracy(make_indexer_case(3), backend="tiled").worst <= 1
        True
    """
    (nq, nk), packed = tokens, cu_seqlens is not None
    shapes = {
        "teacher_q": (batch, heads.teacher, nq, dims[0]),
        "teacher_k": (batch, heads.teacher_kv, nk, dims[0]),
        "index_q": (batch, heads.indexer, nq, dims[1]),
        "index_k": (batch, 1, nk, dims[1]),
    }
    rng = torch.Generator().manual_seed(seed)
    values = draw_values(rng, shapes, dtypes, spread, offset)
    make_infinite(values, infinite)
    weight = torch.randn(batch, nq, heads.indexer, generator=rng) * heads.indexer**-0.5
    options, allowed, dead = mask_options(seed, tokens, cu_seqlens, row_weight, {"causal": True, **options})
    poison(values, allowed, dead)
    weight[:, dead] = torch.nan
    if packed:
        values = {name: x[0].transpose(0, 1) for name, x in values.items()}
        weight = weight[0]
    lse = draw_lse(values, options, dead) if teacher_lse else None
    if teacher_rest:
        options["teacher_rest"] = draw_rest(seed, values, options, dead)
    values["index_k"] = values["index_k"].squeeze(1)
    if weight_dtype is not None:
        values["index_w"] = weight.to(weight_dtype)
    wanted = tuple(name for name in wanted if name in values)
    rows = (1, nq) if packed else (batch, 1, nq)
    upstream = torch.randn(rows if options.get("reduction") == "none" else (), generator=rng)
    case = Case(seed, values, options, lse, wanted, upstream, dead, "indexer_kl", infinite)
    return place_case(case, guard, device)


def random_indexer_case(
    seed: int,
    *,
    device: str | torch.device = "cpu",
    dtypes: tuple[torch.dtype, ...] = DTYPES,
    max_tokens: int = 48,
    topk: bool | None = None,
    key_span: bool = False,
    max_heads: int = 128,
    max_batch: int = 3,
) -> Case:
    """Draws one problem of the contract of ``indexer_kl``; the same seed gives the same problem.

    Args:
        seed: Any integer.
        device: Where the tensors live; their values do not depend on it.
        dtypes: The dtypes to draw the teacher's and the indexer's from.
        max_tokens: The most queries, and keys, of a batch element or of all packed sequences together.
        topk: Whether keys are selected; drawn if not given.
        key_span: Whether a key stands for several tokens.
        max_heads: The most heads of the teacher, and index heads.
        max_batch: The most batch elements.

    Examples:
        >>> from streamkl.testing import check_accuracy, random_indexer_case
        >>> check_accuracy(random_indexer_case(3), backend="tiled").worst <= 1
        True
    """
    rng = random.Random(seed)
    drawn: dict[str, Any] = {}
    teacher_dtype = rng.choice(dtypes)
    index_dtype = teacher_dtype if rng.random() < 0.7 else rng.choice(dtypes)
    drawn["dtypes"] = (teacher_dtype, index_dtype)
    drawn["weight_dtype"] = rng.choice((None, torch.float32, index_dtype))
    wide = rng.random() < 0.1
    teachers = [heads for heads in (WIDE_TEACHERS if wide else TEACHERS) if heads[0] <= max_heads] or TEACHERS[:1]
    drawn["heads"] = IndexerHeads(*rng.choice(teachers), rng.choice([n for n in INDEX_HEADS if n <= max_heads]))
    drawn["dims"] = (rng.choice(TEACHER_DIMS), rng.choice(INDEX_DIMS))
    max_tokens = min(max_tokens, 10 if wide else 20) if wide or drawn["heads"].indexer > 16 else max_tokens
    packed = rng.random() < 0.35
    batch = drawn["batch"] = 1 if packed else min(rng.choice((1, 1, 2, 3)), max_batch)
    if packed:
        drawn["tokens"], drawn["cu_seqlens"] = draw_sequences(rng, max_tokens)
    else:
        nq = rng.choice((0, 1, 2)) if rng.random() < 0.1 else rng.randint(3, max_tokens)
        nk = nq if rng.random() < 0.5 else rng.randint(0 if rng.random() < 0.1 else 1, max_tokens)
        drawn["tokens"] = (nq, nk)
    drawn["causal"] = rng.random() < 0.7
    drawn["window"] = draw_window(rng, max_tokens)
    if key_span:
        draw_key_span(seed, drawn)
    drawn["teacher_lse"] = rng.random() < 0.65
    if rng.random() < 0.4:
        drawn["row_weight"] = draw_row_weight(rng, batch, 1, drawn["tokens"][0], packed, index_dtype)
    drawn["teacher_rest"] = random.Random(f"rest {seed}").random() < REST
    for name in ("teacher_scale", "index_scale"):
        drawn[name] = None if rng.random() < 0.6 else rng.choice((0.05, 0.3, 1.0))
    drawn["spread"] = (rng.choice((0.3, 1.0, 3.0)), rng.choice((0.3, 1.0, 3.0)))
    drawn["offset"] = (rng.choice((0, 0, 0, 2, 8)), rng.choice((0, 0, 0, 1, 3)))
    drawn["activation"] = None if rng.random() < 0.3 else "relu"
    drawn["reduction"] = rng.choice(("mean", "sum", "none"))
    drawn["wanted"] = INDEX if rng.random() < 0.8 else (rng.choice(INDEX[:2]),)
    if topk or (topk is None and rng.random() < 0.4):
        topk_heads = rng.choice((None, 1))
        drawn["topk_indices"] = draw_topk(rng, batch, topk_heads, drawn["tokens"], drawn.get("cu_seqlens"))
    if rng.random() < INFINITE:
        infinite = drawn["infinite"] = draw_infinite(rng, "teacher", "index", drawn["tokens"])
        promised = infinite is not None and (infinite.name, infinite.value) == ("teacher_k", -torch.inf)
        drawn["wanted"] = drawn["wanted"] if promised else ()
    return make_indexer_case(seed, device=device, **drawn)
