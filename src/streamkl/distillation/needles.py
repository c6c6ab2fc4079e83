"""Samples with a needle: a sentence hidden in the text, and at the end a question that only it answers.

What they are made of is apart from what `streamkl evaluate` asks for, so that an evaluation shows what was learned of
retrieval, and not of these words.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np

NAMES = (
    "Abernathy", "Bancroft", "Calloway", "Dunmore", "Ellsworth", "Farnham", "Galloway", "Hathaway", "Ingram", "Jessop",
    "Kirkland", "Lockhart", "Merriweather", "Norwood", "Oakley", "Pemberton", "Quimby", "Ravenscroft", "Sheffield",
    "Thackeray", "Underhill", "Vanderbilt", "Whitaker", "Yarborough",
)  # fmt: skip
THINGS = ("locker", "ticket", "permit", "parcel", "account", "badge", "room", "invoice", "safe", "licence")
FORMS = (
    ("The {thing} of {name} has the code {number}.", "What code has the {thing} of {name}?",
     "The {thing} of {name} has the code {number}"),
    ("Remember that {name}'s {thing} is number {number}.", "Which number is {name}'s {thing}?",
     "{name}'s {thing} is number {number}"),
    ("For the {thing}, {name} wrote down {number}.", "What did {name} write down for the {thing}?",
     "For the {thing}, {name} wrote down {number}"),
)  # fmt: skip
"""The sentence that is hidden, the question, and the answer."""
ASKED = "\n\nQuestion: {question}\nAnswer: {answer}"


class Sample(NamedTuple):
    """A sequence with a needle.

    Attributes:
        ids: ``[length]``: its tokens.
        asked: Where the question begins; the answer ends with the sequence.
    """

    ids: np.ndarray
    asked: int


def check(tokenizer: Any, length: int) -> None:
    """Raises a ``ValueError`` if a sequence may be too short to hide something in."""
    words = {"name": max(NAMES, key=len), "thing": max(THINGS, key=len), "number": 99999}
    needed = max(
        2 * len(_tokens(tokenizer, f" {sentence} ".format(**words)))
        + len(_tokens(tokenizer, ASKED.format(question=question, answer=answer).format(**words)))
        for sentence, question, answer in FORMS
    )
    if length < needed:
        raise ValueError(f"needles need sequences of {needed} tokens or more: got a length of {length}")


def hide(tokenizer: Any, ids: np.ndarray, seed: int) -> Sample:
    """Hides a needle in a sequence, and asks for it at its end; what no longer fits is left out of the end of the text.

    Args:
        tokenizer: Of transformers.
        ids: ``[length]``: the text's tokens, as many as `check` asks for.
        seed: Decides name, number, form and place.
    """
    draw = random.Random(seed)
    words = {"name": draw.choice(NAMES), "thing": draw.choice(THINGS), "number": draw.randint(10000, 99999)}
    sentence, question, answer = (form.format(**words) for form in draw.choice(FORMS))
    needle = _tokens(tokenizer, f" {sentence} ")
    asked = _tokens(tokenizer, ASKED.format(question=question, answer=answer))
    room = len(ids) - len(needle) - len(asked)
    at = draw.randint(1, room)  # after what every sequence may start with
    return Sample(np.concatenate((ids[:at], needle, ids[at:room], asked)), len(ids) - len(asked))


def _tokens(tokenizer: Any, text: str) -> np.ndarray:
    return np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.uint32)
