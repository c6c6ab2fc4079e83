"""A capture sees q and k of every layer, whatever implementation runs, and changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    BertConfig,
    BertModel,
    FalconConfig,
    FalconModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import streamkl.integrations.transformers as skl
from streamkl import attention_lse
from streamkl.integrations.transformers import capture_attention
from streamkl.integrations.transformers.checkpointing import checkpoint_activations
from streamkl.sparse import OracleSelector
from streamkl.testing.threads import in_threads
from streamkl.testing.tiny_models import GROUPED_QUERY, tiny_model, tokens

TOKENS = 13


def projections(model: Any) -> dict[int, list[torch.Tensor]]:
    """A list for the outputs of each layer's query projection, of calls to come."""
    found: dict[int, list[torch.Tensor]] = {}
    for module in model.modules():
        if hasattr(module, "q_proj"):
            kept = found.setdefault(module.layer_idx, [])
            module.q_proj.register_forward_hook(lambda m, a, out, kept=kept: kept.append(out))
    return found


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "streamkl_dense"])
@pytest.mark.parametrize("family", GROUPED_QUERY)
def test_every_layer_is_captured_under_any_implementation_and_logits_are_bit_equal(family, implementation) -> None:
    model, ids = tiny_model(family), tokens(2, TOKENS)
    if implementation.startswith("streamkl"):
        skl.sparsify(model, OracleSelector(4, 2))
    model.set_attn_implementation(implementation)
    functions = dict(AttentionInterface._global_mapping), dict(AttentionMaskInterface._global_mapping)
    plain = model(ids, use_cache=False).logits
    made = projections(model)
    with capture_attention(model) as captured:
        assert torch.equal(model(ids, use_cache=False).logits, plain)
    assert functions == (AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping)
    assert set(captured) == set(made)
    for layer, attended in captured.items():
        call = attended.call
        assert call.q.shape[:3] == (2, 4, TOKENS)
        assert call.k.shape[:3] == (2, 2, TOKENS)
        gradients = torch.autograd.grad(call.q.sum(), made[layer][0], retain_graph=True)
        assert gradients[0].abs().max() > 0, "the graph goes from the projection through RoPE to q"


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@torch.no_grad()
def test_attention_of_what_is_captured_is_the_models_attention(implementation) -> None:
    """A window, padding on the left, and grouped heads: the weights of eager attention are those of q and k."""
    model, ids = tiny_model("gemma3"), tokens(2, TOKENS)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    model.set_attn_implementation("eager")
    weights = model(ids, attention_mask=mask, output_attentions=True, use_cache=False).attentions
    model.set_attn_implementation(implementation)
    with capture_attention(model) as captured:
        model(ids, attention_mask=mask, use_cache=False)
    for layer, (_, call, _, _, at) in captured.items():
        assert call.window == ((6, 0) if layer == 0 else None)
        assert call.cu_seqlens_q.tolist() == [0, TOKENS - 4, 2 * TOKENS - 4]
        lse = attention_lse(
            call.q, call.k, scale=call.scale, causal=True, window=call.window, cu_seqlens_q=call.cu_seqlens_q,
            cu_seqlens_k=call.cu_seqlens_k,
        )  # fmt: skip
        # the weight of a query's own key
        own = ((call.q * call.k.repeat_interleave(2, 1)).sum(-1) * call.scale - lse.T).exp()
        wanted = weights[layer].diagonal(dim1=-2, dim2=-1).transpose(1, 2).flatten(0, 1)[at]
        torch.testing.assert_close(own, wanted)


@torch.no_grad()
def test_packed_sequences_are_captured_apart_without_a_cache_and_as_one_with_it() -> None:
    model, ids = tiny_model("llama"), tokens(1, 9)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    with capture_attention(model, [1]) as captured:
        model(ids, position_ids=positions, use_cache=False)
        apart = captured[1].call.cu_seqlens_q
        model(ids, position_ids=positions, use_cache=True)
        together = captured[1].call.cu_seqlens_q
    assert apart.tolist() == [0, 4, 9]
    assert together is None
    assert list(captured) == [1]


