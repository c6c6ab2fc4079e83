"""Needle in a haystack: a number hidden in prose, and whether a model finds it."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NAMES = (
    "Aberdeen", "Bristol", "Cambridge", "Dover", "Exeter", "Falmouth", "Glasgow", "Hastings", "Ipswich", "Kendal",
    "Lancaster", "Margate", "Norwich", "Oxford", "Plymouth", "Reading", "Salisbury", "Truro", "Winchester", "York",
)  # fmt: skip


class Needle(NamedTuple):
    """A prompt ``ids [1, tokens]`` that ends where the hidden number, ``answer``, must follow; ``at`` is its place."""

    ids: Tensor
    answer: str
    at: int


def hide(prose: str, tokenizer: PreTrainedTokenizerBase, *, tokens: int, seed: int) -> Needle:
    """Hides a number of five digits at a random place of a random piece of prose, and asks for it at the end.

    Args:
        prose: Where pieces are taken from.
        tokenizer: Of the model.
        tokens: Length of the prompt.
        seed: Decides the piece, the place, the name and the number.
    """
    rng = random.Random(seed)
    name, answer = rng.choice(NAMES), str(rng.randrange(10000, 100000))
    fact = _ids(tokenizer, f" The secret number for {name} is {answer}.")
    question = f"\n\nQuestion: What is the secret number for {name}? Answer: The secret number for {name} is"
    ask = _ids(tokenizer, question)
    room = tokens - len(fact) - len(ask)
    start = rng.randrange(len(prose) - 8 * tokens)
    piece = _ids(tokenizer, prose[prose.index(" ", start) : start + 8 * tokens])[:room]
    at = rng.randrange(room)
    ids = [*piece[:at], *fact, *piece[at:], *ask]
    return Needle(torch.tensor([ids]), answer, at)


@torch.no_grad()
def finds(model: Any, tokenizer: PreTrainedTokenizerBase, needle: Needle) -> bool:
    """Whether the number is what a model continues the prompt with, greedily."""
    ids = needle.ids.to(model.device)
    new = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=len(needle.answer) + 2, do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
    )[0, ids.shape[1] :]  # fmt: skip
    return needle.answer in str(tokenizer.decode(new)).replace(" ", "")


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]  # pyright: ignore[reportReturnType]
