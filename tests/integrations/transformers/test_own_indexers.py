"""DeepSeek-V3.2 and its relatives: their own indexers, as they are until asked for more, then trainable in place."""

import importlib

import pytest
import torch
from safetensors.torch import load_file
from transformers import DynamicCache

import streamkl.integrations.transformers as skl
from streamkl import indexer_kl
from streamkl.sparse import IndexerSelector
from streamkl.testing.tiny_models import SPARSE_LATENT, tiny_model, tokens

TOKENS = 24
pytestmark = pytest.mark.parametrize("family", SPARSE_LATENT)


def own_parameters(model) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if ".indexer." in name}


@torch.no_grad()
def test_wrapped_and_untouched_the_logits_are_bit_identical(family) -> None:
    model, ids = tiny_model(family), tokens(2, TOKENS)
    names = list(model.state_dict())
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        logits, written = model(ids).logits, model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4)
        handle = skl.sparsify(model)
        assert list(model.state_dict()) == names
        model.set_attn_implementation(implementation)
        assert torch.equal(model(ids).logits, logits)
        assert torch.equal(model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4), written)
        handle.remove()
        assert model.config._attn_implementation == implementation
        assert torch.equal(model(ids).logits, logits)


@torch.no_grad()
def test_sparse_it_attends_to_the_keys_that_transformers_masks_all_others_for(family, dense_of) -> None:
    model, ids = tiny_model(family), tokens(2, TOKENS)
    masked = dense_of(model, input_ids=ids)
    cache = DynamicCache(config=model.config)
    model(ids[:, :10], past_key_values=cache)
    handle = skl.sparsify(model)
    assert handle.selector == IndexerSelector(topk=6, query_block=1)
    masked.check(model(ids).logits)
    rest = model(ids[:, 10:], past_key_values=cache).logits  # the cache holds index keys as transformers rotates them
    masked.check(rest, masked.logits[:, 10:])


@pytest.mark.parametrize("implementation", ["streamkl_dense", "streamkl_sparse"])
def test_indexer_kl_reaches_every_parameter_of_the_indexers_and_no_other(family, implementation) -> None:
    model, ids = tiny_model(family), tokens(2, TOKENS)
    maps = [m for name, m in model.named_modules() if name.endswith((".indexer.wq_b", ".indexer.weights_proj"))]
    graphs: list[bool] = []
    for each in maps:
        each.register_forward_hook(lambda module, args, out: graphs.append(out.requires_grad))
    model(ids)
    assert graphs == [False] * len(maps), "transformers alone runs them without gradients"
    graphs.clear()
    handle = skl.sparsify(model)
    model.set_attn_implementation(implementation)
    losses = []

    def learn(attended: skl.Attended) -> None:
        if attended.call.index is not None:
            q, k, scale, *_ = attended.call
            losses.append(indexer_kl(q, k, *attended.call.index, teacher_scale=scale))

    with handle.watch(learn):
        model(ids)
    assert graphs == [True] * len(maps)
    assert len(losses) == len(handle.indexers) >= 2
    torch.stack(losses).sum().backward()
    own = own_parameters(model)
    assert {id(p) for p in handle.indexers.parameters()} == {id(p) for p in own.values()}
    for name, parameter in own.items():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name
    assert all(p.grad is None for name, p in model.named_parameters() if name not in own)


@torch.no_grad()
def test_weights_are_saved_and_loaded_under_the_names_of_the_checkpoint(family, tmp_path) -> None:
    model, ids = tiny_model(family), tokens(2, TOKENS)
    names = set(model.state_dict())
    handle = skl.sparsify(model, IndexerSelector(5, 2))
    for parameter in handle.indexers.parameters():
        parameter += 0.3 * torch.randn_like(parameter)  # as training would
    sparse = model(ids).logits
    handle.save_pretrained(tmp_path / "model")
    handle.save_indexers(tmp_path / "indexers")
    untouched = tiny_model(family)
    untouched.save_pretrained(tmp_path / "untouched")
    saved, plain = (load_file(tmp_path / folder / "model.safetensors") for folder in ("model", "untouched"))
    assert saved.keys() == plain.keys()
    loaded = type(model).from_pretrained(tmp_path / "model")
    assert loaded.streamkl.selector == IndexerSelector(5, 2)
    assert torch.equal(loaded(ids).logits, sparse)
    alone = load_file(tmp_path / "indexers" / "indexers.safetensors")
    assert alone.keys() == own_parameters(model).keys() <= names
    skl.sparsify(untouched, indexers=tmp_path / "indexers")
    assert torch.equal(untouched(ids).logits, sparse)


@torch.no_grad()
def test_a_folder_leaves_the_models_own_dtypes(family, tmp_path) -> None:
    """transformers keeps some weights of indexers in float32."""
    tiny_model(family).save_pretrained(tmp_path / "model")
    model = type(tiny_model(family)).from_pretrained(tmp_path / "model", dtype=torch.float16)
    dtypes = {name: p.dtype for name, p in own_parameters(model).items()}
    folder = skl.sparsify(model).save_indexers(tmp_path / "indexers")
    skl.sparsify(model, indexers=folder)
    assert {name: p.dtype for name, p in own_parameters(model).items()} == dtypes
    if family in ("deepseek_v32", "glm_moe_dsa", "axk2", "mistral_large4"):
        assert {torch.float16, torch.float32} == set(dtypes.values())


@torch.no_grad()
def test_the_layout_of_rope_is_that_of_the_familys_own_code(family, monkeypatch) -> None:
    model, ids = tiny_model(family), tokens(2, TOKENS)
    modeling = importlib.import_module(type(model).__module__)
    name = "apply_rotary_pos_emb" + ("_interleave" if family in ("dots3_note", "glm_moe_dsa", "mistral_large4") else "")
    rotate, theirs = getattr(modeling, name), []

    def record(q, k, *tables, unsqueeze_dim=1, **options):
        rotated = rotate(q, k, *tables, unsqueeze_dim=unsqueeze_dim, **options)
        if unsqueeze_dim == 2:  # the indexer's, [B, N, heads, dim]
            theirs.append((rotated[0].transpose(1, 2), rotated[1].squeeze(2)))
        return rotated

    monkeypatch.setattr(modeling, name, record)
    model(ids)
    (their_q, their_k), dim = theirs[0], model.config.get_text_config().qk_rope_head_dim

    def ours() -> tuple[torch.Tensor, torch.Tensor]:
        """The first layer's index queries and keys."""
        seen = []
        with skl.sparsify(model).watch(lambda attended: seen.append(attended.call.index)):
            model(ids)
        return seen[0].index_q[..., :dim], seen[0].index_k[..., :dim]

    q, k = ours()
    torch.testing.assert_close(q, their_q)
    torch.testing.assert_close(k, their_k)
    cls = type(model.streamkl.family)
    monkeypatch.setattr(cls, "rope_layout", {"half": "interleaved", "interleaved": "half"}[cls.rope_layout])
    assert not torch.allclose(ours()[0], their_q)
