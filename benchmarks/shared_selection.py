r"""Needles that are found where queries share their top-k, by the rule that ranks the keys of a query block.

    python benchmarks/shared_selection.py --model M --indexers run/indexers --text book.txt --output shared.jsonl \
        --ways probability:512:64 robin:512:64 probability:448:16

A way is a rule, a number of keys and a query block. All read a context up to its last 64 tokens by the engine's own
rule (512 keys for blocks of 64), and differ in those, which hold the question, and in the answer. So a context is read
once for all ways; one that wins is then measured whole by ``streamkl evaluate``. Every answer is a line of the file:
the same command goes on where it was stopped. Scores of 64 queries are materialised.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from streamkl.evaluation import tasks
from streamkl.evaluation.haystack import Book, Haystack
from streamkl.evaluation.subject import Subject
from streamkl.integrations.transformers import sparsify
from streamkl.sparse import AttentionCall, IndexerSelector
from streamkl.sparse.scores import index_scores

LAST = 64
"""Tokens of a context that the ways differ in."""
ANSWER = 7
"""Tokens of an answer, at most."""


def ranks(p: Tensor, first: int) -> Tensor:
    """The best rank of each key among the keys before ``first`` by any query, ``[keys]``; ``p [queries, keys]``."""
    order = torch.argsort(p[:, :first], dim=-1, descending=True, stable=True)
    return torch.empty_like(order).scatter_(1, order, torch.arange(first).expand_as(order)).amin(0)


def by_probability(p: Tensor, first: int) -> Tensor:
    """The largest probability that any query gives a key: the rule of the engines."""
    return p.amax(0)


def by_rank(p: Tensor, first: int) -> Tensor:
    """Every query's first choice, then every second one: round robin; equal ranks by probability."""
    score = p.amax(0).double()
    score[:first] = 0.5 * score[:first] - ranks(p, first)
    return score


def by_quota(p: Tensor, first: int) -> Tensor:
    """The four first choices of every query, and the rest by probability."""
    score, best = p.amax(0).double(), ranks(p, first)
    score[:first] = torch.where(best < 4, 2 - best / 5, score[:first])
    return score


def by_entropy(p: Tensor, first: int) -> Tensor:
    """Probability times the query's perplexity: how far a key stands out, whatever the query's spread."""
    entropy = -(p.clamp(min=1e-30).log() * p).sum(-1, keepdim=True)
    return (p * entropy.exp()).amax(0)


def by_ratio(p: Tensor, first: int) -> Tensor:
    """Probability relative to the query's largest one."""
    return (p / p.amax(-1, keepdim=True)).amax(0)


def by_far_mass(p: Tensor, first: int) -> Tensor:
    """Probability among the keys before the block: what lies within it is selected anyway."""
    return (p / p[:, :first].sum(-1, keepdim=True).clamp(min=1e-30)).amax(0)


RULES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "probability": by_probability, "robin": by_rank, "quota": by_quota, "entropy": by_entropy, "ratio": by_ratio,
    "far": by_far_mass,
}  # fmt: skip


@dataclass(frozen=True)
class RuleSelector(IndexerSelector):
    """An indexer's top-k by a rule: ``RULES[rule](p, first)`` gives the scores of the keys of a query block.

    ``p [queries, keys]`` are the indexer's probabilities, ``first`` is the key of the block's first query.
    """

    rule: str = "probability"

    def select(self, call: AttentionCall) -> Tensor:
        """The selected keys ``[1, query_blocks, topk]``; a block's own keys come first."""
        if call.q.shape[2] != LAST:  # the context before, or an answer
            return super().select(call)
        assert call.index is not None, "an indexer's tensors"
        scores = index_scores(*call.index, activation=self.activation)[0]
        before = scores.shape[1] - LAST
        rows = []
        for start in range(0, LAST, self.query_block):
            first, end = before + start, before + start + self.query_block
            score = RULES[self.rule](scores[start : start + self.query_block, :end].softmax(-1), first).double()
            score[first:] = torch.inf
            rows.append(score.topk(self.topk).indices.int())
        return torch.stack(rows)[None]


@torch.no_grad()
def main() -> None:
    """Runs all ways on all contexts, and prints how many needles each found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "indexers", "text", "output"):
        parser.add_argument(f"--{name}", required=True, type=str if name == "model" else Path)
    parser.add_argument("--ways", nargs="+", default=[f"{rule}:512:64" for rule in RULES])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--contexts", type=int, default=50)
    parser.add_argument("--first", type=int, default=0, help="the first context; processes may share the contexts")
    given = parser.parse_args()
    subject = Subject(given.model, {"indexers": given.indexers}, dtype=torch.float32)
    indexers, model = subject.indexers["indexers"], subject.model
    haystack = Haystack([Book(given.text.name, given.text.read_text(encoding="utf-8"))], subject.tokenizer)
    whole = RuleSelector(512, 64, next(iter(indexers.values())).activation, True)
    lines = given.output.read_text().splitlines() if given.output.exists() else []
    found: dict[str, dict[int, bool]] = {way: {} for way in given.ways}
    for line in map(json.loads, lines):
        found.setdefault(line["way"], {})[line["number"]] = line["right"]
    for number in range(given.first, given.contexts):
        missing = [way for way in given.ways if number not in found[way]]
        if not missing:
            continue
        context = tasks.build("needle", given.tokens, number, seed=0, haystack=haystack)
        ids = torch.tensor([context.ids])
        sparsify(model, whole, indexers, decode="sparse")
        cache = model(ids[:, :-LAST], use_cache=True, logits_to_keep=1).past_key_values
        for way in missing:
            rule, topk, block = way.split(":")
            sparsify(
                model, replace(whole, topk=int(topk), query_block=int(block), rule=rule), indexers, decode="sparse"
            )
            if added := cache.get_seq_length() - (given.tokens - LAST):  # by the way before
                cache.crop(-added)
            token, new = ids[:, -LAST:], []
            for _ in range(ANSWER):
                out = model(token, past_key_values=cache, use_cache=True, logits_to_keep=1)
                token = out.logits[:, -1:].argmax(-1)
                new.append(int(token))
            text = subject.tokenizer.decode(new, skip_special_tokens=True)
            found[way][number] = tasks.is_right(context, text)
            with given.output.open("a") as file:
                file.write(json.dumps({"number": number, "way": way, "right": found[way][number]}) + "\n")
        counts = (f"{way} {sum(found[way].values())}" for way in given.ways)
        print(f"{number + 1} of {given.contexts}:", ", ".join(counts), flush=True)


if __name__ == "__main__":
    main()
