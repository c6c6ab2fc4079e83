"""Indexers in a folder: what is written is read, and nothing that is damaged or belongs to another model."""

import json
import os
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

import streamkl.integrations.transformers as skl
from streamkl import durable
from streamkl.integrations.saved import folder as folders
from streamkl.sparse import IndexerSelector
from streamkl.testing.tiny_models import tiny_model, tokens

TOKENS = 24


@pytest.fixture
def sparse():
    model = tiny_model("llama")
    return skl.sparsify(model, IndexerSelector(5, 2), skl.new_indexers(model, head_dim=8), decode="sparse")


@torch.no_grad()
def test_a_saved_model_is_sparse_again_where_streamkl_is_imported_and_dense_elsewhere(sparse, tmp_path) -> None:
    ids = tokens(2, TOKENS)
    logits = sparse.model(ids).logits
    sparse.save_pretrained(tmp_path / "model")
    os.rename(tmp_path / "model", tmp_path / "moved")  # it points to what lies beside it
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "moved", output_loading_info=True)
    assert not info["unexpected_keys"]
    assert (loaded.streamkl.selector, loaded.streamkl.decode) == (sparse.selector, "sparse")
    assert torch.equal(loaded(ids).logits, logits)
    sparse.model.set_attn_implementation("sdpa")
    dense = sparse.model(ids).logits
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "moved", attn_implementation="sdpa")
    assert torch.equal(loaded(ids).logits, dense)
    loaded.set_attn_implementation("streamkl_sparse")
    assert torch.equal(loaded(ids).logits, logits)
    elsewhere = PreTrainedModel.from_pretrained.__func__.__wrapped__  # as transformers has it
    plain = elsewhere(LlamaForCausalLM, tmp_path / "moved")
    assert torch.equal(plain(ids).logits, dense)
    loaded.save_pretrained(tmp_path / "dense")
    assert not hasattr(AutoModelForCausalLM.from_pretrained(tmp_path / "dense"), "streamkl")
    shutil.rmtree(tmp_path / "moved" / "streamkl")
    with pytest.raises(
        ValueError, match="says that its indexers are in 'streamkl', and they are not: copy that folder"
    ):
        AutoModelForCausalLM.from_pretrained(tmp_path / "moved")


