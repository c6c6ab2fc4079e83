"""Indexers to train for a frozen model: with random weights, with weights made of the teacher's, or trained ones."""

from __future__ import annotations

import sys
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from streamkl.distillation.settings import INITS, Settings
from streamkl.distillation.teacher import is_sharded
from streamkl.indexer import HeadIndexer, Indexer, LightningIndexer
from streamkl.integrations.saved.description import describe_indexer
from streamkl.integrations.transformers.families import Family, GroupedQuery
from streamkl.integrations.transformers.indexers import Indexers, load_indexers

MADE_BY = ("heads", "head_dim", "activation", "temperature")
"""Settings of new indexers."""


def make_indexers(backbone: Any, family: Family, settings: Settings) -> Indexers:
    """An indexer per layer that sees all keys: the model's own where it has them, those of a folder, else new ones.

    They are in float32, for the optimizer, or in float64 if the model is; other weights of the model keep their dtype.

    The same seed gives the same weights. Attention modules that share the top-k of another layer have none.

    Raises:
        ValueError: No layer of the model sees all keys, the folder is not whole or of another model, or settings of new
            indexers are given for a model that has its own, or with a folder.
    """
    chosen = _chosen(settings)
    if not isinstance(family, GroupedQuery):
        refused = [*chosen, *(["init"] if settings.init == "teacher" else [])]
        if refused:
            raise ValueError(f"a {family.name} model has indexers of its own: {', '.join(refused)} cannot be chosen")
    dtype = torch.promote_types(next(backbone.parameters()).dtype, torch.float32)
    if settings.init not in INITS:
        trained, _ = load_indexers(settings.init, backbone)
        found = describe_indexer(next(iter(trained.values())))
        for name, value in chosen.items():
            if (found[name] or "none") != value:
                raise ValueError(f"the indexers of {settings.init} have {name} = {found[name]}: got {value}")
        return trained.to(dtype)
    indexers = Indexers()
    generator = torch.Generator().manual_seed(settings.seed)
    for number, attention in sorted(family.attentions(backbone).items()):
        if not family.is_global(attention):
            continue
        if isinstance(family, GroupedQuery):
            indexers[str(number)] = _new(family, attention, settings, generator).to(dtype)
        elif (own := family.indexer(attention)) is not None:
            indexers[str(number)] = own.to(dtype)
    if not indexers:
        raise ValueError(
            f"no layer of this {backbone.config.model_type} model attends to all keys: there is nothing to distill"
        )
    return indexers


def _chosen(settings: Settings) -> dict[str, Any]:
    """The settings of new indexers that are not the defaults."""
    defaults = {f.name: f.default for f in fields(Settings)}
    return {name: getattr(settings, name) for name in MADE_BY if getattr(settings, name) != defaults[name]}


def _new(family: GroupedQuery, attention: Any, settings: Settings, generator: torch.Generator) -> Indexer:
    """One indexer, with random weights drawn in float32 on the CPU, for any dtype and device of the model."""
    activation = None if settings.activation == "none" else "relu"
    indexer = family.new_indexer(attention, settings.head_dim, activation, settings.heads, settings.temperature)
    for parameter in indexer.parameters():
        if parameter.dim() == 2:
            bound = parameter.shape[1] ** -0.5  # as nn.Linear does, with our own generator
            with torch.no_grad():
                parameter.uniform_(-bound, bound, generator=generator)
    if settings.init == "teacher":
        _take_over(indexer, attention)
    return indexer


