"""Checks of ``sparse_attention`` and of selections: the accuracy rule, and the order of keys up to rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from streamkl import reference
from streamkl.sparse import index_topk, oracle_topk, sparse_attention
from streamkl.testing.accuracy import Errors
from streamkl.testing.sparse_cases import SparseCase, count_query_blocks

EAGER_RUNS, MOST_EAGER_RUNS = 8, 64
"""The least and the most problems that eager's error in float32 is measured with: one may be exact by luck."""

EAGER_ROWS = 512
"""The number of rows, of all runs together, whose largest eager error counts: a case of few rows is run more often."""


def check_sparse_attention(case: SparseCase, backend: str = "auto", gradients: bool = True) -> Errors:
    """Runs a case on an engine, forward and backward, and holds it to the accuracy rule.

    Args:
        case: From `random_sparse_case`.
        backend: The engine.
        gradients: Whether gradients are wanted; a forward without them may be another.

    Returns:
        Errors and bounds of the output, of its log-sum-exp and of the gradients; the engine passes if ``worst <= 1``.
    """
    options: dict[str, Any] = {"query_block": case.query_block, "scale": case.scale, **case.mask, "return_lse": True}
    upstream = case.upstream()
    if gradients:
        ours = _run(case.tensors, case, {**options, "backend": backend}, upstream)
    else:
        out, lse = sparse_attention(*case.tensors[:3], case.indices, **options, sink=case.sink, backend=backend)  # type: ignore[arg-type]
        ours = {"out": out, "lse": lse}
    return _errors(case, ours, options, upstream)


def check_paged_attention(case: SparseCase, backend: str = "auto") -> Errors:
    """Runs a case whose keys and values lie in pages, forward, and holds it to the same rule."""
    case = case.as_packed()
    options: dict[str, Any] = {"query_block": case.query_block, "scale": case.scale, **case.mask, "return_lse": True}
    k, v, page_table = case.pages()
    indices = torch.where(case.indices < page_table.shape[1] * k.shape[1], case.indices, -1)  # no sequence has others
    out, lse = sparse_attention(
        case.q, k, v, indices, **options, page_table=page_table, sink=case.sink, backend=backend,  # type: ignore[arg-type]
    )  # fmt: skip
    return _errors(case, {"out": out, "lse": lse}, options, case.upstream())


def _errors(case: SparseCase, ours: dict[str, Tensor], options: dict[str, Any], upstream: Tensor) -> Errors:
    """Errors and bounds of results by name."""
    tensors, clean = case.clean(), torch.where(upstream.isnan(), 0.0, upstream)
    options = {**options, "backend": "reference"}
    exact = _run(case.clean(torch.float64), case, options, clean)
    for name, value in ours.items():
        dtype = torch.promote_types(case.q.dtype, torch.float32) if name == "lse" else case.q.dtype
        if value.shape != exact[name].shape or value.dtype != dtype:
            raise AssertionError(
                f"{name} is {list(value.shape)} of {value.dtype}, not {list(exact[name].shape)} of {dtype}: {case}"
            )
    scale = 1.0
    if case.q.dtype == torch.float64:  # eager is the reference there: its float64 error is estimated in float32
        tensors = case.clean(torch.float32)
        scale = 2 * torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    rows = int((~upstream.isnan()).any(-1).sum())
    fewest = EAGER_RUNS if tensors[0].dtype == torch.float32 else 1  # float32 may be exact by luck in many rows, too
    runs = max(fewest, min(MOST_EAGER_RUNS, EAGER_ROWS // max(1, rows)))
    error = {name: _difference(value, exact[name]) for name, value in ours.items()}
    least = {name: _rounding(value, exact[name]) for name, value in ours.items()}
    eager, errors = dict.fromkeys(ours, 0.0), Errors(error, least)
    for run in range(runs):  # until the rule holds: each run can only allow more
        found = _eager_errors(case, _neighbour(tensors, case.seed + run) if run else tensors, options, clean)
        eager = {name: max(error, found[name]) for name, error in eager.items()}
        errors = Errors(error, {name: 2 * scale * eager[name] + least[name] for name in error})
        if errors.worst <= 1:
            break
    return errors


def _run(tensors: Iterable[Tensor], case: SparseCase, options: dict[str, Any], upstream: Tensor) -> dict[str, Tensor]:
    """The output of sparse attention, its log-sum-exp and its gradients, by name."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    q, k, v, *sink = leaves
    out, lse = sparse_attention(q, k, v, case.indices, sink=sink[0] if sink else None, **options)
    gradients = torch.autograd.grad(out, leaves, upstream.to(out.dtype))
    return {"out": out.detach(), "lse": lse, **dict(zip(("d_q", "d_k", "d_v", "d_sink"), gradients, strict=False))}


def _eager_errors(
    case: SparseCase, tensors: list[Tensor], options: dict[str, Any], upstream: Tensor
) -> dict[str, float]:
    """The errors of eager with a case's selection and these tensors."""
    exact = _run([x.double() for x in tensors], case, options, upstream)
    return {name: _difference(value, exact[name]) for name, value in _run(tensors, case, options, upstream).items()}


def _neighbour(tensors: list[Tensor], seed: int) -> list[Tensor]:
    """Tensors that are smaller by up to a 32nd: a problem like the first one, in which all sums round apart."""
    rng = torch.Generator().manual_seed(seed)
    return [x * (1 - torch.rand((), generator=rng).item() / 32) for x in tensors]


def _rounding(value: Tensor, exact: Tensor) -> float:
    """One rounding of the largest finite number of an output."""
    info, finite = torch.finfo(value.dtype), torch.where(exact == -torch.inf, 0.0, exact)  # the LSE of a dead row
    return info.eps * max(_largest(finite), info.smallest_normal)


def _difference(value: Tensor, exact: Tensor) -> float:
    """The largest error; infinite numbers must be the same."""
    same = value.double() == exact
    return _largest(torch.where(same, 0.0, value.double() - exact))


def check_index_topk(case: SparseCase, backend: str = "auto") -> None:
    """Raises an ``AssertionError`` unless `index_topk` selects exactly the keys of the definition, in its order.

    Unsorted they are the same keys, and those that are none still come last.
    """
    found = _index_topk(case, backend, normalise=False)
    expected = ranked(block_scores(case, _index_scores(case, torch.float64)), case.topk)
    if not torch.equal(found, expected):
        raise AssertionError(f"not the keys of the definition: {case}\n{found.tolist()}\n{expected.tolist()}")
    unsorted = _index_topk(case, backend, normalise=False, sort=False)
    same = torch.equal(unsorted.sort(-1).values, expected.sort(-1).values) and torch.equal(unsorted < 0, expected < 0)
    if not same:
        raise AssertionError(f"other keys without sorting: {case}\n{unsorted.tolist()}\n{expected.tolist()}")


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


def _index_topk(case: SparseCase, backend: str, normalise: bool, sort: bool = True) -> Tensor:
    """The result of `index_topk`, ``[B, query_blocks, topk]``."""
    found = index_topk(
        *case.index, topk=case.topk, query_block=case.query_block, normalise=normalise, sort=sort,
        activation=case.activation, index_scale=0.25, **case.mask, backend=backend,  # type: ignore[arg-type]
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
