"""Families with indexers of their own: their losses and gradients are those of the matrices, on each family."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface

from streamkl.distillation import attention
from streamkl.distillation.indexers import make_indexers
from streamkl.distillation.model import Distiller
from streamkl.distillation.settings import Settings
from streamkl.integrations.transformers.families import family_of
from streamkl.testing.tiny_models import OWN_INDEXERS, tiny_config, tiny_model, tokens

TOKENS = 26
KEYS = {"minimax_m3_vl": 12, "deepseek_v4": 3, "glm5_next": 9, "qwen4_exp": 9}
"""How many keys a query of a tiny model selects, of others 6."""


class Scored(NamedTuple):
    """An indexer's scores ``[B, groups, N, keys]``, which of them a query sees, and which it selects.

    ``pooled`` is how the attention to a key's tokens is made one number, where it stands for several.
    """

    scores: Tensor
    seen: Tensor
    selected: Tensor
    pooled: Callable[..., Tensor] = torch.sum


class Attention(NamedTuple):
    """The arguments of an attention function, and its output."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    sinks: Tensor | None
    window: int | None
    out: Tensor


@pytest.fixture(autouse=True)
def _float64_all_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms, scores and some softmaxes of transformers are in float32 in any dtype."""
    narrow, softmax = torch.Tensor.float, torch.Tensor.softmax

    def wide_softmax(x: Tensor, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor:
        return softmax(x, *args, dtype=None if x.dtype == torch.float64 else dtype, **kwargs)

    monkeypatch.setattr(torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else narrow(x))
    monkeypatch.setattr(torch.Tensor, "softmax", wide_softmax)


def distiller(family: str, **options: Any) -> Distiller:
    """A tiny model in float64, and what learns from it."""
    model = tiny_model(family).double()
    of = family_of(model.config)
    return Distiller(model, of, make_indexers(model, of, Settings(model="m", text=["t"], output="o")), **options)


def recorded(
    model: Distiller, ids: Tensor, monkeypatch: pytest.MonkeyPatch
) -> tuple[Tensor, dict[int, Attention], dict[int, dict[str, Any]]]:
    """The loss of a batch with its gradients, each layer's attention, and the arguments of each own indexer."""
    attended: dict[int, Attention] = {}
    arguments: dict[int, dict[str, Any]] = {}

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
        out = attention.distill_attention(module, q, k, v, mask, **options)
        sinks, window = options.get("s_aux"), options.get("sliding_window")
        given = Attention(q, k, v, options["scaling"], sinks, window, out[0].transpose(1, 2))
        attended[module.layer_idx] = given
        return out

    def read(number: int, own: Any, forward: Callable) -> Callable:
        signature = inspect.signature(type(own).forward)

        def reading(*args: Any, **kwargs: Any) -> Any:
            arguments[number] = dict(signature.bind(own, *args, **kwargs).arguments)
            return forward(*args, **kwargs)

        return reading

    monkeypatch.setitem(AttentionInterface._global_mapping, attention.NAME, attend)
    for layer in model.layers:
        own: Any = model.family.own(layer.module)
        own.forward = read(layer.number, own, own.forward)
    return model(ids, backward=torch.Tensor.backward)["loss"], attended, arguments


