"""Answers of two engines are compared token by token, also after they went through JSON."""

import json

import pytest

from streamkl.selfcheck.engine import Generated

ONE = Generated([5, 3], [{5: -0.1, 7: -2.0}, {3: -0.5, 4: -0.6}], 0)


def test_log_probabilities_that_both_have_are_compared() -> None:
    assert ONE.difference(ONE) == 0
    assert ONE.difference(ONE._replace(logprobs=[{5: -0.1, 7: -2.5}, {3: -0.5, 9: -7.0}])) == pytest.approx(0.5)


def test_a_token_that_differs_is_an_infinite_difference_unless_rounding_may_have_turned_it() -> None:
    later = Generated([5, 4], [{5: -0.2, 7: -2.0}, {4: -0.5, 3: -9.0}], 0)
    assert ONE.difference(later) == float("inf")
    assert ONE.difference(later, rounded=True) == pytest.approx(0.1)
    first = Generated([7, 3], [{7: -0.1, 5: -0.2}, {3: -0.5, 4: -0.6}], 0)
    assert ONE.difference(first, rounded=True) == float("inf")


def test_an_answer_goes_through_json() -> None:
    assert Generated.from_json(json.loads(json.dumps(ONE._asdict()))) == ONE
