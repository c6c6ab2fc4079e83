"""Folders and configs that somebody wrote by hand: they load, or end in a ``ValueError``, and cost next to nothing."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

import streamkl.integrations.transformers as skl
from streamkl import durable
from streamkl.integrations.saved import folder as folders
from streamkl.integrations.saved.selectors import from_json
from streamkl.integrations.transformers import loading
from streamkl.sparse import IndexerSelector
from streamkl.testing.tiny_models import tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:a top-k of .* shared by a query block")  # a change may make topk small
SMALL = 1 << 16
"""Bytes of the largest tensor that a tiny model's indexers have room for."""


class Largest(TorchDispatchMode):
    """Takes note of the largest tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [x for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, torch.Tensor) and not x.is_meta]
        self.bytes = max([self.bytes, *(x.untyped_storage().nbytes() for x in made)])
        return out


@contextlib.contextmanager
def loads_or_is_refused() -> Iterator[None]:
    with Largest() as largest, contextlib.suppress(ValueError):
        yield
    assert largest.bytes < SMALL


class Saved:
    """A tiny model, which was saved sparse."""

    def __init__(self, path: Path, family: str) -> None:
        self.path, self.model = path, tiny_model(family)
        own = family == "deepseek_v32"
        indexers = None if own else skl.new_indexers(self.model, head_dim=8, heads=2, temperature=True)
        sparse = skl.sparsify(self.model, IndexerSelector(5, 2), indexers)
        sparse.save_indexers(path / "indexers")
        sparse.save_pretrained(path / "model")
        sparse.remove()
        self.description = json.loads((path / "indexers" / folders.DESCRIPTION).read_text())
        self.settings = json.loads((path / "model" / "config.json").read_text())["streamkl"]
        self.weights = (path / "indexers" / folders.WEIGHTS).read_bytes()

    def forged(self, description: Any, weights: bytes | None = None) -> Path:
        """A folder of that content, with a marker that fits it."""
        folder = self.path / "forged"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        told = description if isinstance(description, bytes) else json.dumps(description).encode()
        (folder / folders.DESCRIPTION).write_bytes(told)
        (folder / folders.WEIGHTS).write_bytes(self.weights if weights is None else weights)
        (folder / folders.MARKER).write_text(json.dumps(durable.digests(folder)))
        return folder


@pytest.fixture(scope="module", params=["llama", "deepseek_v32"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp("saved"), request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp("saved"), "llama")


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([-1, 0, 1, 2, 7, 8, 64, 1 << 20, 1 << 31, 10**12, 1 << 63, 10**400]),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["relu", "head", "lightning", "oracle", "window", "random", "../x", "/", "\ud800"]),
)
JUNK = st.recursive(
    SCALARS, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=5), x, max_size=3), max_leaves=5
)
CHANGES = st.lists(
    st.tuples(st.integers(0, 1 << 30), st.sampled_from(["set", "drop", "add", "swap", "copy"]), JUNK),
    min_size=1, max_size=3,
)  # fmt: skip


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every entry in a tree of JSON, as what holds it and its key."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [place for key in keys for place in ((value, key), *places(value[key]))]


def changed(value: Any, changes: list[tuple[int, str, Any]]) -> Any:
    """A tree of JSON with some of its entries set, dropped, added, swapped or copied."""
    root = {"root": copy.deepcopy(value)}
    for number, change, junk in changes:
        found = places(root)
        if not found:
            break
        holder, key = found[number % len(found)]
        other_holder, other_key = found[number // len(found) % len(found)]
        if change == "set":
            holder[key] = junk
        elif change == "drop":
            del holder[key]
        elif change == "add" and isinstance(holder, dict):
            holder[str(junk)] = junk
        elif change == "copy":
            holder[key] = copy.deepcopy(other_holder[other_key])
        elif change == "swap":
            one, other = copy.deepcopy(holder[key]), copy.deepcopy(other_holder[other_key])
            holder[key] = other
            with contextlib.suppress(KeyError, IndexError):
                other_holder[other_key] = one
    return root.get("root")


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(changes=CHANGES)
def test_a_description_with_any_change_loads_or_is_a_value_error(saved: Saved, changes: Any) -> None:
    folder = saved.forged(changed(saved.description, changes))
    with loads_or_is_refused():
        skl.load_indexers(folder, saved.model)


@settings(max_examples=100, deadline=None)
@given(
    name=st.sampled_from([folders.WEIGHTS, folders.DESCRIPTION, folders.MARKER]), cut=st.integers(0, 4000),
    put=st.binary(max_size=20), forge=st.booleans(),
)  # fmt: skip
@example(name=folders.DESCRIPTION, cut=0, put=b"[" * 200_000, forge=True)
@example(name=folders.DESCRIPTION, cut=0, put=b" " * (1 << 21), forge=True)
@example(name=folders.WEIGHTS, cut=0, put=b"\xff" * 7 + b"\x7f", forge=True)
@example(name=folders.MARKER, cut=0, put=b"[]", forge=False)
def test_files_that_are_cut_off_or_overwritten_load_or_are_a_value_error(
    llama: Saved, name: str, cut: int, put: bytes, forge: bool
) -> None:
    folder = llama.forged(llama.description)
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[:cut] + put + (data[cut + len(put) :] if put else b""))
    if forge and name != folders.MARKER:
        (folder / folders.MARKER).unlink()
        (folder / folders.MARKER).write_text(json.dumps(durable.digests(folder)))
    with loads_or_is_refused():
        skl.load_indexers(folder, llama.model)


@settings(max_examples=100, deadline=None)
@given(changes=CHANGES)
def test_weights_with_another_header_load_or_are_a_value_error(llama: Saved, changes: Any) -> None:
    length = int.from_bytes(llama.weights[:8], "little")
    header = json.dumps(changed(json.loads(llama.weights[8 : 8 + length]), changes)).encode()
    weights = len(header).to_bytes(8, "little") + header + llama.weights[8 + length :]
    folder = llama.forged(llama.description, weights)
    with loads_or_is_refused():
        skl.load_indexers(folder, llama.model)


@settings(max_examples=100, deadline=None)
@given(changes=CHANGES)
def test_a_config_with_any_change_loads_or_is_a_value_error(saved: Saved, changes: Any) -> None:
    with loads_or_is_refused():
        loading.attach(saved.model, changed(saved.settings, changes), None, saved.path / "model", {})
    if hasattr(saved.model, "streamkl"):
        saved.model.streamkl.remove()


@pytest.mark.parametrize(
    ("entry", "value", "message"),
    [
        (("indexer", "head_dim"), 10**12, r"head_dim of indexer of .* must be an integer from 1 to 1,048,576: got 1"),
        (("indexer", "head_dim"), 1 << 20, r"layers\.0\.\S+ must be of shape \[2097152, 32\], and is of \[16, 32\]"),
        (("indexer", "rope_dim"), 4, "its indexers have rope_dim = 4, not 8"),
        (("indexer", "activation"), "gelu", "activation of indexer of .* must be one of 'relu', None: got 'gelu'"),
        (("layers",), [0], r"it is for layers \[0\], not \[0, 1\]"),
        (("layers",), None, "layers of .* must be a list"),
        (("model",), "llama", "model of .* must have entries: got 'llama'"),
        (("model", "hidden_size"), True, "hidden_size of model of .* must be an integer"),
        (("model", "fingerprint"), [float("nan")] * 64, "is damaged: NaN is no number"),
        (("model", "fingerprint"), [1.0], r"whose weights are not those of this model \(cosine 0\.00\)"),
        (("model", "fingerprint"), [0.0] * 64, r"whose weights are not those of this model \(cosine 0\.00\)"),
        (("model", "fingerprint"), [1e39] * 64, r"fingerprint of model of .*\[0\] must be a finite number"),
        (("selector",), [], "kind of selector of .* must be one of 'indexer', 'oracle', 'random', 'window': got None"),
        (("selector", "topk"), 10**12, "topk of selector of .* must be an integer from 1 to"),
        (("selector", "keys"), 3, r"has entries that this StreamKL does not know: \['keys'\]"),
        (("format",), [1], r"has format \[1\], and this StreamKL reads 1"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_description_is_said(llama: Saved, entry: Any, value: Any, message: str) -> None:
    description = copy.deepcopy(llama.description)
    holder = description
    for key in entry[:-1]:
        holder = holder[key]
    holder[entry[-1]] = value
    with Largest() as largest, pytest.raises(ValueError, match=message):
        skl.load_indexers(llama.forged(description), llama.model)
    assert largest.bytes < SMALL


def test_an_entry_that_is_missing_is_named(llama: Saved) -> None:
    description = copy.deepcopy(llama.description)
    del description["model"]["hidden_size"], description["model"]["name"]
    with pytest.raises(ValueError, match=r"model of .*indexers.json lacks name, hidden_size"):
        skl.load_indexers(llama.forged(description), llama.model)


def test_a_model_that_holds_no_numbers_is_no_model_of_anybody(llama: Saved) -> None:
    model = tiny_model("llama")
    model.model.layers[0].self_attn.q_proj.weight.data.fill_(torch.nan)
    with pytest.raises(ValueError, match="whose weights are not those of this model"):
        skl.load_indexers(llama.forged(llama.description), model)
    with pytest.raises(ValueError, match="must be a finite number"):
        skl.save_indexers(llama.path / "broken", model, skl.new_indexers(model, head_dim=8), IndexerSelector(5, 2))


def test_optional_entries_may_be_missing(llama: Saved) -> None:
    sparse = skl.sparsify(llama.model, IndexerSelector(5, 2), skl.new_indexers(llama.model, head_dim=8))
    sparse.save_indexers(llama.path / "plain")
    sparse.remove()
    description = json.loads((llama.path / "plain" / folders.DESCRIPTION).read_text())
    del description["indexer"]["heads"], description["indexer"]["temperature"], description["selector"]["normalise"]
    folder = llama.forged(description, (llama.path / "plain" / folders.WEIGHTS).read_bytes())
    indexers, selector = skl.load_indexers(folder, llama.model)
    assert selector == IndexerSelector(5, 2)
    assert all(
        torch.equal(a, b) for a, b in zip(indexers.parameters(), sparse.indexers.parameters(), strict=True)
    )  # fmt: skip


def elsewhere(llama: Saved, tmp_path: Path, indexers: Any) -> Path:
    """A model whose config says that its indexers are there, beside a folder of indexers that are not its."""
    shutil.copytree(llama.path / "model", tmp_path / "model")
    shutil.copytree(llama.path / "indexers", tmp_path / "elsewhere")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["streamkl"]["indexers"] = indexers
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    return tmp_path / "model"


@pytest.mark.parametrize(
    "where", ["../elsewhere", "/etc", "streamkl/../../elsewhere", "", ".", "C:/x", "..\\elsewhere", 3, ["streamkl"]]
)
def test_indexers_outside_of_the_models_folder_are_refused(llama: Saved, tmp_path: Path, where: Any) -> None:
    model = elsewhere(llama, tmp_path, where)
    with pytest.raises(ValueError, match=r"indexers of 'streamkl' in the config of .* must be"):
        AutoModelForCausalLM.from_pretrained(model)


def test_an_absolute_path_to_whole_indexers_is_refused(llama: Saved, tmp_path: Path) -> None:
    model = elsewhere(llama, tmp_path, str(tmp_path / "elsewhere"))
    with pytest.raises(ValueError, match="must be a folder in the model's: got"):
        AutoModelForCausalLM.from_pretrained(model)


def test_a_link_that_leaves_the_models_folder_is_refused(llama: Saved, tmp_path: Path) -> None:
    model = elsewhere(llama, tmp_path, "link")
    (model / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="is a link that leaves the model's folder"):
        AutoModelForCausalLM.from_pretrained(model)
    (model / "link").unlink()
    (model / "link").symlink_to("streamkl")  # which stays inside
    assert AutoModelForCausalLM.from_pretrained(model).streamkl.selector == IndexerSelector(5, 2)


def test_a_snapshot_in_the_hubs_cache_is_links_to_blobs_and_loads(llama: Saved, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "models--x--y" / "blobs", tmp_path / "models--x--y" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    for n, file in enumerate(path for path in (llama.path / "model").rglob("*") if path.is_file()):
        link = snapshot / file.relative_to(llama.path / "model")
        link.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, blobs / str(n))
        link.symlink_to(os.path.relpath(blobs / str(n), link.parent))
    assert AutoModelForCausalLM.from_pretrained(snapshot).streamkl.selector == IndexerSelector(5, 2)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("oracle", "kind of the selector must be one of"),
        ({"kind": ["oracle"], "topk": 1, "query_block": 1}, "kind of the selector must be one of"),
        ({"kind": "oracle", "topk": 1}, "the selector lacks query_block"),
        ({"kind": "oracle", "topk": 1, "block": 1}, "the selector lacks query_block"),
        ({"kind": "oracle", "topk": 1, "query_block": 1, "block": 1}, "does not know: .'block'"),
        (
            {"kind": "oracle", "topk": True, "query_block": 1},
            "topk of the selector must be an integer from .*: got True",
        ),
        ({"kind": "random", "topk": 1, "query_block": 1, "seed": 1 << 64}, "seed of the selector must be an integer"),
    ],
)
def test_what_describes_no_selector_is_refused(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_json(value)