@torch.no_grad()
def test_the_text_of_a_saved_model_says_that_it_is_sparse_too(tmp_path) -> None:
    """``AutoModelForCausalLM`` may load the text alone, by its own config."""
    model = tiny_model("mistral_large4")
    skl.sparsify(model, IndexerSelector(5, 2)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["streamkl"] == config["text_config"]["streamkl"]
    loaded = type(model).from_pretrained(tmp_path)
    assert loaded.streamkl.selector == IndexerSelector(5, 2)
    for config in (model.config, loaded.config):
        assert "streamkl" not in (*vars(config), *vars(config.text_config))


def test_one_process_writes_the_indexers_and_what_would_lose_them_is_refused(sparse, tmp_path) -> None:
    sparse.save_pretrained(tmp_path / "second", is_main_process=False)
    assert not (tmp_path / "second" / "streamkl").exists()
    with pytest.raises(ValueError, match="save the model, and upload its folder"):
        sparse.save_pretrained(tmp_path / "uploaded", push_to_hub=True)
    sparse.model._hf_peft_config_loaded = True
    with pytest.raises(ValueError, match="merge them, or save_indexers"):
        sparse.save_pretrained(tmp_path / "adapted")


@torch.no_grad()
def test_offloaded_models_get_the_folders_indexers(sparse, tmp_path) -> None:
    from accelerate import cpu_offload

    ids = tokens(2, TOKENS)
    logits, folder = sparse.model(ids).logits, sparse.save_indexers(tmp_path / "indexers")
    offloaded = cpu_offload(tiny_model("llama"), execution_device=torch.device("cpu"))
    skl.sparsify(offloaded, indexers=folder, decode="sparse")
    assert torch.equal(offloaded(ids).logits, logits)
    own = tiny_model("deepseek_v32")
    folder = skl.sparsify(own).save_indexers(tmp_path / "own")
    own.streamkl.remove()
    with pytest.raises(ValueError, match="accelerate has offloaded the model's own indexers"):
        skl.sparsify(cpu_offload(own, execution_device=torch.device("cpu")), indexers=folder)


@torch.no_grad()
def test_a_folder_of_indexers_gives_the_same_selection(sparse, tmp_path) -> None:
    ids = tokens(2, TOKENS)
    sparse.save_indexers(tmp_path / "indexers")
    sparse.save_indexers(tmp_path / "indexers")  # in place of the first
    assert sorted(os.listdir(tmp_path)) == ["indexers"]
    description = json.loads((tmp_path / "indexers" / "indexers.json").read_text())
    assert description["family"] == description["model"]["model_type"] == "llama"
    assert description["indexer"] == {
        "kind": "head", "head_dim": 8, "rope_dim": 8, "rope_layout": "half", "activation": "relu", "heads": 1,
        "temperature": False,
    }  # fmt: skip
    selector = {"kind": "indexer", "topk": 5, "query_block": 2, "activation": "relu", "normalise": None}
    assert description["selector"] == selector
    other = tiny_model("llama")
    assert skl.sparsify(other, indexers=tmp_path / "indexers").selector == sparse.selector
    assert torch.equal(other(ids).logits, sparse.model(ids).logits)
    more_keys = skl.sparsify(other, IndexerSelector(9, 2), tmp_path / "indexers")
    assert more_keys.selector.topk == 9


def test_a_selector_compares_as_the_indexers_were_saved_to_unless_it_says_how(tmp_path) -> None:
    model = tiny_model("llama")
    skl.sparsify(model, IndexerSelector(5, 2, normalise=True), skl.new_indexers(model, head_dim=8)).save_indexers(
        tmp_path / "indexers"
    )
    for given, found in ((None, True), (False, False), (True, True)):
        handle = skl.sparsify(model, IndexerSelector(9, 2, normalise=given), tmp_path / "indexers")
        assert handle.selector == IndexerSelector(9, 2, normalise=found)


def damaged(folder, kind: str) -> str:
    """Damages a folder, and says what its refusal must say."""
    weights = folder / folders.WEIGHTS
    if kind == "cut off":
        weights.write_bytes(weights.read_bytes()[:-100])
        return "indexers.safetensors is not what was written"
    if kind == "a bit":
        data = bytearray(weights.read_bytes())
        data[-1] ^= 1
        weights.write_bytes(data)
        return "indexers.safetensors is not what was written"
    if kind == "edited":
        (folder / folders.DESCRIPTION).write_text((folder / folders.DESCRIPTION).read_text().replace("5", "6"))
        return "indexers.json is not what was written"
    if kind == "no weights":
        weights.unlink()
        return "has no indexers.safetensors"
    if kind == "no marker":
        (folder / folders.MARKER).unlink()
        return "has no complete.json: writing it did not end"
    if kind == "marker":
        (folder / folders.MARKER).write_text("{")
        return "complete.json is damaged"
    shutil.rmtree(folder)
    return "there is no folder of indexers"


@pytest.mark.parametrize("kind", ["cut off", "a bit", "edited", "no weights", "no marker", "marker", "gone"])
def test_a_damaged_folder_is_never_loaded(sparse, tmp_path, kind) -> None:
    message = damaged(sparse.save_indexers(tmp_path / "indexers"), kind)
    model = tiny_model("llama")
    with pytest.raises(ValueError, match=message):
        skl.sparsify(model, indexers=tmp_path / "indexers")
    assert not hasattr(model, "streamkl")
    assert model.config._attn_implementation == "sdpa"


def test_what_a_crash_leaves_behind_is_no_folder_of_indexers(sparse, tmp_path, monkeypatch) -> None:
    sparse.save_indexers(tmp_path / "indexers")
    before = {path.name: path.read_bytes() for path in (tmp_path / "indexers").iterdir()}

    def crash(*args: object) -> None:
        raise KeyboardInterrupt

    for step in (folders, "save_file"), (durable, "digest"), (durable.os, "fsync"), (durable.os, "rename"):
        with monkeypatch.context() as patched:
            patched.setattr(*step, crash)
            with pytest.raises(KeyboardInterrupt):
                sparse.save_indexers(tmp_path / "indexers")
            with pytest.raises(KeyboardInterrupt):
                sparse.save_indexers(tmp_path / "new")
        assert {path.name: path.read_bytes() for path in (tmp_path / "indexers").iterdir()} == before
        assert not (tmp_path / "new").exists()


def test_something_else_at_that_place_is_kept(sparse, tmp_path) -> None:
    folder = tmp_path / "streamkl"
    folder.mkdir()
    for name in ("notes.txt", "indexers.json"):
        (folder / name).write_text("mine")
        for save in (lambda: sparse.save_indexers(folder), lambda: sparse.save_pretrained(tmp_path)):
            with pytest.raises(ValueError, match="is there already and holds no indexers: choose another folder"):
                save()
    assert sorted(os.listdir(folder)) == ["indexers.json", "notes.txt"]
    assert os.listdir(tmp_path) == ["streamkl"]


def test_a_model_saved_again_keeps_what_lies_beside_its_indexers(sparse, tmp_path) -> None:
    sparse.save_pretrained(tmp_path)
    (tmp_path / "streamkl" / "README.md").write_text("mine")
    sparse.save_pretrained(tmp_path)
    assert (tmp_path / "streamkl" / "README.md").read_text() == "mine"
    assert AutoModelForCausalLM.from_pretrained(tmp_path).streamkl.selector == sparse.selector


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("llama", {"seed": 1}, r"whose weights are not those of this model \(cosine -?0\.\d+\): train indexers"),
        ("llama", {"hidden_size": 48}, "with hidden_size = 32, and this model has 48: use its own indexers"),
        ("llama", {"num_hidden_layers": 3}, "with num_hidden_layers = 2, and this model has 3"),
        ("qwen3", {}, r"holds indexers for .* \(llama\) with model_type = llama, and this model has qwen3"),
    ],
)
def test_indexers_of_another_model_are_refused(sparse, tmp_path, family, options, message) -> None:
    sparse.save_indexers(tmp_path / "indexers")
    with pytest.raises(ValueError, match=message):
        skl.sparsify(tiny_model(family, **options), indexers=tmp_path / "indexers")


@torch.no_grad()
def test_a_finetuned_model_keeps_its_indexers(sparse, tmp_path) -> None:
    sparse.save_indexers(tmp_path / "indexers")
    model = tiny_model("llama").bfloat16()
    for parameter in model.parameters():
        parameter += 0.03 * parameter.std() * torch.randn_like(parameter) if parameter.dim() > 1 else 0
    assert len(skl.sparsify(model, indexers=tmp_path / "indexers").indexers) == 2
    assert model(tokens(1, TOKENS)).logits.dtype == torch.bfloat16
