"""How a step is split; without vLLM."""

import torch

from streamkl.integrations.vllm.metadata import Packed, Sequence, rows_of, split

STARTS = torch.tensor([0, 1, 71, 71, 72, 104], dtype=torch.int32)
LENGTHS = torch.tensor([40, 70, 5, 257, 96], dtype=torch.int32)
PAGES = torch.arange(5 * 9, dtype=torch.int32).view(5, 9)


def test_prompts_select_keys_and_decodes_do_not() -> None:
    is_prompt = torch.tensor([False, True, True, True, True])
    found = split(STARTS, LENGTHS, PAGES, is_prompt, 32, sparse_decode=False)
    assert found.dense.tolist() == [0]
    assert [(each.first, each.start, each.end) for each in found.sparse] == [(1, 0, 70), (71, 256, 257), (72, 64, 96)]
    assert [each.pages.tolist() for each in found.sparse] == [[9, 10, 11], list(range(27, 36)), [36, 37, 38]]
    assert found.sparse[2].rows == slice(72, 104)


def test_a_last_token_of_a_prompt_is_a_prompt_and_not_a_decode() -> None:
    is_prompt = torch.tensor([False, True, True, False, True])
    found = split(STARTS, LENGTHS, PAGES, is_prompt, 32, sparse_decode=False)
    assert found.dense.tolist() == [0, 3]


def test_requests_that_pad_a_batch_are_in_neither_part() -> None:
    """vLLM pads the starts and the lengths, and says of the others alone whether they are prompts."""
    starts, lengths = torch.tensor([0, 1, 2, 2, 2]), torch.tensor([40, 70, 0, 0])
    found = split(starts, lengths, PAGES, torch.tensor([False, False]), 32, sparse_decode=False)
    assert found.dense.tolist() == [0, 1]
    assert found.sparse == []


def test_with_sparse_decode_every_request_selects_keys() -> None:
    found = split(STARTS, LENGTHS, PAGES, None, 32, sparse_decode=True)
    assert found.dense.tolist() == []
    assert [each.first for each in found.sparse] == [0, 1, 71, 72]


def test_rows_of_some_requests_are_theirs_in_order() -> None:
    rows, own = rows_of(STARTS, torch.tensor([0, 3, 4]))
    assert rows.tolist() == [0, 71, *range(72, 104)]
    assert own.tolist() == [0, 1, 2, 34]
    assert own.dtype == STARTS.dtype


def test_query_blocks_are_counted_from_the_first_token_of_a_sequence() -> None:
    def segments(start: int, end: int) -> list[tuple[int, int, int]]:
        return [part[:3] for part in Sequence(7, start, end, torch.empty(0)).segments(64)]

    assert segments(0, 200) == [(7, 0, 200)]
    assert segments(128, 200) == [(7, 128, 200)]
    assert segments(100, 200) == [(7, 100, 128), (35, 128, 200)]
    assert segments(100, 110) == [(7, 100, 110)]


def test_sequences_are_packed_with_their_rows_keys_and_pages() -> None:
    parts = [Sequence(3, 64, 96, torch.tensor([4, 1, 2])), Sequence(50, 40, 41, torch.tensor([6, 5]))]
    packed = Packed.of(parts, torch.device("cpu"))
    assert packed.rows.tolist() == [*range(3, 35), 50]
    assert packed.cu_seqlens_q.tolist() == [0, 32, 33]
    assert packed.cu_seqlens_k.tolist() == [0, 96, 137]
    assert packed.page_table.tolist() == [[4, 1, 2], [6, 5, 0]]
