"""Checks of ``sparse_attention`` and of selections: the accuracy rule, and the order of keys up to rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from streamkl import reference
from streamkl.sparse import index_topk, oracle_topk, sparse_attention
from streamkl.testing.accuracy import Errors
from streamkl.testing.sparse_cases import SparseCase, count_query_blocks

EAGER_RUNS = 8
"""The number of head dim orders in which float32 products are computed: a single one may be exact by luck."""


def check_sparse_attention(case: SparseCase, backend: str = "auto") -> Errors:
    """Runs a case on an engine and holds it to the accuracy rule.

    Args:
        case: From `random_sparse_case`.
        backend: The engine.

    Returns:
        Error and bound; the engine passes if ``worst <= 1``.
    """
    options: dict[str, Any] = {"query_block": case.query_block, "scale": case.scale, **case.mask}
    out = sparse_attention(case.q, case.k, case.v, case.indices, backend=backend, **options)  # type: ignore[arg-type]
    tensors = case.clean()
    exact = _definition(case, case.clean(torch.float64), options)
    if out.shape != exact.shape or out.dtype != case.q.dtype:
        raise AssertionError(f"{list(out.shape)} of {out.dtype}, not {list(exact.shape)} of {case.q.dtype}: {case}")
    scale = 1.0
    if case.q.dtype == torch.float64:  # eager is the reference there: its float64 error is estimated in float32
        tensors = case.clean(torch.float32)
        scale = 2 * torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    wanted = _definition(case, [x.double() for x in tensors], options)
    runs = EAGER_RUNS if tensors[0].dtype == torch.float32 else 1
    eager = max(_largest(_eager(case, tensors, run, options) - wanted) for run in range(runs))
    info = torch.finfo(out.dtype)
    rounding = info.eps * max(_largest(exact), info.smallest_normal)
    return Errors({"out": _largest(out - exact)}, {"out": 2 * scale * eager + rounding})


def _eager(case: SparseCase, tensors: list[Tensor], run: int, options: dict[str, Any]) -> Tensor:
    """The eager output; after the first run with head dims in another order, so that float32 sums round differently."""
    q, k, v = tensors
    rng = torch.Generator().manual_seed(case.seed + run)
    order = torch.randperm(q.shape[-1], generator=rng) if run else torch.arange(q.shape[-1])
    return _definition(case, [q[..., order], k[..., order], v], options)


def _definition(case: SparseCase, tensors: list[Tensor], options: dict[str, Any]) -> Tensor:
    q, k, v = tensors
    return reference.sparse_attention(q, k, v, case.indices, **options)


def check_index_topk(case: SparseCase, backend: str = "auto") -> None:
    """Raises an ``AssertionError`` unless `index_topk` selects exactly the keys of the definition, in its order."""
    found = _index_topk(case, backend, normalise=False)
    expected = ranked(block_scores(case, _index_scores(case, torch.float64)), case.topk)
    if not torch.equal(found, expected):
        raise AssertionError(f"not the keys of the definition: {case}\n{found.tolist()}\n{expected.tolist()}")


def check_normalised_topk(case: SparseCase, backend: str = "auto") -> None:
    """Raises an ``AssertionError`` unless `index_topk` selects the highest log-probabilities, up to rounding.

    A per-query top-k must be exactly that of the scores.
    """
    if case.query_block == 1:
        if not torch.equal(_index_topk(case, backend, True), _index_topk(case, backend, False)):
            raise AssertionError(f"normalising changes a per-query top-k: {case}")
        return
    allowed = case.allowed()

    def scores(dtype: torch.dtype) -> Tensor:
        return reference.log_softmax(_index_scores(case, dtype), allowed).double()

    _check_order(case, _index_topk(case, backend, normalise=True), scores)


def check_oracle_topk(case: SparseCase, backend: str = "auto") -> None:
    """Raises an ``AssertionError`` unless `oracle_topk` selects the keys of the most attention, up to rounding."""
    found = oracle_topk(
        case.q, case.k, topk=case.topk, query_block=case.query_block, scale=case.scale, **case.mask,
        backend=backend,  # type: ignore[arg-type]
    )  # fmt: skip
    allowed = case.allowed()

    def scores(dtype: torch.dtype) -> Tensor:
        q, k = (x.transpose(0, 1)[None] if case.packed else x for x in case.clean(dtype)[:2])
        p = reference.log_softmax(reference.logits(q, k, case.scale), allowed).exp()
        return p.mean(1).double()

    _check_order(case, found if not case.packed else found[None], scores)


def _index_topk(case: SparseCase, backend: str, normalise: bool) -> Tensor:
    """The result of `index_topk`, ``[B, query_blocks, topk]``."""
    found = index_topk(
        *case.index, topk=case.topk, query_block=case.query_block, normalise=normalise, activation=case.activation,
        index_scale=0.25, **case.mask, backend=backend,  # type: ignore[arg-type]
    )  # fmt: skip
    return found if not case.packed else found[None]


def _index_scores(case: SparseCase, dtype: torch.dtype) -> Tensor:
    """The scores ``[B, Nq, Nk]`` by definition, before the mask."""
    q, k, w = (None if x is None else x.to(dtype) for x in case.index)
    assert q is not None
    assert k is not None
    if case.packed:
        q, k, w = q.transpose(0, 1)[None], k[None], None if w is None else w[None]
    return reference.index_logits(q, k, w, 0.25, case.activation)[:, 0]


def _check_order(case: SparseCase, found: Tensor, scores: Callable[[torch.dtype], Tensor]) -> None:
    """Raises an ``AssertionError`` unless the keys of the highest ``scores [B, Nq, Nk]`` are found, up to rounding.

    Scores may err twice as much as eager's do in float32, plus one rounding; keys whose scores are closer than that may
    change places.
    """
    found = found.long()
    exact = block_scores(case, scores(torch.float64))
    seen = exact > -torch.inf
    difference = block_scores(case, scores(torch.float32)) - exact
    error = _largest(torch.where(seen & exact.isfinite(), difference, 0.0).nan_to_num(0.0))
    eps = torch.finfo(torch.float32).eps
    error = 2 * error + eps * _largest(torch.where(exact.isfinite(), exact, 0.0))
    is_key = found >= 0
    if not torch.equal(is_key.sum(-1), seen.sum(-1).clamp(max=case.topk)):
        raise AssertionError(f"too few keys are selected: {case}")
    if exact.shape[-1] == 0:
        return
    if not (is_key.cumprod(-1) == is_key).all():
        raise AssertionError(f"a key comes after -1: {case}")
    at = torch.where(is_key, found, exact.shape[-1])
    times = torch.zeros(*exact.shape[:-1], exact.shape[-1] + 1).scatter_add_(-1, at, torch.ones(at.shape))
    times = times[..., :-1]
    if (times > 1).any() or (times[~seen] > 0).any():
        raise AssertionError(f"a key is selected twice, or is seen by no row: {case}")
    values = exact.gather(-1, found.clamp(min=0)).masked_fill(~is_key, -torch.inf)
    falls = torch.where(is_key[..., 1:], values[..., 1:] - values[..., :-1], 0.0).nan_to_num(0.0)
    best_left = exact.masked_fill(times > 0, -torch.inf).amax(-1)
    least = values.masked_fill(~is_key, torch.inf).amin(-1)
    if (falls > 2 * error).any() or (best_left > least + 2 * error).any():
        raise AssertionError(f"a key comes before one of a higher score: {case}")
    own = values == torch.inf
    if (torch.where(own[..., 1:], found[..., 1:] - found[..., :-1], 1) != 1).any():
        raise AssertionError(f"the keys on the diagonal are not by rising index: {case}")


def block_scores(case: SparseCase, scores: Tensor) -> Tensor:
    """``[B, query_blocks, keys]`` from ``[B, Nq, Nk]``: the highest score per query block, ``-inf`` for unseen keys.

    Keys are counted from the first of their sequence. If ``query_block > 1``, those on the diagonal have ``inf``.
    """
    allowed, (starts_q, starts_k) = case.allowed(), case.starts()
    scores = scores.masked_fill(~allowed, -torch.inf)
    nk = scores.shape[-1]
    rows = []
    for n in range(len(starts_q) - 1):
        keys = slice(starts_k[n], starts_k[n + 1])
        k_len, shift = starts_k[n + 1] - starts_k[n], (starts_k[n + 1] - starts_k[n]) - (starts_q[n + 1] - starts_q[n])
        for i in range(starts_q[n], starts_q[n + 1], case.query_block):
            end = min(i + case.query_block, starts_q[n + 1])
            row = scores.new_full((scores.shape[0], nk), -torch.inf)
            row[:, :k_len] = scores[:, i:end, keys].amax(1)
            for on in range(i - starts_q[n] + shift, end - starts_q[n] + shift) if case.query_block > 1 else ():
                if on >= 0:
                    row[:, on] = torch.inf
            rows.append(row)
    past = count_query_blocks(scores.shape[1] - starts_q[-1], case.query_block, None)
    rows += [scores.new_full((scores.shape[0], nk), -torch.inf)] * past
    return torch.stack(rows, 1) if rows else scores.new_zeros(scores.shape[0], 0, nk)


def ranked(scores: Tensor, topk: int) -> Tensor:
    """``[B, query_blocks, topk]`` by definition: the highest score first, then the lowest key; -1 for none."""
    values, keys = scores.sort(dim=-1, descending=True, stable=True)
    keys = keys.masked_fill(values == -torch.inf, -1)[..., :topk].int()
    return torch.nn.functional.pad(keys, (0, topk - keys.shape[-1]), value=-1)


def _largest(x: Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0
