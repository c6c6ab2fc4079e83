"""The joint stage: the model learns through its sparse attention, its indexers on the keys that they selected."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM

from streamkl.distillation.arguments import training_arguments
from streamkl.distillation.finetune import finetune
from streamkl.distillation.joint import JointModel
from streamkl.distillation.joint_trainer import JointTrainer
from streamkl.distillation.settings import FinetuneSettings
from streamkl.integrations.transformers import new_indexers, sparsify
from streamkl.integrations.transformers.capture import capture_attention
from streamkl.integrations.transformers.checkpointing import checkpoint_activations
from streamkl.integrations.transformers.families import Inputs
from streamkl.sparse import IndexerSelector
from streamkl.testing.tiny_models import OWN_INDEXERS, tiny_model

TOKENS, TOPK, BLOCK = 48, 12, 8


@pytest.fixture(scope="module")
def indexers(tiny: Any, llama: Path, prose: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of indexers of the tiny Llama, hardly trained."""
    from streamkl.distillation.run import distill

    run = tmp_path_factory.mktemp("distilled") / "run"
    return str(distill(tiny.settings(llama, prose, run, steps=2, topk=20, query_block=8)).indexers)


def settings(model: Path, text: Path, output: Path, indexers: str, **options: Any) -> FinetuneSettings:
    small: dict[str, Any] = {
        "length": 64, "steps": 6, "batch": 2, "device": "cpu", "log_every": 1, "save_every": 2, "warmup": 1,
        "topk": 20, "query_block": 8, "lr": 1e-3, "index_lr": 1e-2, "set": ["disable_tqdm=true"],
    }  # fmt: skip
    return FinetuneSettings(
        model=str(model), text=[str(text)], output=str(output), indexers=indexers, **{**small, **options}
    )


def joint(**options: Any) -> tuple[JointModel, torch.Tensor]:
    """A tiny model in float64, and tokens."""
    torch.manual_seed(0)
    model = tiny_model("llama", **options).double()
    made = new_indexers(model, heads=2, head_dim=16).double()
    ids = torch.randint(32, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    return JointModel(sparsify(model, IndexerSelector(TOPK, BLOCK), made)), ids


def gradients(model: JointModel, ids: torch.Tensor) -> tuple[float, dict[str, torch.Tensor]]:
    model.train()
    loss = float(model(ids, backward=torch.Tensor.backward)["loss"])
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss, found


def test_gradients_of_all_weights_are_those_of_materialised_attention() -> None:
    model, ids = joint()
    with torch.no_grad(), capture_attention(model.backbone) as captured:
        model.backbone(ids, use_cache=False)
    masks = {}
    causal = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    for layer, attended in captured.items():
        assert attended.indices is not None
        chosen = torch.zeros(2, TOKENS // BLOCK, TOKENS, dtype=torch.bool)
        indices = attended.indices.long()
        for at, row in enumerate(indices.flatten(0, 1)):
            chosen.view(-1, TOKENS)[at, row[row >= 0]] = True
        masks[layer] = chosen.repeat_interleave(BLOCK, 1) & causal
    ours = gradients(model, ids)

    kls: dict[int, torch.Tensor] = {}
    inputs: dict[int, Inputs] = {}
    sparse = model.sparse

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, *, scaling: float, **kwargs: Any) -> Any:
        n = module.layer_idx
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        logits = (query @ key.transpose(-1, -2) * scaling).masked_fill(~masks[n][:, None], -torch.inf)
        weights = logits.softmax(-1)
        target = weights.detach().mean(1)
        index = sparse.family.project(sparse.layers[n].indexer, inputs[n])
        scores = torch.einsum("bhqd,bkd->bhqk", index.index_q, index.index_k) * index.index_k.shape[-1] ** -0.5
        if sparse.layers[n].indexer.activation == "relu":
            scores = scores.relu()
        scores = torch.einsum("bhqk,bqh->bqk", scores, index.index_w) if index.index_w is not None else scores[:, 0]
        student = scores.masked_fill(~masks[n], -torch.inf).log_softmax(-1).masked_fill(~masks[n], 0.0)
        kls[n] = (torch.xlogy(target, target) - target * student).sum(-1).mean()
        return (weights @ value).transpose(1, 2), None

    def keep(module: Any, args: Any, kwargs: Any) -> None:
        inputs[module.layer_idx] = Inputs(kwargs["hidden_states"].detach(), kwargs["position_embeddings"])

    AttentionInterface.register("materialised_test", attend)
    AttentionMaskInterface.register("materialised_test", lambda *args, **kwargs: None)
    for layer in sparse.layers.values():
        layer.module.register_forward_pre_hook(keep, with_kwargs=True)
    model.backbone.set_attn_implementation("materialised_test")
    loss = model.backbone(input_ids=ids, labels=ids, use_cache=False).loss + sum(kls.values())
    loss.backward()
    theirs = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert ours[0] == pytest.approx(loss.item(), abs=1e-12)
    assert ours[1].keys() == theirs.keys() == {name for name, _ in model.named_parameters()}
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[1][name], gradient, rtol=1e-9, atol=1e-12, msg=name)


