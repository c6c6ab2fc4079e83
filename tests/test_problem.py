"""The walk over tiles: exactly the tiles that hold an allowed pair, masked only where one is not allowed."""

import pytest
import torch

from streamkl import reference
from streamkl.problem import Side, Support

SHAPES = [(1, 1), (7, 7), (16, 40), (40, 16), (33, 65), (0, 5), (5, 0)]
WINDOWS = [(None, None), (None, 0), (0, 0), (3, 0), (3, 2), (None, 5), (9, None), (100, 100)]


@pytest.mark.parametrize(("nq", "nk"), SHAPES)
@pytest.mark.parametrize(("left", "right"), WINDOWS)
def test_tiles_cover_the_allowed_pairs_and_no_tile_is_without_one(nq, nk, left, right) -> None:
    window = tuple(-1 if side is None else side for side in (left, right))
    allowed = reference.allowed_pairs(nq, nk, False, window, None, None)
    support = Support(1, nq, nk, left, right)
    (seq,) = support.sequences()
    seen = torch.zeros_like(allowed)
    for tiles in support.tiles(seq, 8, 12):
        assert tiles
        for tile in tiles:
            block = allowed[tile.rows, tile.keys]
            assert block.any()
            assert tile.masked == (not block.all())
            seen[tile.rows, tile.keys] = True
    assert torch.equal(seen & allowed, allowed)
    first, last = support.live_rows(seq)
    assert torch.equal(torch.arange(first, last), allowed.any(-1).nonzero().flatten())


@pytest.mark.parametrize("key_span", [2, 3, 16])
@pytest.mark.parametrize(("nq", "nk"), [*SHAPES, (65, 33), (33, 11), (31, 3)])
def test_tiles_of_keys_that_stand_for_several_tokens(nq, nk, key_span) -> None:
    """Cut as those of any other mask: no tile is without an allowed pair."""
    rows, keys = torch.arange(nq)[:, None], torch.arange(nk)
    allowed = keys < (rows + 1) // key_span + nk - nq // key_span
    assert torch.equal(allowed, reference.allowed_pairs(nq, nk, True, None, None, None, key_span=key_span))
    support = Support(1, nq, nk, None, 0, key_span=key_span)
    (seq,) = support.sequences()
    seen = torch.zeros_like(allowed)
    for tile in (tile for tiles in support.tiles(seq, 8, 12) for tile in tiles):
        block = allowed[tile.rows, tile.keys]
        assert block.any()
        assert tile.masked == (not block.all())
        hidden = support.disallowed(tile, torch.device("cpu"))
        assert torch.equal(block, torch.ones_like(block) if hidden is None else ~hidden)
        seen[tile.rows, tile.keys] = True
    assert torch.equal(seen & allowed, allowed)
    assert torch.equal(torch.arange(*support.live_rows(seq)), allowed.any(-1).nonzero().flatten())


def test_packed_sequences_have_their_own_diagonal() -> None:
    cu_q, cu_k = torch.tensor([0, 2, 2, 7]), torch.tensor([0, 4, 5, 8])
    sequences = list(Support(1, 9, 8, None, None, cu_q, cu_k).sequences())
    assert sequences == [(0, 0, 2, 0, 4, 2), (0, 2, 0, 4, 1, 1), (0, 2, 5, 5, 3, -2)]


def test_key_heads_serve_consecutive_query_heads() -> None:
    side = Side(heads=9, kv_heads=3, dim=64, dtype=torch.float32, scale=1.0)
    assert [side.kv_head(head) for head in range(9)] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_scale_defaults_to_one_over_the_root_of_the_width() -> None:
    q = torch.empty(1, 2, 3, 64)
    assert Side.of(q, q) == Side(heads=2, kv_heads=2, dim=64, dtype=torch.float32, scale=0.125)
    assert Side.of(q, q, 0.5).scale == 0.5
