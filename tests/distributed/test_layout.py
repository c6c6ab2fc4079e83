"""Which tokens a rank holds, and that its calls of the operators show every query exactly the keys that it may see."""

import random

import pytest
import torch

from streamkl import reference
from streamkl.distributed.layout import HeadTail, segments
from streamkl.problem import Support


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("tokens", [0, 1, 5, 16, 203, 1000])
def test_every_token_is_on_one_rank_and_ranks_differ_by_two_tokens_at_most(tokens: int, size: int) -> None:
    layouts = [HeadTail(tokens, rank, size) for rank in range(size)]
    assert sorted(token for layout in layouts for token in layout.positions().tolist()) == list(range(tokens))
    lengths = [layout.length for layout in layouts]
    assert max(lengths) - min(lengths) <= 2
    assert all(end - start <= layout.chunk for layout in layouts for start, end in layout.spans)
    x = torch.arange(tokens * 3).view(3, tokens)
    for layout in layouts:
        assert torch.equal(layout.shard(x, 1), x[:, layout.positions()])


@pytest.mark.parametrize("size", [2, 4, 8])
def test_causal_work_is_the_same_on_all_ranks(size: int) -> None:
    pairs = [int((HeadTail(1600, rank, size).positions() + 1).sum()) for rank in range(size)]
    assert max(pairs) == min(pairs)


def draw_starts(rng: random.Random, tokens: int, count: int) -> list[int]:
    """Starts of packed sequences: some are empty, some tokens lie past the last one."""
    return [0, *sorted(rng.randint(0, tokens) for _ in range(count))]


def seen(segment, tokens: int, key_tokens: int) -> torch.Tensor:
    """The pairs that a call allows, ``[rows, all keys]``."""
    rows, keys = segment.rows.stop - segment.rows.start, segment.keys.stop - segment.keys.start
    starts = [None if s is None else torch.tensor(s) for s in (segment.starts_q, segment.starts_k)]
    support = Support(1, rows, keys, segment.left, segment.right, *starts)
    allowed = torch.zeros(rows, key_tokens, dtype=torch.bool)
    for seq in support.sequences():
        for tiles in support.tiles(seq, 3, 5):
            for tile in tiles:
                hidden = support.disallowed(tile, torch.device("cpu"))
                at = slice(segment.keys.start + tile.keys.start, segment.keys.start + tile.keys.stop)
                allowed[tile.rows, at] |= True if hidden is None else ~hidden
    return allowed


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("cut_before", [False, True])
def test_the_calls_of_all_ranks_allow_the_pairs_of_the_whole_sequence(seed: int, cut_before: bool) -> None:
    rng = random.Random(seed)
    tokens, key_tokens, size = rng.randint(1, 40), rng.randint(0, 40), rng.choice((1, 2, 3, 4))
    left, right = rng.choice(((None, 0), (None, None), (3, 0), (None, 4), (2, 5), (6, None), (0, 0)))
    starts = None
    if rng.random() < 0.6:
        count = rng.randint(0, 5)
        starts = draw_starts(rng, tokens, count), draw_starts(rng, key_tokens, count)
    packed = (None, None) if starts is None else tuple(map(torch.tensor, starts))
    window = (-1 if left is None else left, -1 if right is None else right)
    expected = reference.allowed_pairs(tokens, key_tokens, False, window, *packed, None)
    for rank in range(size):
        layout = HeadTail(tokens, rank, size)
        calls = segments(layout, key_tokens, left, right, starts, cut_before)
        assert [token for call in calls for token in range(call.rows.start, call.rows.stop)] == list(
            range(layout.length)
        )
        for call in calls:
            own = layout.positions()[call.rows]
            assert torch.equal(seen(call, tokens, key_tokens), expected[own]), (rank, call)


def test_keys_before_a_window_and_after_a_causal_span_are_not_part_of_a_call() -> None:
    head, tail = segments(HeadTail(80, 1, 2), 80, 5, 0, None, True)
    assert (head.keys, tail.keys) == (slice(15, 40), slice(35, 60))


def test_a_tensor_that_does_not_have_all_tokens_is_not_sharded() -> None:
    with pytest.raises(ValueError, match="dimension 1 must have all 16 tokens"):
        HeadTail(16, 0, 2).shard(torch.zeros(2, 8), 1)