def own_scores(own: Any, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Scored:
    """What the code of transformers scores and selects, with its graph."""
    modeling, given = importlib.import_module(type(own).__module__), dict(arguments)
    hidden = given["hidden_states"]
    forward, seen = inspect.unwrap(type(own).forward), torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    if hasattr(own, "build_block_mask"):  # it pools the scores of keys before it selects
        q = own.q_norm(own.q_proj(hidden).unflatten(-1, (own.num_heads, own.head_dim))).transpose(1, 2)
        k = own.k_norm(own.k_proj(hidden))[:, None]
        tables = (table[..., : own.head_dim] for table in given["position_embeddings"])
        q, k = modeling.apply_rotary_pos_emb(q, k, *tables)
        blocks, positions = forward(**given), given["position_ids"]
        mask = own.build_block_mask(blocks, None, TOKENS, hidden.dtype, hidden.device, positions) == 0
        return Scored(q @ k.mT * own.head_dim**-0.5, seen[None, None], mask[:, :: mask.shape[1] // own.num_heads])
    scores: list[Tensor] = []
    usual = torch.Tensor.topk

    def topk(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        scores.append(x)
        return usual(x, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "topk", topk)
        if "attention_mask" in given and not isinstance(given["attention_mask"], Tensor):
            given.update(attention_mask=seen.expand(hidden.shape[0], -1, -1), past_key_values=None)
        if hasattr(own, "token_budget"):  # it scores the blocks of one query at a time, and returns a mask
            mask = forward(**{**given, "attention_mask": given["attention_mask"][:, None]})
            return _of_single_queries(scores, mask, own.compress_ratio)
        indices = forward(**given).long()
    span = getattr(own, "compress_rate", getattr(own, "index_kpool", 1))  # how many tokens a key stands for
    selected = torch.zeros(*indices.shape[:2], TOKENS + 1, dtype=torch.bool)
    selected = selected.scatter(-1, torch.where(indices < 0, TOKENS, indices), True)[..., :-1]
    keys = torch.arange(TOKENS // span)
    seen = (keys + 1) * span <= torch.arange(TOKENS)[:, None] + 1
    selected = selected[..., keys * span] if hasattr(own, "index_kpool") else selected[..., keys]  # by their tokens
    return Scored(scores[0][:, None, :, : len(keys)], seen[None, None], (selected & seen)[:, None])


def _of_single_queries(scores: list[Tensor], mask: Tensor, span: int) -> Scored:
    """From the scores of each query that sees a block, and a mask ``[B, 1, N, N]`` of keys."""
    blocks = torch.arange(TOKENS // span)
    seen = (blocks + 1) * span <= torch.arange(TOKENS)[:, None] + 1
    rows = [torch.nn.functional.pad(row, (0, len(blocks) - len(row))) for row in scores]
    rows = torch.stack(rows).unflatten(0, (len(mask), 1, -1))
    rows = torch.nn.functional.pad(rows, (0, 0, TOKENS - rows.shape[2], 0))
    return Scored(rows, seen[None, None], mask[..., blocks * span] & seen, torch.amax)


def seen_keys(given: Attention, support: Tensor) -> Tensor:
    """``[B, R, N, keys]``: which keys are attended to where ``support [B, R, N, index keys]`` are.

    If those are compressed, the keys of a window come before them. If they are pools, all of their keys are, and the
    newest ones, which make no pool yet.
    """
    tokens, pools = torch.arange(TOKENS), support.shape[-1]
    distance = tokens[:, None] - tokens
    if given.k.shape[2] > TOKENS:
        assert given.window is not None
        near = (distance >= 0) & (distance < given.window)
        return torch.cat((near.expand(*support.shape[:2], -1, -1), support), -1)
    if pools == TOKENS:
        return support
    span = TOKENS // pools
    newest = (tokens >= (tokens[:, None] + 1) // span * span) & (distance >= 0)
    pooled = torch.nn.functional.pad(support.repeat_interleave(span, -1), (0, TOKENS - pools * span))
    return pooled | newest


def probabilities(given: Attention, support: Tensor) -> Tensor:
    """``[B, H, N, keys]``: the teacher's attention where ``support`` is attended to; a sink has the rest."""
    k = given.k.repeat_interleave(given.q.shape[1] // given.k.shape[1], 1)
    support = seen_keys(given, support)
    support = support.repeat_interleave(given.q.shape[1] // support.shape[1], 1)
    logits = (given.q @ k.mT * given.scale).masked_fill(~support, -torch.inf)
    if given.sinks is not None:
        sinks = given.sinks[None, :, None, None].expand(*logits.shape[:3], 1)
        return torch.cat((logits, sinks), -1).softmax(-1)[..., :-1]
    return logits.softmax(-1)


def kl(given: Attention, scored: Scored, support: Tensor) -> Tensor:
    """The mean over rows and head groups of KL(head mean || indexer), both over ``support``."""
    groups = scored.scores.shape[1]
    live = support.any(-1).flatten(0, 1).all(0)  # the first rows may see no compressed key
    target = probabilities(given, support)[..., live, :].unflatten(1, (groups, -1)).mean(2)
    keys = support.shape[-1]
    if target.shape[-1] > TOKENS:
        target = target[..., -keys:]
    elif keys < TOKENS:
        target = target[..., : TOKENS // keys * keys].unflatten(-1, (keys, -1))
        target = scored.pooled(target, -1)
        target = target * support[..., live, :]  # the newest keys make no pool yet
    target = target / target.sum(-1, keepdim=True)
    index = scored.scores.masked_fill(~support, -torch.inf)[..., live, :].log_softmax(-1)
    return torch.where(target > 0, target * (target.clamp(min=1e-300).log() - index), 0).sum(-1).mean()


@pytest.mark.parametrize("keys", ["all", "selected"])
@pytest.mark.parametrize("family", OWN_INDEXERS)
def test_loss_and_gradients_are_those_of_the_matrices_and_all_layers_that_an_indexer_serves_teach_it(
    family: str, keys: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = distiller(family, selects=KEYS.get(family, 6) if keys == "selected" else 0)
    loss, attended, arguments = recorded(model, tokens(2, TOKENS), monkeypatch)
    expected, served = torch.zeros((), dtype=torch.float64), []
    for layer in model.layers:
        scored = own_scores(model.family.own(layer.module), arguments[layer.number], monkeypatch)
        support = scored.selected if keys == "selected" else scored.seen.expand_as(scored.selected)
        for number in layer.served:
            expected = expected + kl(attended[number], scored, support) / len(layer.served)
            v = attended[number].v
            v = v.repeat_interleave(attended[number].q.shape[1] // v.shape[1], 1)
            out = probabilities(attended[number], support) @ v
            torch.testing.assert_close(attended[number].out, out, rtol=0, atol=1e-12)
        served.append(layer.served)
    parameters = dict(model.indexers.named_parameters())
    own = [p for name, p in model.backbone.named_parameters() if ".indexer." in name]
    assert {id(p) for p in parameters.values()} == {id(p) for p in own}
    gradients = torch.autograd.grad(expected, list(parameters.values()))
    torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-12)
    for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True):
        assert gradient.abs().max() > 1e-4, name
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
    types = getattr(tiny_config(family).get_text_config(), "indexer_types", None)
    if types is not None:
        attending = [kind for n, kind in enumerate(types) if n in model.family.attentions(model.backbone)]
        assert sum(map(len, served)) == len(attending), "every layer teaches"
        assert len(served) == attending.count("full")


@pytest.mark.skipif("deepseek_v4" not in OWN_INDEXERS, reason="this version of transformers has no DeepSeek-V4")
def test_the_teacher_of_windows_compressed_keys_and_sinks_has_the_hidden_states_of_eager_attention() -> None:
    """With a budget of all compressed keys, in layers with and without an indexer."""
    ids = tokens(2, TOKENS)
    eager = tiny_model("deepseek_v4", index_topk=TOKENS).double()
    eager.set_attn_implementation("eager")
    expected = eager.base_model(input_ids=ids, use_cache=False)[0]
    model = distiller("deepseek_v4")
    torch.testing.assert_close(model._run(ids, None), expected, rtol=0, atol=1e-10)
