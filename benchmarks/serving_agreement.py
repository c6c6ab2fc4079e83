"""Whether vLLM serves a sparse model as transformers runs it: selected keys, log-probabilities, needles.

The two have environments of their own, so it takes two commands. The first runs the contexts through transformers and
keeps what it found, the second runs them through vLLM and compares::

    python benchmarks/serving_agreement.py transformers --model M --indexers run/indexers --file f.pt --text book.txt
    python benchmarks/serving_agreement.py vllm --model M --indexers run/indexers --file f.pt

The keys that both select, of the first contexts, and the log-probabilities of the first token of an answer are compared
for prompts that are whole, in chunks of 256, in chunks that would end within query blocks (250), with their prefix in
the cache, and in one batch with others. Needles are counted over all contexts. In float32 rounding turns near-ties of
the scores, so a few keys differ. Before that, a budget of all keys is held to vLLM's own attention.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from streamkl.evaluation import tasks
from streamkl.evaluation.haystack import Book, Haystack
from streamkl.selfcheck.engine import SETTINGS, Engine, Recorder

WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunks of 256": {"max_num_batched_tokens": 256},
    "chunks of 250": {"max_num_batched_tokens": 250},
    "cached": {"enable_prefix_caching": True},
    "together": {"max_num_batched_tokens": 1024},
}
ANSWER = 7
"""Tokens of an answer."""


def membership(found: Tensor, tokens: int) -> Tensor:
    """Which keys of ``[blocks, topk]`` are selected: ``[blocks, tokens]``."""
    seen = torch.zeros(len(found), tokens + 1, dtype=torch.bool)
    return seen.scatter_(1, found.long().where(found >= 0, tokens), True)[:, :tokens]


def through_transformers(given: argparse.Namespace) -> None:
    """Runs the contexts, and writes what was found to a file."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from streamkl.integrations.transformers import capture_attention, load_indexers, sparsify

    tokenizer = AutoTokenizer.from_pretrained(given.model)
    model: Any = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).eval()
    indexers, selector = load_indexers(given.indexers, model)
    selector = dataclasses.replace(selector, topk=given.topk, query_block=given.query_block)  # pyright: ignore
    haystack = Haystack([Book(Path(given.text).name, Path(given.text).read_text(encoding="utf-8"))], tokenizer)
    sparsify(model, selector, indexers, decode="dense")
    contexts = []
    for number in range(given.contexts):
        context = tasks.build("needle", given.tokens, number, seed=0, haystack=haystack)
        ids, kept = torch.tensor([context.ids]), []
        with torch.no_grad():
            if number < given.recorded:
                with capture_attention(model) as captured:
                    model(ids, use_cache=False, logits_to_keep=1)
                kept = [captured[layer].indices[0] for layer in sorted(captured)]
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=ANSWER, do_sample=False, output_logits=True,
                return_dict_in_generate=True,
            )  # fmt: skip
        text = tokenizer.decode(out.sequences[0, len(context.ids) :], skip_special_tokens=True)
        contexts.append({
            "context": tuple(context), "right": tasks.is_right(context, text), "selected": kept,
            "logprobs": out.logits[0][0].float().log_softmax(-1),
        })  # fmt: skip
        print(f"{number + 1} of {given.contexts}: {sum(c['right'] for c in contexts)} right", flush=True)
    torch.save(contexts, given.file)


def agreement(recorders: list[Recorder], contexts: list[dict[str, Any]]) -> tuple[int, int]:
    """How many selected keys are those of transformers, and how many there are.

    A part of a batch is held to the context that it agrees with most: no two contexts have much in common.
    """
    same = total = 0
    tokens = len(tasks.Context(*contexts[0]["context"]).ids)
    for layer, recorder in enumerate(recorders):
        masks = [membership(context["selected"][layer], tokens) for context in contexts]
        for start, found in recorder.kept:
            first = start // recorder.query_block
            ours = membership(found, tokens)
            same += max(int((ours & mask[first : first + len(ours)]).sum()) for mask in masks)
            total += int(ours.sum())
    return same, total


