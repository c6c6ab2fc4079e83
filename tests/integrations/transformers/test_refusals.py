"""What sparse attention does not do is refused, in a sentence that says what was found and what to do."""

import importlib
import importlib.metadata

import pytest
import torch
import transformers

import streamkl.integrations.transformers as skl
from streamkl.integrations.transformers.families import FAMILIES
from streamkl.integrations.transformers.requirements import check_requirements
from streamkl.sparse import IndexerSelector, OracleSelector
from streamkl.testing.causal_models import tiny_causal_model
from streamkl.testing.tiny_models import COMMON, tiny_model, tokens

SELECTOR = OracleSelector(4, 2)


def gpt_oss():
    config = transformers.GptOssConfig(**{**COMMON, "num_local_experts": 2, "num_experts_per_tok": 1})
    return transformers.GptOssForCausalLM(config).eval()


@pytest.fixture
def known_gpt_oss(monkeypatch):
    """A family that somebody added without a thought for its sinks."""

    class GptOss(skl.GroupedQuery):
        name, model_types, attention = "gpt_oss", ("gpt_oss",), "GptOssAttention"

    monkeypatch.setitem(FAMILIES, "gpt_oss", GptOss())


def test_a_model_of_no_family_and_of_another_structure_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"no family of models is known for model_type 'opt', and it has not the structure of a standard decoder: "
        r"OPTAttention gets no rotary position embeddings; register_family adds a family "
        r"\(docs/how-to/add-a-family.md\)",
    ):
        skl.sparsify(tiny_causal_model("opt"), SELECTOR)


def test_sinks_are_refused(known_gpt_oss, monkeypatch) -> None:
    model = gpt_oss()
    with pytest.raises(ValueError, match=r"layer 0 of this gpt_oss model has attention sinks \(sinks\)"):
        skl.sparsify(model, SELECTOR)
    monkeypatch.setattr(skl.GroupedQuery, "check", lambda *args: None)
    skl.sparsify(model, SELECTOR)
    with pytest.raises(ValueError, match=r"layer 0 has attention sinks \(s_aux\), which sparse attention does not"):
        model(tokens(1, 9))


def test_a_soft_cap_is_refused() -> None:
    with pytest.raises(ValueError, match=r"gemma3_text model has a soft cap on its logits \(attn_logit_softcapping\)"):
        skl.sparsify(tiny_model("gemma3", attn_logit_softcapping=30.0), SELECTOR)


def test_attention_that_is_not_causal_is_refused() -> None:
    with pytest.raises(ValueError, match="layer 0 of this gemma3_text model is not causal, and sparse attention is"):
        skl.sparsify(tiny_model("gemma3", use_bidirectional_attention=True), SELECTOR)
    model = tiny_model("llama")
    skl.sparsify(model, SELECTOR)
    mask = torch.ones(2, 1, 9, 9, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"a mask of \[batch, tokens\]: layer 0 got a mask of \[2, 1, 9, 9\]"):
        model(tokens(2, 9), attention_mask=mask)


def test_images_that_see_what_comes_after_are_refused() -> None:
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
        "patch_size": 4,
    }  # fmt: skip
    config = transformers.Gemma3Config(
        text_config=tiny_model("gemma3").config.to_dict(), vision_config=vision, mm_tokens_per_image=4,
        image_token_index=60,
    )  # fmt: skip
    model, ids = transformers.Gemma3ForConditionalGeneration(config).eval(), tokens(1, 16).clamp(max=50)
    skl.sparsify(model, SELECTOR)
    model(input_ids=ids)
    ids[0, 4:8] = 60
    with pytest.raises(ValueError, match="this model's mask has a query that sees a key after it"):
        model(input_ids=ids, pixel_values=torch.randn(1, 3, 16, 16), token_type_ids=(ids == 60).long())


@pytest.mark.parametrize("family", ["llama", "deepseek_v32"])
def test_a_name_without_a_selector_is_refused(family) -> None:
    model = tiny_model(family)
    model.set_attn_implementation("streamkl_sparse")
    with pytest.raises(
        ValueError, match=r"Attention has no selector: call streamkl\.integrations\.transformers\.sparsify"
    ):
        model(tokens(1, 9))