@torch.no_grad()
def _take_over(indexer: Indexer, attention: Any) -> None:
    """Sets the indexer's maps so that its product is near the mean of the teacher's heads'.

    A frequency of RoPE turns two dims of a head, which are one complex number. Before rotation the teacher's mean
    product is, for a frequency, ``conj(x) M x`` with ``M`` the mean over heads of ``q_h^H k_h``, of rank ``H`` at most,
    and an index head's is the same with a matrix of rank 1. The best one is that of the largest singular value.
    Several index heads share one key, the best for all, and each takes the query map of its own part of the heads.
    """
    if not hasattr(attention, "q_proj") or not hasattr(attention, "k_proj"):
        raise ValueError("init='teacher' needs maps of queries and keys, q_proj and k_proj: use init='plain'")
    head_dim, rope = attention.head_dim, indexer.rope_dim
    if rope != indexer.head_dim or rope != head_dim:
        raise ValueError(
            f"init='teacher' needs index heads of the teacher's width, all of it rotated, {head_dim}: "
            f"got {indexer.head_dim} with {rope} rotated"
        )
    rotate = getattr(sys.modules[type(attention).__module__], "rotate_half", None)
    if rotate is None or rotate(torch.arange(4)).tolist() != [-2, -3, 0, 1]:
        raise ValueError("init='teacher' needs heads that are rotated in halves: use init='plain'")
    q = _planes(attention.q_proj.weight, head_dim)  # [H, head_dim/2, hidden], complex
    k = _planes(attention.k_proj.weight, head_dim)
    k = k.repeat_interleave(len(q) // len(k), 0)
    heads = indexer.heads if isinstance(indexer, LightningIndexer) else 1
    left, size, right = _best(q, k)
    query_maps = []
    for part in torch.arange(len(q), device=q.device).tensor_split(heads):
        if heads == 1:
            query_maps.append(left * size[:, None])
        else:  # the query map that, with the shared key, is nearest to the product of these heads
            inner = torch.einsum("hfd,fd->hf", k[part], right.conj())
            query_maps.append(torch.einsum("hfd,hf->fd", q[part], inner.conj()) / len(part))
    maps = torch.cat([_rows(m) for m in query_maps])
    # The key's LayerNorm gives it a norm of sqrt(head_dim), in place of what it has on hidden states of variance 1.
    key_map = _rows(right)
    maps *= (key_map.norm() / head_dim**0.5).clamp(min=1e-6)
    if isinstance(indexer, LightningIndexer):
        indexer.wq_b.weight.copy_(maps)
    else:
        assert isinstance(indexer, HeadIndexer), "there are two kinds"
        indexer.wq.weight.copy_(maps)
    wk: nn.Linear = indexer.wk  # pyright: ignore[reportAssignmentType]
    wk.weight.copy_(key_map)


def _best(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The first singular vectors and value per frequency of the mean over heads of ``q_h^H k_h``.

    ``q`` and ``k`` are ``[H, frequencies, hidden]``; their products have rank ``H``, so small matrices are enough.
    """
    lefts, sizes, rights = [], [], []
    for a, b in zip(q.unbind(1), k.unbind(1), strict=True):  # [H, hidden]
        qa, ra = torch.linalg.qr(a.conj().mT)  # a^H = qa ra
        qb, rb = torch.linalg.qr(b.conj().mT)
        u, s, vh = torch.linalg.svd(ra @ rb.conj().mT / len(a))  # a^H b = qa (ra rb^H) qb^H
        lefts.append((qa @ u[:, :1])[:, 0].conj())
        sizes.append(s[0])
        rights.append((vh[:1] @ qb.conj().mT)[0])
    return torch.stack(lefts), torch.stack(sizes), torch.stack(rights)


def _planes(weight: Tensor, head_dim: int) -> Tensor:
    """Rows of heads, rotated in halves, as complex ones: ``[H * head_dim, hidden]`` to ``[H, head_dim/2, hidden]``."""
    if is_sharded(weight):
        weight = weight.full_tensor()  # pyright: ignore[reportAttributeAccessIssue]
    first, second = weight.detach().float().cpu().unflatten(0, (-1, 2, head_dim // 2)).unbind(1)
    return torch.complex(first, second)


def _rows(planes: Tensor) -> Tensor:
    """The inverse for one head: ``[head_dim/2, hidden]`` to ``[head_dim, hidden]``."""
    return torch.cat((planes.real, planes.imag))
