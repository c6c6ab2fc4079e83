"""The contexts of each task, made of passages: the same seed gives the same contexts for every method.

Numbers are hidden in sentences between those of the prose, and asked for at the end; an answer is generated. The names
and sentences differ from those that ``streamkl distill`` trains with.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable
from typing import NamedTuple

from streamkl.evaluation.haystack import Haystack
from streamkl.text import TextError

TOWNS = (
    "Lisbon", "Oslo", "Cairo", "Kyoto", "Lima", "Dublin", "Prague", "Nairobi", "Geneva", "Havana", "Boston", "Vienna",
    "Madrid", "Athens", "Denver", "Warsaw", "Berlin", "Toronto", "Sydney", "Dakar", "Milan", "Seoul", "Quebec", "Tunis",
)  # fmt: skip
KEYS = 2
"""How many numbers the multi-key needle hides."""

HOPS = 2
"""How many times the value of variable tracking is passed on."""

ENDS = (".", "!", "?", "\n", '."', ".”", "!”", "?”")
"""Ends of tokens after which a sentence may be inserted."""


class Context(NamedTuple):
    """The input of a model.

    Attributes:
        task: A name of `TASKS`.
        length: How many tokens ``ids`` has.
        number: Which of the task's contexts of that length it is.
        ids: The tokens.
        answer: The text that must be generated after them; empty where the text itself is scored.
        book: The source of the passage.
    """

    task: str
    length: int
    number: int
    ids: list[int]
    answer: str
    book: str


def build(task: str, length: int, number: int, *, seed: int, haystack: Haystack) -> Context:
    """One context of a task.

    Raises:
        TextError: The length has no room for the question, or no text is long enough.
    """
    rng = random.Random(f"{seed}/{task}/{length}/{number}")
    start = _start(haystack)
    hidden, question, answer = TASKS[task](rng)
    needles, asked = [haystack.encode(sentence) for sentence in hidden], haystack.encode(question)
    room = length - len(start) - sum(map(len, needles)) - len(asked)
    if room < 1:
        raise TextError(
            f"a length of {length} tokens has no room for the question of {task}, which takes {length - room}"
        )
    book, prose = haystack.passage(rng, room)
    places = sorted(_sentence_end(haystack, prose, rng.randrange(len(prose) + 1)) for _ in needles)
    ids, last = list(start), 0
    for place, needle in zip(places, needles, strict=True):
        ids += prose[last:place] + needle
        last = place
    ids += prose[last:] + asked
    assert len(ids) == length, "the passage fills the room"
    return Context(task, length, number, ids, answer, book)


def is_right(context: Context, generated: str) -> bool:
    """Whether the first generated number is the answer."""
    found = re.search(r"\d[\d,]*", generated)
    return found is not None and found[0].replace(",", "") == context.answer


def _needle(rng: random.Random) -> tuple[list[str], str, str]:
    return _numbers(rng, 1)


def _multikey(rng: random.Random) -> tuple[list[str], str, str]:
    return _numbers(rng, KEYS)


def _numbers(rng: random.Random, count: int) -> tuple[list[str], str, str]:
    """A number for each of some towns; the first of them is asked for."""
    towns, numbers = rng.sample(TOWNS, count), rng.sample(range(10_000, 100_000), count)
    hidden = [f" The secret number for {town} is {number}." for town, number in zip(towns, numbers, strict=True)]
    asked, answer = towns[0], str(numbers[0])
    rng.shuffle(hidden)
    question = f"\n\nQuestion: What is the secret number for {asked}?\nAnswer: The secret number for {asked} is"
    return hidden, question, answer


def _tracking(rng: random.Random) -> tuple[list[str], str, str]:
    """A value that is passed on from one variable to the next; that of the last is asked for."""
    names = rng.sample("ABCDEFGHJKLMNPQRSTUVWXYZ", HOPS + 1)
    answer = str(rng.randrange(10_000, 100_000))
    hidden = [f" The variable {names[0]} has the value {answer}."]
    hidden += [f" The variable {new} has the same value as {old}." for old, new in itertools.pairwise(names)]
    question = (
        f"\n\nQuestion: What is the value of the variable {names[-1]}?\nAnswer: The variable {names[-1]} has the value"
    )
    return hidden, question, answer


def _text(rng: random.Random) -> tuple[list[str], str, str]:
    return [], "", ""


TASKS: dict[str, Callable[[random.Random], tuple[list[str], str, str]]] = {
    "needle": _needle, "multikey": _multikey, "tracking": _tracking, "perplexity": _text,
}  # fmt: skip
"""By name: what is hidden, in the order in which it is hidden, the question, and the answer."""


def _start(haystack: Haystack) -> list[int]:
    """The token that the tokenizer puts before every text, if it does."""
    ids = haystack.tokenizer.encode("a")
    return ids[:1] if ids and ids[0] == haystack.tokenizer.bos_token_id else []


def _sentence_end(haystack: Haystack, ids: list[int], at: int) -> int:
    """The place next to ``at`` where a sentence has ended; ``at`` if there is none near."""
    for place in sorted(range(max(0, at - 100), min(len(ids), at + 100) + 1), key=lambda place: abs(place - at)):
        if place == 0 or haystack.tokenizer.decode(ids[place - 1 : place]).rstrip(" ").endswith(ENDS):
            return place
    return at