def test_what_would_shard_the_model_is_refused_in_its_own_words(llama: Path, prose: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="fsdp would have no effect: each process has the whole model"):
        training_arguments(settings(llama, prose, tmp_path / "run", "", set=["fsdp=full_shard"]))


def test_gradients_are_unscaled_once_and_both_groups_are_clipped(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = joint()
    groups = [list(part.parameters()) for part in (model.backbone, model.indexers)]
    trainer: Any = object.__new__(JointTrainer)
    trainer.optimizer = torch.optim.SGD([{"params": group} for group in groups])
    trainer.accelerator, trainer.args = Accelerator(cpu=True), SimpleNamespace(max_grad_norm=1e-3)
    monkeypatch.setattr(Accelerator, "mixed_precision", "fp16")  # which accelerate has on GPUs alone
    trainer.accelerator.native_amp, trainer.accelerator._optimizers = True, [trainer.optimizer]
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scale = trainer.accelerator.scaler.scale
    model(ids, backward=lambda loss: scale(loss).backward())
    trainer._clip_grad_norm(model)
    for group in groups:
        norm = torch.stack([p.grad.norm() for p in group if p.grad is not None]).norm()
        assert float(norm) == pytest.approx(1e-3, rel=1e-2)


def test_checkpointing_leaves_loss_and_gradients_as_they_are() -> None:
    model, ids = joint()
    loss, plain = gradients(model, ids)
    checkpoint_activations(model.backbone)
    again, repeated = gradients(model, ids)
    assert loss == again
    assert plain.keys() == repeated.keys()
    for name in plain:
        assert torch.equal(plain[name], repeated[name]), name


def test_with_a_budget_of_all_keys_the_model_has_the_gradients_of_dense_attention() -> None:
    torch.manual_seed(0)
    model = tiny_model("llama").double()
    ids = torch.randint(32, (1, TOKENS))
    model.train()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    dense = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    joint_model = JointModel(sparsify(model, IndexerSelector(64, 8), new_indexers(model, head_dim=16).double()))
    _, found = gradients(joint_model, ids)
    for name, gradient in dense.items():
        torch.testing.assert_close(found[f"backbone.{name}"], gradient, rtol=1e-9, atol=1e-12, msg=name)


def curves(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "curves.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("lora", [0, 4])
def test_a_run_lowers_both_losses_and_its_result_is_a_sparse_model(
    llama: Path, prose: Path, indexers: str, tmp_path: Path, lora: int
) -> None:
    if lora:
        pytest.importorskip("peft")
    result = finetune(
        settings(
            llama, prose, tmp_path / "run", indexers, steps=30, lora=lora, lr=3e-3 if lora else 1e-3, save_every=30
        )
    )
    first, last = curves(tmp_path / "run")[0], curves(tmp_path / "run")[-1]
    print({name: (first[name], last[name]) for name in ("lm", "kl", "recall")})
    assert last["lm"] < first["lm"] - 0.1
    assert last["kl"] < first["kl"]
    model = AutoModelForCausalLM.from_pretrained(result.model)
    sparse: Any = model.streamkl
    assert (sparse.selector.topk, sparse.selector.query_block) == (20, 8)
    before = load_file(Path(llama) / "model.safetensors")
    after = load_file(result.model / "model.safetensors")
    assert before.keys() == after.keys()
    assert {name: x.dtype for name, x in before.items()} == {name: x.dtype for name, x in after.items()}
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert torch.isfinite(model(torch.arange(40)[None]).logits).all()


@pytest.mark.slow
def test_a_run_that_is_interrupted_and_resumed_ends_with_the_same_bits(
    llama: Path, prose: Path, indexers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = finetune(settings(llama, prose, tmp_path / "whole", indexers))
    forward, calls = JointModel.forward, []

    def interrupted(self: JointModel, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return forward(self, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(JointModel, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            finetune(settings(llama, prose, tmp_path / "cut", indexers))
    cut = finetune(settings(llama, prose, tmp_path / "cut", indexers, resume=True))
    for name in ("model.safetensors", "streamkl/indexers.safetensors"):
        assert (whole.model / name).read_bytes() == (cut.model / name).read_bytes(), name
    assert [line["loss"] for line in curves(tmp_path / "whole")] == [line["loss"] for line in curves(tmp_path / "cut")]
    with pytest.raises(ValueError, match="was made with topk = 20: got 24"):
        finetune(settings(llama, prose, tmp_path / "cut", indexers, topk=24, resume=True))


def test_a_model_with_indexers_of_its_own_needs_no_folder(tiny: Any, prose: Path, tmp_path: Path) -> None:
    model = tiny.deepseek_v32(tmp_path / "model")
    result = finetune(settings(model, prose, tmp_path / "run", "", topk=0, steps=12, query_block=64))
    first, last = curves(tmp_path / "run")[0], curves(tmp_path / "run")[-1]
    assert last["kl"] < first["kl"]
    before, after = (load_file(folder / "model.safetensors") for folder in (model, result.model))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert any(".indexer." in name for name in changed)
    assert any(".indexer." not in name for name in changed)


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in ("minimax_m3_vl", "hy_v4") if name in OWN_INDEXERS])
def test_neither_do_those_that_select_blocks_or_have_sinks(family: str, tiny: Any, prose: Path, tmp_path: Path) -> None:
    model = tiny.sharp(tmp_path / "model", family)
    finetune(settings(model, prose, tmp_path / "run", "", topk=0, steps=12, query_block=1))
    first, last = curves(tmp_path / "run")[0], curves(tmp_path / "run")[-1]
    assert last["kl"] < first["kl"]


def test_a_model_without_indexers_says_what_is_missing(llama: Path, prose: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is nothing to select keys with"):
        finetune(settings(llama, prose, tmp_path / "run", ""))


@pytest.mark.slow
def test_two_ranks_have_the_losses_of_one_with_the_same_global_batch(
    llama: Path, prose: Path, indexers: str, tmp_path: Path
) -> None:
    alone = settings(llama, prose, tmp_path / "alone", indexers, steps=4)
    finetune(alone)
    flags = {"model": llama, "text": prose, "output": tmp_path / "two", "indexers": indexers, "length": 64, "steps": 4,
             "batch": 1, "device": "cpu", "log-every": 1, "warmup": 1, "topk": 20, "query-block": 8, "lr": 1e-3,
             "index-lr": 1e-2, "threads": 1}  # fmt: skip
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "streamkl",
        "finetune", *(part for name, value in flags.items() for part in (f"--{name}", str(value))),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [torch.tensor([line["lm"] for line in curves(tmp_path / run)]) for run in ("alone", "two")]
    one, two = (load_file(tmp_path / run / "model" / "model.safetensors") for run in ("alone", "two"))
    print("language-model losses of one rank and of two:", *found)
    torch.testing.assert_close(*found, rtol=1e-5, atol=0)
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=0, atol=2e-4, msg=name)  # a fifth of a step


def test_with_all_keys_the_model_learns_what_its_dense_twin_learns(
    indexers: str, llama: Path, prose: Path, tmp_path: Path
) -> None:
    """``benchmarks/finetune_dense.py`` is what a sparse model is compared with."""
    twin = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "finetune_dense.py"))
    given: dict[str, Any] = {"steps": 3, "accumulation": 2, "topk": 64}
    finetune(settings(llama, prose, tmp_path / "sparse", indexers, **given))
    twin["run"](settings(llama, prose, tmp_path / "dense", "", **given))
    before, sparse, dense = (
        AutoModelForCausalLM.from_pretrained(folder).state_dict()
        for folder in (llama, tmp_path / "sparse" / "model", tmp_path / "dense" / "model")
    )
    for name, weight in dense.items():
        moved = (weight - before[name]).abs().max()
        assert (sparse[name] - weight).abs().max() <= 1e-3 * moved, name
    assert any(not torch.equal(dense[name], before[name]) for name in dense)
