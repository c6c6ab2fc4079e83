"""Samples with needles: sentences hidden in the text, and at the end questions that only they answer.

Some questions quote a piece of the text instead. The words of the needles differ from those of `streamkl evaluate`, so
that an evaluation shows retrieval, and not memorised words.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np

NAMES = (
    "Abernathy", "Bancroft", "Calloway", "Dunmore", "Ellsworth", "Farnham", "Galloway", "Hathaway", "Ingram", "Jessop",
    "Kirkland", "Lockhart", "Merriweather", "Norwood", "Oakley", "Pemberton", "Quimby", "Ravenscroft", "Sheffield",
    "Thackeray", "Underhill", "Vanderbilt", "Whitaker", "Yarborough", "Alice", "Bruno", "Clara", "Dmitri", "Esther",
    "Fatima", "Gustav", "Hiroshi", "Ivan", "Julia", "Kwame", "Leila", "Marco", "Nadia", "Otto", "Priya", "Rosa",
    "Samir",
)  # fmt: skip
THINGS = (
    "locker", "ticket", "permit", "parcel", "account", "badge", "room", "invoice", "safe", "licence", "piano", "garden",
    "bicycle", "telescope", "painting", "boat",
)  # fmt: skip
FORMS = (
    ("The {thing} of {name} has the code {number}.", "What code has the {thing} of {name}?",
     "The {thing} of {name} has the code {number}"),
    ("Remember that {name}'s {thing} is number {number}.", "Which number is {name}'s {thing}?",
     "{name}'s {thing} is number {number}"),
    ("For the {thing}, {name} wrote down {number}.", "What did {name} write down for the {thing}?",
     "For the {thing}, {name} wrote down {number}"),
    ("The {thing} that {name} keeps weighs {number} grams.", "How much does the {thing} that {name} keeps weigh?",
     "The {thing} that {name} keeps weighs {number}"),
    ("To open the {thing}, {name} must dial {number}.", "What must {name} dial to open the {thing}?",
     "To open the {thing}, {name} must dial {number}"),
    ("In the ledger, {name} entered {number} against the {thing}.", "What did {name} enter against the {thing}?",
     "In the ledger, {name} entered {number}"),
    ("The letter to {name} about the {thing} is filed under {number}.", "Where is the letter to {name} filed?",
     "The letter to {name} about the {thing} is filed under {number}"),
)  # fmt: skip
"""The sentence that is hidden, the question, and the answer."""
ASKED = "\n\nQuestion: {question}\nAnswer: {answer}"
QUOTED = "\n\nAs we have read: "
QUOTES = 0.25
"""The share of questions, all but the last, that are a quotation of the text instead."""
QUOTE_TOKENS = (16, 48)


class Sample(NamedTuple):
    """A sequence with needles.

    Attributes:
        ids: ``[length]``: its tokens.
        asked: Where the first question begins; the last answer ends with the sequence.
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


def hide(tokenizer: Any, ids: np.ndarray, seed: int, facts: int = 1) -> Sample:
    """Hides needles in a sequence, and asks for them at its end; text that no longer fits is left out there.

    Args:
        tokenizer: Of transformers.
        ids: ``[length]``: the text's tokens, as many as `check` asks for.
        seed: Seed of names, numbers, forms and places.
        facts: The most questions; with their needles they take at most half of the sequence, unless there is only one.
    """
    draw = random.Random(seed)
    needles, questions, room = [], [], len(ids)
    for name in draw.sample(NAMES, min(facts, len(NAMES))):
        if questions and draw.random() < QUOTES:
            size = draw.randint(*QUOTE_TOKENS)
            start = draw.randrange(max(1, len(ids) // 2 - size))  # in what is left of the text, however much is asked
            needle, asked = None, np.concatenate((_tokens(tokenizer, QUOTED), ids[start : start + size]))
        else:
            words = {"name": name, "thing": draw.choice(THINGS), "number": draw.randint(10000, 99999)}
            sentence, question, answer = (form.format(**words) for form in draw.choice(FORMS))
            needle = _tokens(tokenizer, f" {sentence} ")
            asked = _tokens(tokenizer, ASKED.format(question=question, answer=answer))
        taken = len(asked) + (0 if needle is None else len(needle))
        if questions and room - taken < len(ids) // 2:
            break
        room -= taken
        questions.insert(0, asked)
        if needle is not None:
            needles.append(needle)
    draw.shuffle(needles)
    text, last = [], 0
    for at, needle in zip(sorted(draw.randint(1, room) for _ in needles), needles, strict=True):  # 1: a first token
        text += [ids[last:at], needle]
        last = at
    asked = sum(map(len, questions))
    return Sample(np.concatenate((*text, ids[last:room], *questions)), len(ids) - asked)


def _tokens(tokenizer: Any, text: str) -> np.ndarray:
    return np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.uint32)