def with_all_keys(given: argparse.Namespace, contexts: list[dict[str, Any]], streamkl: dict[str, Any]) -> None:
    """Compares a budget of all keys with vLLM's own attention, on beginnings of contexts."""
    lengths = torch.linspace(50, given.tokens * 0.98, 20).int().tolist()
    ids = [tasks.Context(*contexts[n % len(contexts)]["context"]).ids for n in range(len(lengths))]
    prompts = [each[:length] for each, length in zip(ids, lengths, strict=True)]
    answers = []
    every_key = {**streamkl, "selector": {**streamkl["selector"], "topk": given.tokens + 64}}
    for settings in (None, every_key):
        engine = Engine(Path(given.model), settings, max_model_len=given.tokens + 64)
        answers.append(engine.generate(prompts, ANSWER))
        engine.close()
    worst = max(dense.difference(sparse) for dense, sparse in zip(*answers, strict=True))
    equal = sum(dense.tokens == sparse.tokens for dense, sparse in zip(*answers, strict=True))
    print(
        f"With all keys, {len(prompts)} prompts of {lengths[0]} to {lengths[-1]:,} tokens: {equal} answers equal those "
        f"of vLLM's own attention, log-probabilities within {worst:.1e}.\n",
        flush=True,
    )


def through_vllm(given: argparse.Namespace) -> None:
    """Runs the contexts, and compares with the file."""
    os.environ.update(SETTINGS)
    contexts = torch.load(given.file)
    recorded = [context for context in contexts if context["selected"]]
    streamkl = {
        "indexers": str(Path(given.indexers).resolve()),
        "selector": {"kind": "indexer", "topk": given.topk, "query_block": given.query_block, "normalise": True},
    }
    with_all_keys(given, contexts, streamkl)
    print(f"| prompts | keys as in transformers, {len(recorded)} contexts | log-probabilities | needles |")
    print("| --- " * 4 + "|", flush=True)
    for way, options in WAYS.items():
        engine = Engine(
            Path(given.model), streamkl, max_model_len=given.tokens + 64, skip_tokenizer_init=False, **options
        )  # fmt: skip
        prompts = [tasks.Context(*each["context"]).ids for each in recorded]
        if way == "cached":
            engine.generate(prompts, ANSWER, together=False)
        with engine.recording() as recorders:
            answers = engine.generate(prompts, ANSWER, together=way == "together")
        same, total = agreement(recorders, recorded)
        worst = max(
            abs(value - float(context["logprobs"][token]))
            for answer, context in zip(answers, recorded, strict=True)
            for token, value in answer.logprobs[0].items()
        )
        needles = ""
        if way == "whole":
            asked = [tasks.Context(*each["context"]) for each in contexts]
            tokenizer = engine.llm.get_tokenizer()
            found = engine.generate([context.ids for context in asked], ANSWER, together=False)
            texts = [tokenizer.decode(answer.tokens, skip_special_tokens=True) for answer in found]
            right = sum(tasks.is_right(context, text) for context, text in zip(asked, texts, strict=True))
            needles = f"{right} of {len(contexts)}; transformers {sum(c['right'] for c in contexts)}"
        cached = f", {sum(answer.cached for answer in answers):,} tokens" if way == "cached" else ""
        shown = f"{same:,} of {total:,}, {same / total:.4%}"
        print(f"| {way}{cached} | {shown} | within {worst:.1e} | {needles} |", flush=True)
        engine.close()


def main() -> None:
    """Runs one of the two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", choices=("transformers", "vllm"))
    for name in ("model", "indexers", "file"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--text", help="a book, for transformers")
    for name, default in (("contexts", 50), ("recorded", 4), ("tokens", 2048), ("topk", 512), ("query-block", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    through_transformers(given) if given.which == "transformers" else through_vllm(given)


if __name__ == "__main__":
    main()
