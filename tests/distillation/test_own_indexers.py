"""Families with indexers of their own, trained in place."""

from __future__ import annotations

import functools
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

from streamkl.distillation import teacher
from streamkl.distillation.indexers import make_indexers
from streamkl.distillation.model import Distiller
from streamkl.distillation.run import distill
from streamkl.distillation.settings import Settings
from streamkl.integrations.transformers import load_indexers, sparsify
from streamkl.integrations.transformers.families import Inputs, family_of
from streamkl.sparse import IndexTensors
from streamkl.testing.tiny_models import OWN_INDEXERS

PLAIN = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
assert torch.isfinite(model(torch.arange(40)[None]).logits).all()
assert "streamkl" not in sys.modules
"""


def load(folder: Path) -> Any:
    """A model in plain transformers."""
    return teacher.auto_class(AutoConfig.from_pretrained(folder)).from_pretrained(folder).eval()


def held_out_kl(folder: Path, ids: Tensor) -> float:
    """The sum of the layers' KL of a saved model's own indexers."""
    model = load(folder)
    family = family_of(model.config)
    indexers = make_indexers(model, family, Settings(model="m", text=["t"], output="o"))
    return float(Distiller(model, family, indexers)(ids)["loss"])


@torch.no_grad()
def selections(model: Any, ids: Tensor) -> dict[int, tuple[Any, Inputs]]:
    """What each own indexer of a model in plain transformers returns, and its inputs."""
    found: dict[int, tuple[Any, Inputs]] = {}
    of = family_of(model.config)

    def note(number: int, own: Any, args: tuple, kwargs: dict[str, Any], selected: Any) -> None:
        given = inspect.signature(type(own).forward).bind(own, *args, **kwargs).arguments
        found[number] = selected, of.own_inputs(own, given)

    for number, module in of.attentions(model).items():
        if of.own(module) is not None:
            of.own(module).register_forward_hook(functools.partial(note, number), with_kwargs=True)
    model(input_ids=ids, use_cache=False)
    return found


def as_mask(selected: Tensor, tokens: int, size: int = 1) -> Tensor:
    """``[..., N, N]`` of bool from selected keys, or blocks of ``size`` keys; -1 is none, and keys ahead are hidden.

    A mask ``[B, 1, N, N]`` of bool loses its heads.
    """
    if selected.dtype == torch.bool:
        return selected[:, 0]
    keys = (selected.long()[..., None] * size + torch.arange(size)).flatten(-2)
    keys = keys.masked_fill((keys < 0) | (keys >= tokens), tokens)
    chosen = torch.zeros(*keys.shape[:-1], tokens + 1, dtype=torch.bool).scatter(-1, keys, True)[..., :-1]
    return chosen & torch.ones(tokens, tokens, dtype=torch.bool).tril()


def tied(of: Any, attention: Any, index: IndexTensors, masks: tuple[Tensor, Tensor]) -> Tensor:
    """``[B, N]``: whether two selections differ in keys of score 0 alone, of which a relu makes many."""
    scores = torch.einsum("bjqd,bkd->bjqk", index.index_q, index.index_k).relu()
    zero = (scores if index.index_w is None else scores * index.index_w.mT[..., None]).sum(1) == 0
    zero = of.attended(attention, torch.where(zero, torch.arange(zero.shape[2]), -1), zero.shape[1])
    return ((masks[0] ^ masks[1]) & ~as_mask(zero, zero.shape[1])).any(-1).logical_not()


@pytest.mark.slow
@pytest.mark.parametrize("family", OWN_INDEXERS)
def test_thirty_steps_take_thirty_percent_off_the_held_out_kl_and_plain_transformers_selects_by_what_was_trained(
    tiny: Any, tmp_path: Path, family: str
) -> None:
    model, run = tiny.sharp(tmp_path / "model", family), tmp_path / "run"
    text, held_out = tiny.prose(tmp_path / "prose.txt"), tmp_path / "held_out.txt"
    held_out.write_text(text.read_text()[-400:])
    text.write_text(text.read_text()[:-400])
    ids = AutoTokenizer.from_pretrained(model)(held_out.read_text(), return_tensors="pt").input_ids[:, :384].view(4, 96)
    options = {"steps": 30, "batch": 4, "lr": 4e-2, "save_every": 30, "log_every": 30, "head_dim": 64, "query_block": 1}
    result = distill(tiny.settings(model, text, run, **options))
    assert result.model is not None
    before, after = held_out_kl(model, ids), held_out_kl(result.model, ids)
    print(f"{family}: held-out KL {before:.3f}, after 30 steps {after:.3f}")
    assert after <= 0.7 * before

    if not family_of(load(model).config).not_sparse:
        sparse = sparsify(load(model), indexers=result.indexers)
        sparse.model(ids)

    weights = [load_file(folder / "model.safetensors") for folder in (model, result.model)]
    assert weights[0].keys() == weights[1].keys()
    changed = {name for name in weights[0] if not torch.equal(weights[0][name], weights[1][name])}
    assert changed
    assert all(".indexer." in name for name in changed)
    assert len({tuple((name, x.dtype) for name, x in each.items()) for each in weights}) == 1

    plain, trained = load(result.model), load(model)
    of, tokens = family_of(plain.config), ids.shape[1]
    indexers, _ = load_indexers(result.indexers, trained)
    untrained = selections(load(model), ids)
    for number, (selected, inputs) in selections(plain, ids).items():
        indexer = indexers.of(number)
        assert indexer is not None
        size = getattr(indexer, "block_size", 1)
        attention = of.attentions(plain)[number]
        with torch.no_grad():
            index = of.project(indexer, inputs)
            ours = of.attended(attention, of.select(indexer, index, of.own_topk(plain.config)), tokens)
        masks = as_mask(ours, tokens), as_mask(selected, tokens, size)
        assert torch.equal(*masks) or tied(of, attention, index, masks).all()
        assert not torch.equal(as_mask(selected, tokens, size), as_mask(untrained[number][0], tokens, size))
    if family == "glm_moe_dsa":  # one process is enough to show it
        subprocess.run([sys.executable, "-c", PLAIN, str(result.model)], check=True)


def test_on_the_selected_keys_a_run_learns_and_needs_its_topk_to_resume(tiny: Any, prose: Path, tmp_path: Path) -> None:
    model, run = tiny.glm_moe_dsa(tmp_path / "model"), tmp_path / "run"
    options: dict[str, Any] = {"head_dim": 64, "keys": "selected", "lr": 1e-2, "save_every": 4}
    result = distill(tiny.settings(model, prose, run, steps=4, **options))
    assert result.model is not None
    changed = [load_file(folder / "model.safetensors") for folder in (model, result.model)]
    assert any(".indexer." in name and not torch.equal(x, changed[1][name]) for name, x in changed[0].items())
    with pytest.raises(ValueError, match="was made with topk = 0: got 9"):
        distill(tiny.settings(model, prose, run, steps=4, resume=True, topk=9, **options))


def test_settings_of_new_indexers_are_refused_where_a_model_has_its_own(tiny: Any, prose: Path, tmp_path: Path) -> None:
    model = tiny.deepseek_v32(tmp_path / "model")
    with pytest.raises(ValueError, match="has indexers of its own: head_dim, init cannot be chosen"):
        distill(tiny.settings(model, prose, tmp_path / "run", init="teacher"))


def test_a_model_that_no_run_wrote_is_not_replaced_by_the_trained_one(tiny: Any, prose: Path, tmp_path: Path) -> None:
    model = tiny.deepseek_v32(tmp_path / "model")
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    with pytest.raises(ValueError, match=r"model is there already and was not written by a run"):
        distill(tiny.settings(model, prose, tmp_path, steps=1, head_dim=64))
    assert {path.name: path.read_bytes() for path in model.iterdir()} == before
    assert not (tmp_path / "settings.json").exists()
