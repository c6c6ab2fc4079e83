"""HY-V4 and gpt-oss: attention sinks in sparse and in dense attention, against transformers' eager attention."""

import copy

import pytest
import torch
from torch import Tensor

import streamkl.integrations.transformers as skl
from streamkl.distillation import attention as distill_attention
from streamkl.sparse import AttentionCall, IndexerSelector, OracleSelector
from streamkl.testing.causal_models import tiny_causal_model
from streamkl.testing.tiny_models import OWN_INDEXERS, tiny_model, tokens

TOKENS, BLOCK = 24, 4
hy_v4 = pytest.mark.skipif("hy_v4" not in OWN_INDEXERS, reason="this version of transformers has no HY-V4")


@pytest.fixture
def model():
    """A tiny model in float64 whose sinks weigh as much as several keys."""
    model = tiny_model("hy_v4").double()
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            parameter.data += 1.5
    return model


def check(got: Tensor, wanted: Tensor) -> None:
    """Holds logits to others: norms and the scores of transformers' indexers are in float32."""
    torch.testing.assert_close(got, wanted, rtol=0, atol=2e-4)


@hy_v4
@torch.no_grad()
def test_by_its_own_indexers_and_with_all_keys_it_is_the_model_of_transformers(model) -> None:
    ids = tokens(2, TOKENS)
    own, sinkless = model(ids).logits, copy.deepcopy(model)
    for name, parameter in sinkless.named_parameters():
        if name.endswith("sinks"):
            parameter.data -= 100
    assert (sinkless(ids).logits - own).abs().max() > 0.1, "sinks make a difference"
    skl.sparsify(model)
    check(model(ids).logits, own)
    everything = tiny_model("hy_v4", index_topk=TOKENS).double()
    everything.load_state_dict(model.state_dict())
    dense = everything(ids).logits
    assert (dense - own).abs().max() > 0.1, "fewer keys make a difference"
    for selector in (OracleSelector(TOKENS, BLOCK), OracleSelector(TOKENS, 1), IndexerSelector(TOKENS, BLOCK)):
        skl.sparsify(model, selector)
        check(model(ids).logits, dense)
    model.set_attn_implementation("streamkl_dense")
    check(model(ids).logits, dense)


@hy_v4
@pytest.mark.parametrize("implementation", ["streamkl_sparse", "streamkl_dense"])
@torch.no_grad()
def test_padded_packed_and_chunked_calls_are_the_plain_call(model, implementation) -> None:
    rows = [tokens(15, seed=2), tokens(TOKENS)]
    skl.sparsify(model, IndexerSelector(6, BLOCK))
    model.set_attn_implementation(implementation)
    alone = [model(row[None], use_cache=False).logits[0] for row in rows]
    mask = torch.zeros(2, TOKENS, dtype=torch.long)
    ids = torch.zeros_like(mask)
    for at, row in enumerate(rows):
        mask[at, TOKENS - len(row) :], ids[at, TOKENS - len(row) :] = 1, row
    padded = model(ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)).logits
    positions = torch.cat([torch.arange(len(row)) for row in rows])[None]
    packed = model(torch.cat(rows)[None], position_ids=positions, use_cache=False).logits[0]
    for got, seen, part, plain in zip(padded, mask.bool(), packed.split([15, TOKENS]), alone, strict=True):
        check(got[seen], plain)
        check(part, plain)
    first = model(rows[1][None, : 4 * BLOCK])
    rest = model(rows[1][None, 4 * BLOCK :], past_key_values=first.past_key_values).logits[0]
    check(torch.cat((first.logits[0], rest)), alone[1])


