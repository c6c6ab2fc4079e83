"""Intervals against published values, and against what they promise."""

import random

import pytest

from streamkl.evaluation.statistics import crossed_mean, mean, paired_difference, wilson


def test_wilson_gives_published_intervals() -> None:
    # Newcombe, Statistics in Medicine 17 (1998), 857-872, table I, method 3.
    for right, count, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611)):
        assert wilson(right, count)[1:] == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize(
    ("counts", "published"),
    [
        # Newcombe, Statistics in Medicine 17 (1998), 2635-2650, table III, method 10: 36 both, 12 and 2 alone, 0 none.
        ((36, 12, 2, 0), (0.2, 0.0569, 0.3404)),
        # Fagerland, Lydersen and Laake, Statistical Analysis of Contingency Tables (2017), chapter 8, Cavo et al.'s
        # data: the pairs agree, so that the continuity correction counts.
        ((59, 6, 16, 80), (-0.0621, -0.1186, -0.0046)),
    ],
)
def test_paired_differences_give_published_intervals(counts: tuple[int, ...], published: tuple[float, ...]) -> None:
    kinds = ((True, True), (True, False), (False, True), (False, False))
    pairs = [kind for kind, count in zip(kinds, counts, strict=True) for _ in range(count)]
    found = paired_difference([a for a, _ in pairs], [b for _, b in pairs])
    assert found == pytest.approx(published, abs=5e-5)


def test_intervals_of_paired_differences_hold_them_as_often_as_they_say() -> None:
    rng = random.Random(0)
    held = 0
    for _ in range(1000):
        kinds = rng.choices([(True, True), (True, False), (False, True), (False, False)], [0.6, 0.05, 0.15, 0.2], k=60)
        found = paired_difference([a for a, _ in kinds], [b for _, b in kinds])
        held += found.low <= -0.1 <= found.high
    assert 0.93 <= held / 1000 <= 0.98, held


@pytest.mark.parametrize("count", [3, 12, 60])
def test_intervals_of_a_mean_hold_it_as_often_as_they_say(count: int) -> None:
    rng = random.Random(0)
    held = 0
    for _ in range(1000):
        found = mean([rng.gauss(1.0, 2.0) for _ in range(count)])
        held += found.low <= 1.0 <= found.high
    assert 0.935 <= held / 1000 <= 0.965, held


def test_student_has_heavier_tails_beyond_the_table_too() -> None:
    for count, published in ((31, 2.042), (41, 2.0211), (61, 2.0003), (121, 1.9799)):
        found = mean([-1.0, 1.0] * (count // 2) + [0.0])  # of deviation 1
        assert found.high * count**0.5 == pytest.approx(published, abs=5e-4)


def test_few_values_have_no_interval_or_all_of_it() -> None:
    assert mean([2.0]).high == float("inf")
    assert wilson(0, 0)[1:] == (0.0, 1.0)
    assert paired_difference([], [])[1:] == (-1.0, 1.0)


def test_a_mean_over_seeds_and_texts_has_the_variance_of_both() -> None:
    texts = [0.0, 1.0, 2.0, 3.0]
    assert crossed_mean([texts]) == crossed_mean([texts, texts]) == mean(texts)
    apart = crossed_mean([[x - 5 for x in texts], [x + 5 for x in texts], texts])
    assert apart.value == 1.5
    # Seeds at -5, 0, 5 alone have a half width of 4.303 * 5 / sqrt(3); texts add a little.
    assert 12.42 < apart.high - apart.value < 13
    assert crossed_mean([[1.0, 1.0], [1.0, 1.0]]) == (1.0, 1.0, 1.0)
