"""Models without a family file: which are recognised by their structure, what the probe sees, and what is refused."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import streamkl.integrations.transformers as skl
from streamkl.integrations.transformers import probe
from streamkl.integrations.transformers.families import FAMILIES, structural
from streamkl.sparse import IndexerSelector, OracleSelector
from streamkl.testing.causal_models import model_types, tiny_causal_model
from streamkl.testing.tiny_models import tokens

DOCS = Path(__file__).parents[3] / "docs"
SELECTOR = OracleSelector(4, 2)
FEW = (
    "qwen2", "mistral", "phi3", "gpt_neox", "olmo2", "glm4", "qwen3_moe", "cohere2", "deepseek_v3", "gemma2", "gpt_oss",
    "opt",
)  # fmt: skip
"""With biases, windows, fused projections, interleaved tables, experts, a latent, a soft cap, sinks, no RoPE."""


@functools.cache
def tool() -> Any:
    """The module that makes the page."""
    spec = importlib.util.spec_from_file_location("docs_tools_models", DOCS / "tools" / "models.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def page_of_this_version() -> str:
    page = (DOCS / "supported-models.md").read_text(encoding="utf-8")
    if f"in transformers {transformers.__version__}, tried" not in page:
        pytest.skip(f"the page is of another version of transformers than {transformers.__version__}")
    return page


@pytest.mark.parametrize("model_type", FEW)
def test_a_type_writes_with_all_keys_what_it_writes_densely_or_is_refused_as_the_page_says(model_type) -> None:
    models, page = tool(), page_of_this_version()
    outcome = models.try_type(model_type)
    print(outcome)
    assert models.row(outcome) in page.splitlines()
    assert outcome.sparse == outcome.indexers == (model_type not in ("gemma2", "opt"))


@pytest.mark.nightly
def test_the_page_of_supported_models_is_what_trying_them_gives_and_at_least_sixty_are_structural() -> None:
    models, page = tool(), page_of_this_version()
    outcomes = [models.try_type(each) for each in model_types()]
    assert models.page(outcomes, transformers.__version__) == page
    assert len(outcomes) == len(model_types())
    assert sum(o.sparse and o.family == "structural" for o in outcomes) >= 60
    assert all(o.sparse or o.note for o in outcomes), "a reason for each that is refused"


def test_the_page_names_every_type_once_and_counts_them() -> None:
    page = page_of_this_version()
    rows = [line.split("`")[1] for line in page.splitlines() if line.startswith("| `")]
    assert rows != sorted(rows), "there are two tables"
    assert sorted(rows) == model_types()
    passed = page[: page.index("## Refused")].count("\n| `")
    assert f"{passed} of {len(rows)} can" in page
    assert page[: page.index("## Refused")].count("| `structural` |") >= 60


def test_the_structural_family_is_the_last_entry_of_the_table_and_a_file_comes_first() -> None:
    assert list(FAMILIES)[-1] == "*"
    model = tiny_causal_model("mistral", sliding_window=None)
    assert skl.sparsify(model, SELECTOR).family is FAMILIES["*"]
    model = tiny_causal_model("llama")
    assert skl.sparsify(model, SELECTOR).family is FAMILIES["llama"]


def refused(model: Any, message: str) -> None:
    """Refused, and left as it was."""
    ids = tokens(1, 20)
    model.train()
    before, names = model.config._attn_implementation, dict(model.named_modules()).keys()
    with torch.no_grad():
        logits = model.eval()(ids).logits
    model.train()
    with pytest.raises(ValueError, match=message):
        skl.sparsify(model, SELECTOR)
    assert model.config._attn_implementation == before
    assert all(module.training for module in model.modules())
    assert not any(hasattr(module, "streamkl_layer") or module._forward_pre_hooks for module in model.modules())
    assert not hasattr(model, "streamkl")
    assert dict(model.named_modules()).keys() == names
    with torch.no_grad():
        assert torch.equal(model.eval()(ids).logits, logits)


def test_the_probe_refuses_logits_that_differ_from_the_dense_ones(monkeypatch) -> None:
    right = probe.streamkl_attention

    def wrong(*args, **kwargs):
        output, weights = right(*args, **kwargs)
        return output * 1.001, weights

    monkeypatch.setattr(probe, "streamkl_attention", wrong)
    refused(tiny_causal_model("qwen2"), "with all keys selected, logits of this qwen2 model differ from the dense ones")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_probe_allows_what_roundings_of_half_precision_do(dtype) -> None:
    for seed in range(3):
        model = tiny_causal_model("qwen2", seed).to(dtype)
        skl.sparsify(model, SELECTOR)


def test_arguments_of_attention_that_nobody_knows_are_refused(monkeypatch) -> None:
    model = tiny_causal_model("qwen2")
    attention = type(model.model.layers[0].self_attn)
    forward = attention.forward

    def with_more(self, *args, **kwargs):
        return forward(self, *args, temperature_of_tomorrow=2.0, **kwargs)

    with_more.__wrapped__ = forward  # type: ignore[attr-defined]
    monkeypatch.setattr(attention, "forward", with_more)
    refused(model, "layer 0 of this qwen2 model gives its attention temperature_of_tomorrow, of which")


def test_a_layer_with_a_window_is_never_taken_for_one_that_sees_all_keys(monkeypatch) -> None:
    monkeypatch.setattr(structural.Structural, "is_global", lambda *args: True)
    refused(tiny_causal_model("mistral", sliding_window=4096), "layer 0 attends with a window of 4096 keys")


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("mistral", "no layer of this mistral model attends to all keys: each has a window"),
        ("vaultgemma", "layer 0 of this vaultgemma model has a soft cap on its logits"),
        ("diffllama", "layer 0 of this diffllama model attends 2 times in one forward"),
        ("gpt_neo", "GPTNeoAttention"),
        ("mamba", "get_decoder.. has no attention modules"),
    ],
)
def test_what_the_structure_does_not_show_to_be_right_is_refused(model_type, message) -> None:
    refused(tiny_causal_model(model_type), message)


def test_tables_of_every_layout_become_halves() -> None:
    angles = torch.arange(7.0)[None, :, None] * torch.tensor([1.0, 0.1, 0.01])
    halves = torch.cat((angles, angles), -1).cos()
    for table in (halves, angles.repeat_interleave(2, -1).cos(), angles.cos()):
        torch.testing.assert_close(structural._halves(table, 6), halves, rtol=0, atol=0)


@pytest.mark.parametrize("model_type", ["qwen2", "gpt_neox", "cohere", "deepseek_v2"])
@torch.no_grad()
def test_an_indexers_scores_depend_on_distances_and_not_on_positions(model_type) -> None:
    model, ids = tiny_causal_model(model_type), tokens(1, 30)
    indexers = skl.new_indexers(model, head_dim=4, activation=None)
    sparse = skl.sparsify(model, IndexerSelector(30, 1, activation=None), indexers)
    scores = []
    for shift in (0, 11):
        seen: list[skl.Attended] = []
        with sparse.watch(seen.append):
            model(ids, position_ids=torch.arange(30)[None] + shift, use_cache=False)
        index = seen[0].call.index
        assert index is not None
        scores.append(index.index_q[0, 0] @ index.index_k[0].mT)
    assert (scores[0] - scores[1]).abs().max() <= 1e-5 * scores[0].abs().max()
