"""What is refused when a server starts, in a sentence."""

from __future__ import annotations

import json
import shutil

import pytest
import torch


def started(path, streamkl, **options):
    """The config of an engine that is about to start."""
    from vllm.engine.arg_utils import EngineArgs

    defaults = {"dtype": "float32", "max_model_len": 2304, "enforce_eager": True, "skip_tokenizer_init": True}
    return EngineArgs(
        model=str(path), hf_overrides={"streamkl": streamkl}, **{**defaults, **options}
    ).create_engine_config()


def test_another_version_of_vllm_is_refused(tiny, monkeypatch) -> None:
    import vllm

    model = tiny()
    monkeypatch.setattr(vllm, "__version__", "0.33.1")
    with pytest.raises(ValueError, match=r"plugin is for vLLM 0\.32, and 0\.33\.1 is installed"):
        started(model.path, {"indexers": str(model.indexers)})


def test_the_oracle_under_tensor_parallelism_is_refused(tiny) -> None:
    with pytest.raises(ValueError, match="the oracle selects by the mean of all heads, which no rank"):
        started(tiny().path, {"selector": {"kind": "oracle", "topk": 64, "query_block": 32}}, tensor_parallel_size=2)


def test_indexers_under_pipeline_parallelism_are_refused(tiny) -> None:
    model = tiny()
    with pytest.raises(ValueError, match="of which a rank of pipeline parallelism has a part"):
        started(model.path, {"indexers": str(model.indexers)}, pipeline_parallel_size=2)


@pytest.mark.parametrize(
    ("streamkl", "sentence"),
    [
        ({}, "neither a selector nor a folder of indexers"),
        ({"selector": {"kind": "random", "topk": 64, "query_block": 32}}, "random keys are not served"),
        ({"selector": {"kind": "indexer", "topk": 64, "query_block": 32}}, "needs a folder of indexers"),
        ({"selector": {"kind": "window", "topk": 64, "query_block": 32}, "fast": True}, "does not know"),
        ({"indexers": "nowhere"}, "there is no folder of indexers at nowhere"),
        (
            {"selector": {"kind": "window", "topk": 8192, "query_block": 4096}},
            "a chunk of a prompt must hold a query block of 4096 tokens",
        ),
    ],
)
def test_wrong_settings_are_refused(streamkl, sentence, tiny) -> None:
    with pytest.raises(ValueError, match=sentence):
        started(tiny().path, streamkl, max_num_batched_tokens=2304)


def test_a_scheduler_of_ones_own_is_refused(tiny) -> None:
    model = tiny()
    with pytest.raises(ValueError, match="chunks of prompts must end with query blocks"):
        started(model.path, {"indexers": str(model.indexers)}, scheduler_cls="vllm.v1.core.sched.scheduler.Scheduler")


def test_pages_that_query_blocks_do_not_fill_are_refused_with_prefix_caching(tiny, engine) -> None:
    model = tiny()
    selector = {"kind": "indexer", "topk": 96, "query_block": 48}
    with pytest.raises(ValueError, match="pages of 128 tokens and query blocks of 48"):
        engine(model.path, {"indexers": str(model.indexers), "selector": selector}, enable_prefix_caching=True)


def test_indexers_of_another_model_are_refused(tiny, engine, tmp_path) -> None:
    from safetensors.torch import load_file, save_file

    model = tiny()
    shutil.copytree(model.path, tmp_path / "other")
    weights = load_file(tmp_path / "other" / "model.safetensors")
    weights = {name: torch.randn_like(weight) if "q_proj" in name else weight for name, weight in weights.items()}
    save_file(weights, tmp_path / "other" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="whose weights are not those of this model"):
        engine(tmp_path / "other", {"indexers": str(model.indexers)})


def test_a_config_that_leaves_its_folder_is_refused(tiny, tmp_path) -> None:
    from vllm.engine.arg_utils import EngineArgs

    model = tiny()
    shutil.copytree(model.path, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    selector = {"kind": "indexer", "topk": 96, "query_block": 32}
    config["streamkl"] = {"selector": selector, "decode": "dense", "indexers": str(model.indexers)}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="must be a folder in the model's"):
        EngineArgs(model=str(tmp_path / "model"), dtype="float32", skip_tokenizer_init=True).create_engine_config()