@hy_v4
def test_gradients_are_those_of_eager_attention_and_reach_the_sinks(model) -> None:
    """With all keys selected, sparse attention is eager attention; dense attention of StreamKL has none."""
    everything = tiny_model("hy_v4", index_topk=TOKENS).double()
    everything.load_state_dict(model.state_dict())
    ids = tokens(2, TOKENS)
    everything(ids, labels=ids).loss.backward()
    skl.sparsify(model, OracleSelector(TOKENS, BLOCK))
    model(ids, labels=ids).loss.backward()
    wanted = {name: weight.grad for name, weight in everything.named_parameters() if weight.grad is not None}
    found = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    assert found.keys() == wanted.keys()
    assert sum(name.endswith("sinks") for name in found) > 0
    for name, grad in found.items():
        torch.testing.assert_close(grad, wanted[name], rtol=0, atol=1e-5 * float(wanted[name].abs().max()), msg=name)
    model.set_attn_implementation("streamkl_dense")
    with pytest.raises(ValueError, match="dense attention with sinks has no gradients under streamkl_dense"):
        model(ids)


def gpt_oss():
    """A tiny gpt-oss: a layer with a window, one without, sinks that weigh as much as several keys."""
    model = tiny_causal_model("gpt_oss", sliding_window=7, layer_types=["sliding_attention", "full_attention"])
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            parameter.data += 1.5
    return model


@torch.no_grad()
def test_a_decoder_without_a_file_may_have_sinks_in_layers_that_see_all_keys_and_in_windows() -> None:
    """Padded sequences are those without padding, and tokens with a cache those of the whole prompt."""
    model = gpt_oss()
    ids = tokens(2, TOKENS)
    dense = model(ids).logits
    skl.sparsify(model, OracleSelector(TOKENS, BLOCK))
    check(model(ids).logits, dense)
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    padded = model(ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)).logits
    check(padded[1, 9:], model(ids[1:, 9:]).logits[0])
    first = model(ids[:, :15])
    rest = model(ids[:, 15:], past_key_values=first.past_key_values).logits
    check(torch.cat((first.logits, rest), 1), dense)
    model.set_attn_implementation("streamkl_dense")
    check(model(ids).logits, dense)


def test_sinks_in_windows_and_beside_all_keys_learn_as_in_eager_attention() -> None:
    model, ids = gpt_oss(), tokens(2, TOKENS)
    model(ids, labels=ids).loss.backward()
    wanted = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    skl.sparsify(model, OracleSelector(TOKENS, BLOCK))
    model(ids, labels=ids).loss.backward()
    found = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    assert found.keys() == wanted.keys()
    assert sum(name.endswith("sinks") for name in found) == 2
    for name, grad in found.items():
        torch.testing.assert_close(grad, wanted[name], rtol=0, atol=1e-4 * float(wanted[name].abs().max()), msg=name)


@torch.no_grad()
def test_a_frozen_teacher_with_sinks_has_the_hidden_states_of_eager_attention() -> None:
    model, ids = gpt_oss(), tokens(2, TOKENS)
    wanted = model.model(ids, use_cache=False)[0]
    distill_attention.register()
    model.set_attn_implementation(distill_attention.NAME)
    torch.testing.assert_close(model.model(ids, use_cache=False)[0], wanted, rtol=0, atol=1e-5)


@torch.no_grad()
def test_the_oracle_weighs_heads_by_their_attention_to_keys() -> None:
    """Of two heads one attends to its sink alone: the other's keys are the best."""
    q, k = torch.randn(1, 2, 16, 8), torch.randn(1, 2, 16, 8)
    rest = torch.tensor([30.0, -30.0])[None, :, None].expand(1, 2, 16)
    with_sinks = OracleSelector(3, 1).select(AttentionCall(q, k, rest=rest))
    assert torch.equal(with_sinks, OracleSelector(3, 1).select(AttentionCall(q[:, 1:], k[:, 1:])))


@pytest.mark.skipif("glm5_next" not in OWN_INDEXERS, reason="this version of transformers has no GLM-5.3")
def test_what_cannot_be_gathered_is_refused_in_a_sentence() -> None:
    with pytest.raises(
        ValueError,
        match="glm5_next cannot be made sparse: it builds the mask of its attention from the selected keys, and none "
        "can be gathered in its place",
    ):
        skl.sparsify(tiny_model("glm5_next"), OracleSelector(8, 4))