@pytest.fixture
def flash(monkeypatch) -> str:
    """The name of an implementation that is called as flash attention is, and has its masks."""
    from transformers.masking_utils import flash_attention_mask

    for interface, function in (
        (AttentionInterface, sdpa_attention_forward), (AttentionMaskInterface, flash_attention_mask),
    ):  # fmt: skip
        monkeypatch.setitem(interface._global_mapping, "a_flash_attention", function)
    return "a_flash_attention"


ENDS = torch.tensor([0, 4, 9], dtype=torch.int32)
POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])


@torch.no_grad()
@pytest.mark.parametrize(
    ("rows", "given", "apart"),
    [
        (1, {}, False),
        (1, {"cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS, "max_length_q": 5, "max_length_k": 5}, True),
        (1, {"cu_seq_lens_q": ENDS}, False),
        (1, {"position_ids": POSITIONS}, True),
        (1, {"position_ids": POSITIONS, "use_cache": True}, True),
        (1, {"position_ids": POSITIONS, "attention_mask": torch.ones_like(POSITIONS)}, True),
        (1, {"position_ids": torch.arange(3, 12)[None]}, False),
        (2, {"position_ids": POSITIONS.expand(2, -1)}, False),
    ],
    ids=["whole", "varlen", "one argument of four", "positions", "with a cache", "mask of ones", "shifted", "two rows"],
)  # fmt: skip
def test_sequences_are_apart_where_flash_attention_takes_them_apart(flash, rows, given, apart) -> None:
    """As ``transformers.modeling_flash_attention_utils`` decides, which is not how masks are made."""
    model = tiny_model("llama")
    model.config._attn_implementation = flash
    with capture_attention(model) as captured:
        model(tokens(rows, 9), **{"use_cache": False, **given})
    ends = captured[1].call.cu_seqlens_q
    assert (ends is not None) == apart
    assert ends is None or ends.tolist() == [0, 4, 9]


@torch.no_grad()
def test_a_model_that_selects_keys_is_refused_in_flash_attention_and_where_it_is_compiled(flash) -> None:
    """Its indexer changes the mask, or is handed on in an argument."""
    model, ids = tiny_model("deepseek_v32"), tokens(1, TOKENS)
    assert model.config.index_topk < TOKENS
    model.set_attn_implementation("sdpa")
    torch._dynamo.reset()
    with capture_attention(model) as captured:
        torch.compile(model, backend="eager")(ids, use_cache=False)
        with pytest.raises(ValueError, match="this model's mask has been replaced by a layer's own"):
            captured[0]
    module, q = model.model.layers[0].self_attn, torch.randn(1, 4, TOKENS, 8)
    for argument in ("indices", "block_indices"):
        model.config._attn_implementation = flash
        with (
            capture_attention(model),
            pytest.raises(ValueError, match="layer 0 attends to the keys that its own indexer selects"),
        ):
            AttentionInterface._global_mapping[flash](module, q, q, q, None, **{argument: ids})


@torch.no_grad()
def test_the_log_sum_exp_comes_from_attention_where_it_is_known() -> None:
    model, ids = tiny_model("llama").double(), tokens(2, TOKENS)
    plain = model(ids).logits
    with capture_attention(model, lse=True) as captured:
        torch.testing.assert_close(model(ids).logits, plain)
    call = captured[1].call
    torch.testing.assert_close(call.lse, attention_lse(call.q, call.k, scale=call.scale, causal=True))
    model.set_attn_implementation("eager")
    with capture_attention(model, lse=True) as captured:
        model(ids)
    assert captured[1].call.lse is None


def test_only_calls_with_a_graph_are_captured_if_asked_and_none_that_checkpointing_repeats() -> None:
    model, ids, seen = tiny_model("llama").train(), tokens(1, TOKENS), []
    checkpoint_activations(model)
    with capture_attention(model, graph=True, each=seen.append):
        with torch.no_grad():
            model(ids, use_cache=False)
        assert seen == []
        model(ids, use_cache=False).logits.sum().backward()
    assert [attended.layer for attended in seen] == [0, 1]


def test_a_capture_sees_calls_of_its_own_thread_and_model() -> None:
    model, other = tiny_model("llama"), tiny_model("llama", seed=1)
    other.config = model.config
    inputs, mine = [tokens(1, length, seed=length) for length in (5, 9, 12, 7)], []

    @torch.no_grad()
    def run(n: int) -> torch.Tensor:
        with capture_attention(model) as captured:
            model(inputs[n])
            other(inputs[n - 1])
        return torch.cat([attended.call.q for attended in captured.values()])

    with capture_attention(model, each=mine.append):
        in_threads(run, len(inputs), threads=3, calls=6)
    assert mine == []


@torch.no_grad()
def test_what_cannot_be_captured_is_refused_in_a_sentence() -> None:
    model, ids = tiny_model("llama"), tokens(1, TOKENS)
    with (
        pytest.raises(ValueError, match=r"no attention in layers \[7\]: they are numbers, of \[0, 1"),
        capture_attention(model, [1, 7]),
    ):
        pass
    with pytest.raises(ValueError, match=r"several numbers, such as .*: got 'last'"), capture_attention(model, "last"):
        pass
    AttentionInterface.register("unmasked", sdpa_attention_forward)
    unmasked = tiny_model("llama")
    unmasked.config._attn_implementation = "unmasked"
    try:
        with pytest.raises(ValueError, match="under 'unmasked', which has no mask"), capture_attention(unmasked):
            pass
    finally:
        AttentionInterface._global_mapping.pop("unmasked")
    falcon = FalconModel(FalconConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2))
    with pytest.raises(ValueError, match="FalconModel: it does not use"), capture_attention(falcon):
        pass
    bert = BertModel(
        BertConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    )
    with pytest.raises(ValueError, match="BertModel: it has no causal attention"), capture_attention(bert):
        pass
    with (
        pytest.raises(ValueError, match="models of transformers: got Linear"),
        capture_attention(torch.nn.Linear(1, 1)),
    ):
        pass
    mask = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"with a mask of its own, \[1, 1, 13, 13\]"), capture_attention(model):
        model(ids, attention_mask=mask)
    own = tiny_model("deepseek_v32")
    with pytest.raises(ValueError, match="layer 0 attends with a mask of its own"), capture_attention(own):
        own(ids)
    with capture_attention(model, [0]) as captured, pytest.raises(KeyError, match="layer 0 did not attend: got none"):
        captured[0]


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "streamkl_dense"])
def test_under_autocast_q_and_k_have_the_dtype_that_attention_multiplies(implementation: str) -> None:
    """RoPE leaves them in float32, of which attention makes bfloat16."""
    ids, model = tokens(1, 8), tiny_model("llama")
    if implementation == "streamkl_dense":
        skl.sparsify(model, OracleSelector(4, 2))
    model.set_attn_implementation(implementation)
    with torch.autocast("cpu", torch.bfloat16):
        alone = model(ids).logits
        with capture_attention(model) as captured:
            logits = model(ids).logits
    assert torch.equal(logits, alone)
    for layer in captured.values():
        assert layer.call.q.dtype == layer.call.k.dtype == torch.bfloat16
        assert layer.call.q.requires_grad


@torch.no_grad()
def test_under_autocast_a_log_sum_exp_is_that_of_what_attention_multiplies() -> None:
    ids, model = tokens(1, 8), tiny_model("llama", attn_implementation="sdpa")
    with torch.autocast("cpu", torch.bfloat16):
        alone = model(ids).logits
        with capture_attention(model, lse=True) as captured:
            logits = model(ids).logits
    torch.testing.assert_close(logits, alone, atol=0.02, rtol=0.02)
    for layer in captured.values():
        call = layer.call
        assert call.lse is not None
        wanted = attention_lse(call.q.double(), call.k.double(), scale=call.scale, causal=True)
        torch.testing.assert_close(call.lse.double(), wanted, atol=1e-3, rtol=0)
