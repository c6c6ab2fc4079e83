"""Keys, values and index keys in the pages of vLLM's caches, of CPUs and of GPUs; without vLLM."""

import pytest
import torch

from streamkl.integrations.vllm import pages
from streamkl.sparse import sparse_attention

PAGES, HEADS, SIZE, DIM = 5, 2, 32, 16


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and values of one token per slot, ``[slots, heads, dim]``."""
    rng = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(PAGES * SIZE, HEADS, DIM, generator=rng) for _ in range(2))
    return keys, values


def on_a_cpu() -> tuple[pages.Pages, torch.Tensor, torch.Tensor]:
    """Pages that hold one token per slot, as vLLM's CPU kernel writes them, and the tokens."""
    keys, values = tokens()
    cache = torch.full((PAGES, HEADS, SIZE, 2 * DIM), float("nan"))
    flat = cache.view(PAGES, HEADS, 2 * SIZE * DIM)
    for slot in range(PAGES * SIZE):
        page, at = divmod(slot, SIZE)
        flat[page, :, at : SIZE * DIM : SIZE] = keys[slot]
        flat[page, :, SIZE * DIM + at * DIM : SIZE * DIM + (at + 1) * DIM] = values[slot]
    return pages.TransposedPages(cache), keys, values


def on_a_gpu(order: str) -> tuple[pages.Pages, torch.Tensor, torch.Tensor]:
    """The same as vLLM's backends for GPUs write them, with heads (HND) or tokens (NHD) first in memory."""
    keys, values = tokens()
    if order == "HND":
        cache = torch.full((PAGES, HEADS, SIZE, 2 * DIM), float("nan"))
    else:
        cache = torch.full((PAGES, SIZE, HEADS, 2 * DIM), float("nan")).transpose(1, 2)
    for slot in range(PAGES * SIZE):
        page, at = divmod(slot, SIZE)
        cache[page, :, at, :DIM], cache[page, :, at, DIM:] = keys[slot], values[slot]
    return pages.HalvedPages(cache), keys, values


LAYOUTS = {"CPU": on_a_cpu, "HND": lambda: on_a_gpu("HND"), "NHD": lambda: on_a_gpu("NHD")}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sequence_is_read_from_its_pages_in_order(layout: str) -> None:
    held, keys, _ = LAYOUTS[layout]()
    found = held.read_keys(torch.tensor([3, 0, 4], dtype=torch.int32), 70)
    slots = torch.cat([torch.arange(page * SIZE, (page + 1) * SIZE) for page in (3, 0, 4)])[:70]
    assert torch.equal(found, keys[slots])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_keys_and_values_are_views_of_the_pages_token_by_token(layout: str) -> None:
    held, keys, values = LAYOUTS[layout]()
    assert torch.equal(held.keys.flatten(0, 1), keys)
    assert torch.equal(held.values.flatten(0, 1), values)
    assert held.keys.untyped_storage().data_ptr() == held.values.untyped_storage().data_ptr()
    assert held.keys.untyped_storage().data_ptr() == held.cache.data_ptr()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["tiled", "cpu"])
def test_attention_reads_selected_keys_from_the_pages_of_vllm(name: str, layout: str) -> None:
    (held, keys, values), rng = LAYOUTS[layout](), torch.Generator().manual_seed(1)
    q, selected = torch.randn(9, 4, DIM, generator=rng), torch.tensor([[0, 69, 33, 31, 64, -1]] * 3)
    lengths = {"cu_seqlens_q": torch.tensor([0, 9]), "cu_seqlens_k": torch.tensor([0, 70])}
    table, slots = torch.tensor([[3, 0, 4]]), torch.tensor([3, 0, 4])[:, None] * SIZE + torch.arange(SIZE)
    out = sparse_attention(
        q, held.keys, held.values, selected, query_block=3, **lengths, page_table=table, backend=name
    )
    packed = (x[slots.flatten()[:70]] for x in (keys, values))
    wanted = sparse_attention(q, *packed, selected, query_block=3, **lengths, backend="reference")
    torch.testing.assert_close(out, wanted)


def test_index_keys_are_read_where_they_were_written_and_a_negative_slot_is_no_slot() -> None:
    cache = torch.full((PAGES, SIZE, DIM), float("nan"))
    new = torch.randn(4, DIM)
    pages.write_index_keys(cache, torch.tensor([2 * SIZE + 31, SIZE, -1, SIZE + 1]), new)
    assert int(cache.isfinite().all(-1).sum()) == 3
    found = pages.read_index_keys(cache, torch.tensor([1, 2], dtype=torch.int32), 2 * SIZE)
    assert torch.equal(found[[0, 1, 63]], new[[1, 3, 0]])


def test_pages_that_are_strided_are_read_and_written() -> None:
    """vLLM may keep the pages of several layers in one piece."""
    together = torch.full((PAGES, 2, SIZE, DIM), float("nan"))
    cache, new = together[:, 1], torch.randn(1, DIM)
    pages.write_index_keys(cache, torch.tensor([SIZE + 2]), new)
    assert torch.equal(pages.read_index_keys(cache, torch.tensor([1]), 3)[2:], new)
    for kind in LAYOUTS.values():
        of_one, keys, values = kind()
        wide = torch.stack((of_one.cache, torch.full_like(of_one.cache, float("nan"))), 1)[:, 0]
        held = type(of_one)(wide)
        assert torch.equal(held.keys[2, 7], keys[2 * SIZE + 7])
        assert torch.equal(held.values[2, 7], values[2 * SIZE + 7])


@pytest.mark.parametrize("name", ["amx", "neon", "rvv"])
def test_an_unknown_layout_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"layout of vLLM's KV cache for '{name}' on this CPU is not known"):
        pages.check_layout(name)
    for known in pages.LAYOUTS:
        pages.check_layout(known)