@torch.no_grad()
def test_cu_seq_lens_of_several_rows_or_of_a_filled_cache_are_refused() -> None:
    model, told = tiny_model("llama"), {"cu_seq_lens_q": torch.tensor([0, 4, 9])}
    skl.sparsify(model, SELECTOR)
    with pytest.raises(ValueError, match="packs a batch of one row with an empty cache: got 2 rows"):
        model(tokens(2, 9), **told)
    cache = model(tokens(1, 5)).past_key_values
    with pytest.raises(ValueError, match="got 1 rows, and a cache of 5 tokens"):
        model(tokens(1, 9), past_key_values=cache, **told)


def test_dropout_is_refused() -> None:
    model = tiny_model("llama", attention_dropout=0.1)
    skl.sparsify(model, SELECTOR)
    model(tokens(1, 9))
    with pytest.raises(
        ValueError, match=r"sparse attention has no dropout: got 0\.1; set attention_dropout to 0, or call"
    ):
        model.train()(tokens(1, 9))


@pytest.mark.parametrize(
    ("family", "arguments", "message"),
    [
        ("llama", (), "nothing to select keys with: give a selector, such as streamkl.sparse.OracleSelector"),
        ("llama", (IndexerSelector(4, 1),), "needs indexers, and llama has none of its own: give a folder"),
        ("qwen3_next", (SELECTOR, 3), "head_dim must divide the 4 rotated dims of qwen3_next's heads"),
        ("glm_moe_dsa", (SELECTOR, 8), "glm_moe_dsa has indexers of its own: train those"),
    ],
)
def test_indexers_and_selectors_that_do_not_go_together_are_refused(family, arguments, message) -> None:
    model = tiny_model(family)
    selector, *head_dim = arguments or (None,)
    with pytest.raises(ValueError, match=message):
        skl.sparsify(model, selector, *(skl.new_indexers(model, head_dim=dim) for dim in head_dim))
    assert not hasattr(model, "streamkl")


@torch.no_grad()
def test_the_oracle_is_refused_in_tensor_parallelism_and_indexers_are_not() -> None:
    model = tiny_model("llama")
    model._tp_size = 2
    skl.sparsify(model, IndexerSelector(4, 2), skl.new_indexers(model, head_dim=8))
    model(tokens(1, 12))
    model.set_attn_implementation("streamkl_oracle")
    with pytest.raises(ValueError, match="in tensor parallelism each process has some of them"):
        model(tokens(1, 12))


def test_a_folder_in_place_of_a_selector_is_refused(tmp_path) -> None:
    with pytest.raises(
        ValueError, match=r"selector must be a selector: got .*; a folder of indexers is given as indexers="
    ):
        skl.sparsify(tiny_model("llama"), str(tmp_path))  # type: ignore[arg-type]


def test_an_activation_that_is_not_the_indexers_is_refused() -> None:
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="the indexers have activation None, and the selector 'relu'"):
        skl.sparsify(model, IndexerSelector(4, 1), skl.new_indexers(model, head_dim=8, activation=None))


@pytest.mark.parametrize(
    ("package", "version", "message"),
    [
        (
            "transformers",
            "4.57.1",
            r"transformers 5\.\d+ or later is needed, and 4\.57\.1 is installed: pip install -U",
        ),
        ("torch", "2.5.1+cu124", r"torch 2\.6 or later is needed, and 2\.5\.1\+cu124 is installed"),
        ("transformers", None, r"transformers is not installed: pip install -e '\.\[hf\]'"),
    ],
)
def test_an_old_or_missing_package_is_refused(monkeypatch, package, version, message) -> None:
    installed = importlib.metadata.version

    def old(name: str) -> str:
        if name == package and version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version if name == package else installed(name)

    monkeypatch.setattr(importlib.metadata, "version", old)
    with pytest.raises(ImportError, match=message):
        check_requirements()
