"""Tiny checkpoints of random weights with folders of random indexers, for servers to serve."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

VOCAB = 97
"""How many tokens there are."""
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 4096, "initializer_range": 0.2,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}


class Tiny(NamedTuple):
    """A checkpoint of random weights with a folder of random indexers, and what it is made of.

    Attributes:
        path: The folder of the checkpoint.
        indexers: The folder of the indexers.
        model: The model of transformers.
        modules: The indexers, by the number of their layer.
    """

    path: Path
    indexers: Path
    model: Any
    modules: dict[int, Any]


def make(family: str, place: Path, heads: int = 1) -> Tiny:
    """Writes a checkpoint and a folder of indexers.

    Args:
        family: One of `FAMILIES`.
        place: The folder for both.
        heads: Of an indexer.
    """
    import transformers

    from streamkl.indexer import HeadIndexer, LightningIndexer
    from streamkl.integrations.saved import folder
    from streamkl.integrations.saved.description import describe_indexer, describe_model
    from streamkl.integrations.saved.selectors import to_json
    from streamkl.sparse import IndexerSelector

    name = FAMILIES[family]
    torch.manual_seed(0)
    options = {**SIZES, "sliding_window": None} if family == "mistral" else SIZES
    if family == "qwen2":
        options = {**options, "hidden_size": 128}  # its heads have the width that is left for each
    config = getattr(transformers, f"{name}Config")(**options)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for parameter in model.parameters():  # biases and norms are not at 0 and 1
        parameter.data += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(place / "model")
    width = config.hidden_size
    made = [
        HeadIndexer(width, head_dim=32, rope_dim=32)
        if heads == 1
        else LightningIndexer(width, heads=heads, head_dim=32, rope_dim=16)
        for _ in range(config.num_hidden_layers)
    ]
    weights = {f"layers.{n}.{key}": value for n, each in enumerate(made) for key, value in each.state_dict().items()}
    first = model.model.layers[0].self_attn.q_proj.weight.detach().flatten()[:64]
    description = {
        "streamkl": "0", "family": family, "model": describe_model(config, first),
        "indexer": describe_indexer(made[0]), "layers": list(range(len(made))),
        "selector": to_json(IndexerSelector(topk=96, query_block=32)),
    }  # fmt: skip
    indexers = folder.write(place / "indexers", weights, description)
    return Tiny(place / "model", indexers, model, dict(enumerate(made)))


def random_prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Prompts of random tokens."""
    rng = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (length,), generator=rng).tolist() for length in lengths]
