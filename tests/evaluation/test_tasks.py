"""Contexts: exactly as long as asked, the same for the same seed, with the answer in them."""

import random
import re

import pytest

from streamkl.evaluation.haystack import Book, Haystack
from streamkl.evaluation.tasks import TASKS, Context, build, is_right
from streamkl.text import TextError


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("length", [300, 511])
def test_a_context_has_exactly_the_tokens_that_were_asked_for(task: str, length: int, haystack: Haystack) -> None:
    contexts = [build(task, length, n, seed=3, haystack=haystack) for n in range(4)]
    assert {len(context.ids) for context in contexts} == {length}
    assert contexts == [build(task, length, n, seed=3, haystack=haystack) for n in range(4)]
    assert contexts[0].ids != build(task, length, 0, seed=4, haystack=haystack).ids
    assert len({tuple(context.ids) for context in contexts}) == 4


def test_numbers_are_hidden_between_sentences_and_asked_for_at_the_end(haystack: Haystack) -> None:
    for task, hidden in (("needle", 1), ("multikey", 2), ("tracking", 1)):
        for n in range(5):
            context = build(task, 480, n, seed=0, haystack=haystack)
            text = haystack.tokenizer.decode(context.ids)
            sentences = re.findall(
                r"(.?) The (?:secret number for|variable) [A-Z]\w* (?:is|has the value) (\d{5})\.", text
            )
            assert len(sentences) == hidden
            assert {before for before, _ in sentences} <= {"", "."}, text
            assert text.count(context.answer) == 1
            asked = re.search(r"for (\w+) is$|variable (\w) has the value$", text)
            assert asked is not None
            if task != "tracking":
                assert f"for {asked[1]} is {context.answer}." in text


def test_the_value_of_a_variable_is_handed_on_in_order(haystack: Haystack) -> None:
    text = haystack.tokenizer.decode(build("tracking", 480, 0, seed=0, haystack=haystack).ids)
    first = re.search(r"variable (\w) has the value \d", text)
    links = re.findall(r"variable (\w) has the same value as (\w)\.", text)
    assert first is not None
    assert [old for _, old in links] == [first[1], *(new for new, _ in links[:-1])]
    assert text.endswith(f"The variable {links[-1][0]} has the value")


def test_the_first_number_is_the_answer() -> None:
    context = Context("needle", 1, 0, [], "12345", "")
    for generated, right in ((" 12345.", True), (" 12,345", True), ("123456", False), (" 1234", False), ("x", False)):
        assert is_right(context, generated) == right


def test_passages_are_of_books_that_are_long_enough(haystack: Haystack) -> None:
    rng = random.Random(0)
    passages = [haystack.passage(rng, 400) for _ in range(50)]
    assert {name for name, _ in passages} == {"long.txt"}
    starts = [haystack.tokenizer.decode(ids)[0] for _, ids in passages]
    assert sum(start.isupper() for start in starts) == 50, "passages start with a sentence"


def test_text_that_is_too_short_is_named_with_its_tokens(haystack: Haystack) -> None:
    short = Haystack([Book("a.txt", "x"), Book("b.txt", "one two")], haystack.tokenizer)
    with pytest.raises(TextError, match=r"300 tokens of prose are needed, and the longest of 2, b.txt, has 7"):
        build("perplexity", 300, 0, seed=0, haystack=short)
    with pytest.raises(TextError, match=r"a length of 100 tokens has no room for the question of needle"):
        build("needle", 100, 0, seed=0, haystack=haystack)
