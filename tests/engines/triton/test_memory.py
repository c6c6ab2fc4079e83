"""Every address that a kernel touches is that of an element of one of its arguments."""

import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy
import pytest
import torch

import streamkl
from streamkl import attention_kl, attention_lse, indexer_kl
from streamkl.engines.triton import launch
from streamkl.engines.triton.configs import architecture
from streamkl.engines.triton.meta import Config
from streamkl.engines.triton.plans import selection
from streamkl.sparse import index_topk, sparse_attention
from streamkl.testing import (
    STUDENT,
    TEACHER,
    Heads,
    IndexerHeads,
    evaluate,
    make_case,
    make_indexer_case,
    random_sparse_case,
)
from streamkl.testing.sparse_cases import count_query_blocks

pytest.importorskip("triton")


def addresses(x: torch.Tensor) -> numpy.ndarray:
    """The addresses of all elements of a tensor."""
    offsets = torch.zeros(x.shape, dtype=torch.int64)
    for dim, stride in enumerate(x.stride()):
        steps = torch.arange(x.shape[dim]) * stride
        offsets += steps.view([-1 if d == dim else 1 for d in range(x.dim())])
    return (x.data_ptr() + offsets.flatten() * x.element_size()).numpy()


def tensors(value: object) -> list[torch.Tensor]:
    """The tensors among arguments and in groups of them."""
    if isinstance(value, tuple):
        return [x for item in value for x in tensors(item)]
    return [value] if isinstance(value, torch.Tensor) else []


@pytest.fixture
def sanitizer(monkeypatch: pytest.MonkeyPatch) -> dict:
    """Holds each load, store and addition of each launch to the elements of its arguments; counts what it saw."""
    from triton.runtime.interpreter import InterpreterBuilder

    state: dict = {"elements": numpy.zeros(0, numpy.int64), "kernels": set(), "checked": 0}
    run = launch.Launch.run

    def registered(self, device):
        given = tensors(tuple(self.arguments.values()))
        state["elements"] = numpy.unique(numpy.concatenate([addresses(x) for x in given]))
        state["kernels"].add(self.kernel.fn.__name__)
        run(self, device)

    def check(pointers, mask) -> None:
        touched = pointers.data[mask.data.astype(bool)] if mask is not None else pointers.data.reshape(-1)
        touched = touched.astype(numpy.int64)
        inside = numpy.isin(touched, state["elements"])
        assert inside.all(), f"{(~inside).sum()} of {inside.size} addresses are no element of an argument"
        state["checked"] += touched.size

    load, store, add = (
        getattr(InterpreterBuilder, name) for name in ("create_masked_load", "create_masked_store", "create_atomic_rmw")
    )
    monkeypatch.setattr(launch.Launch, "run", registered)
    monkeypatch.setattr(
        InterpreterBuilder, "create_masked_load", lambda self, p, m, *rest: check(p, m) or load(self, p, m, *rest)
    )
    monkeypatch.setattr(
        InterpreterBuilder,
        "create_masked_store",
        lambda self, p, v, m, *rest: check(p, m) or store(self, p, v, m, *rest),
    )
    monkeypatch.setattr(
        InterpreterBuilder,
        "create_atomic_rmw",
        lambda self, op, p, v, m, *rest: check(p, m) or add(self, op, p, v, m, *rest),
    )
    return state


pytestmark = pytest.mark.interpreted
CASES = {
    "paired": {"heads": Heads(2, 1, 2, 2), "wanted": STUDENT + TEACHER},
    "mixture": {"heads": Heads(6, 3, 2, 1), "reduction": "none"},
    "train": {"heads": Heads(4, 2, 2, 1), "teacher_lse": True},
    "packed": {"heads": Heads(2, 1, 2, 1), "batch": 1, "cu_seqlens": ([0, 9, 9, 21], [0, 4, 13, 30])},
}


@pytest.mark.parametrize("deterministic", [False, True], ids=["one_pass", "deterministic"])
@pytest.mark.parametrize("hold", [1024, 16], ids=["held", "chunked"])
@pytest.mark.parametrize("splits", [1, 16], ids=["", "split"])
@pytest.mark.parametrize("name", CASES)
def test_no_address_outside_of_the_arguments(name, splits, hold, deterministic, sanitizer, monkeypatch) -> None:
    config = Config(rows=16, keys=16, warps=1, stages=1, hold=hold, chunk=32, grad=32)
    monkeypatch.setattr(architecture, "INTERPRETED", config)
    monkeypatch.setattr(architecture, "INTERPRETED_PROCESSORS", splits)
    monkeypatch.setattr(architecture, "TILES_PER_SPLIT", 1)
    options = {"tokens": (23, 37), "dims": (40, 24), "batch": 1, "causal": True, "window": (19, 3), **CASES[name]}
    case = make_case(0, **options)
    evaluate(
        attention_kl, case.tensors, case, teacher_lse=case.teacher_lse, backend="triton", deterministic=deterministic,
        **case.options,
    )  # fmt: skip
    assert sanitizer["checked"] > 10_000
    assert "keys_kernel" in sanitizer["kernels"]
    assert ("queries_kernel" in sanitizer["kernels"]) == deterministic


@pytest.mark.parametrize("deterministic", [False, True], ids=["one_pass", "deterministic"])
@pytest.mark.parametrize("hold", [1024, 16], ids=["held", "chunked"])
@pytest.mark.parametrize("splits", [1, 16], ids=["", "split"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_no_address_outside_of_an_indexers_arguments(
    reduction, splits, hold, deterministic, sanitizer, monkeypatch
) -> None:
    config = Config(rows=16, keys=16, warps=1, stages=1, hold=hold, chunk=32, grad=32)
    monkeypatch.setattr(architecture, "INTERPRETED", config)
    monkeypatch.setattr(architecture, "INTERPRETED_PROCESSORS", splits)
    monkeypatch.setattr(architecture, "TILES_PER_SPLIT", 1)
    case = make_indexer_case(
        0, heads=IndexerHeads(2, 1, 3), tokens=(23, 37), dims=(40, 24), batch=1, window=(19, 3), reduction=reduction,
        weight_dtype=torch.float16, dtypes=(torch.float16, torch.float16),
    )  # fmt: skip
    evaluate(indexer_kl, case.tensors, case, backend="triton", deterministic=deterministic, **case.options)
    assert sanitizer["checked"] > 10_000
    assert ("queries_kernel" in sanitizer["kernels"]) == deterministic


def selected(queries: int, columns: int, keys: int) -> torch.Tensor:
    """All keys in any order, ``[queries, columns]``, with padding among them."""
    topk = torch.rand(queries, columns, generator=torch.Generator().manual_seed(0)).argsort(-1)
    return torch.where(topk < keys, topk, -1)


@pytest.mark.parametrize("hold", [1024, 16], ids=["held", "chunked"])
@pytest.mark.parametrize("name", CASES)
def test_no_address_outside_of_the_arguments_over_selected_keys(name, hold, sanitizer, monkeypatch) -> None:
    config = Config(rows=16, keys=8, warps=1, stages=1, hold=hold, chunk=32, grad=32)
    monkeypatch.setattr(architecture, "INTERPRETED", config)
    options = {"tokens": (5, 30), "dims": (40, 24), "batch": 1, "causal": True, "window": (19, 3), **CASES[name]}
    if name == "packed":
        options["cu_seqlens"] = ([0, 2, 2, 4], [0, 4, 13, 30])
    case = make_case(0, topk_indices=selected(5, 37, 30) if name == "packed" else selected(5, 37, 30)[None], **options)
    evaluate(attention_kl, case.tensors, case, teacher_lse=case.teacher_lse, backend="triton", **case.options)
    assert sanitizer["checked"] > 5_000
    assert "gathered_gradient_kernel" in sanitizer["kernels"]


@pytest.mark.parametrize("hold", [1024, 16], ids=["held", "chunked"])
@pytest.mark.parametrize("query_block", [1, 3])
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
def test_no_address_outside_of_the_arguments_of_sparse_attention(
    packed, query_block, hold, sanitizer, monkeypatch
) -> None:
    config = Config(rows=16, keys=8, warps=1, stages=1, hold=hold, chunk=32, grad=16)
    monkeypatch.setattr(architecture, "INTERPRETED", config)
    shapes = ((6, 7, 40), (2, 30, 40), (2, 30, 24))
    q, k, v = (torch.randn(1, heads, n, dim, dtype=torch.bfloat16, requires_grad=True) for heads, n, dim in shapes)
    query_blocks, options = -(-7 // query_block), {"query_block": query_block, "window": (19, 3), "backend": "triton"}
    if packed:
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        cu_q, cu_k = torch.tensor([0, 2, 2, 6]), torch.tensor([0, 4, 13, 30])
        options |= {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
        query_blocks = 7 if query_block == 1 else 1 + 2 + 1  # those of the sequences, and of the query past them
    indices = selected(query_blocks, 37, 30)
    out = sparse_attention(q, k, v, indices if packed else indices[None], **options)
    assert out.isfinite().all()
    out.sum().backward()
    assert sanitizer["checked"] > 3000
    assert sanitizer["kernels"] == {"sparse_attention_kernel", "attention_queries_kernel", "attention_keys_kernel"}


@pytest.mark.parametrize("query_block", [1, 3])
def test_no_address_outside_of_the_arguments_of_sparse_attention_of_pages(query_block, sanitizer, monkeypatch) -> None:
    monkeypatch.setattr(architecture, "INTERPRETED", Config(rows=16, keys=8, warps=1, stages=1, grad=16))
    cases = (random_sparse_case(seed, max_tokens=24) for seed in range(100))
    case = next(case for case in cases if case.packed and case.q.shape[0] > 12)
    k, v, page_table = case.pages()
    query_blocks = count_query_blocks(case.q.shape[0], query_block, case.starts())
    indices, mask = selected(query_blocks, 37, int(case.mask["cu_seqlens_k"].diff().max())), case.mask
    options = {"query_block": query_block, **mask, "page_table": page_table, "backend": "triton"}
    sparse_attention(case.q.float(), k.float(), v.float(), indices, **options)
    assert sanitizer["checked"] > 3000
    assert sanitizer["kernels"] == {"sparse_attention_kernel"}


@pytest.mark.parametrize("hold", [1024, 16], ids=["held", "chunked"])
@pytest.mark.parametrize("query_block", [1, 3, 20])
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
def test_no_address_outside_of_the_arguments_of_a_selection(packed, query_block, hold, sanitizer, monkeypatch) -> None:
    config = Config(rows=16, keys=8, warps=1, stages=1, hold=hold, chunk=32)
    monkeypatch.setattr(architecture, "INTERPRETED", config)
    for name, size in {"SCORES": 1, "RANKED": 16, "PIECE": 16}.items():
        monkeypatch.setattr(selection, name, size)
    index_q, index_k, index_w = torch.randn(1, 3, 23, 40), torch.randn(1, 37, 40), torch.randn(1, 23, 3)
    options = {"query_block": query_block, "window": (19, 3), "normalise": True, "topk": 20, "backend": "triton"}
    if packed:
        index_q, index_k, index_w = index_q[0].transpose(0, 1), index_k[0], index_w[0]
        options |= {"cu_seqlens_q": torch.tensor([0, 9, 9, 21]), "cu_seqlens_k": torch.tensor([0, 4, 13, 35])}
    found = index_topk(index_q, index_k, index_w, **options)
    assert torch.equal(found, index_topk(index_q, index_k, index_w, **{**options, "backend": "tiled"}))
    assert sanitizer["checked"] > 3000
    assert {"block_scores_kernel", "best_keys_kernel"} <= sanitizer["kernels"]


def test_the_sanitizer_covers_every_kernel_of_a_loss(sanitizer, monkeypatch) -> None:
    monkeypatch.setattr(architecture, "INTERPRETED", Config(rows=16, keys=16, warps=1, stages=1))
    monkeypatch.setattr(architecture, "INTERPRETED_PROCESSORS", 16)
    monkeypatch.setattr(architecture, "TILES_PER_SPLIT", 1)
    for name in ("paired", "mixture"):
        case = make_case(0, tokens=(5, 70), dims=(16, 16), batch=1, **CASES[name])
        evaluate(attention_kl, case.tensors, case, backend="triton", deterministic=True, **case.options)
        attention_lse(case.tensors["teacher_q"], case.tensors["teacher_k"], backend="triton")
        case = make_case(0, tokens=(2, 9), dims=(16, 16), batch=1, topk_indices=selected(2, 9, 9)[None], **CASES[name])
        evaluate(attention_kl, case.tensors, case, backend="triton", **case.options)
    assert sanitizer["kernels"] == {
        "lse_kernel", "paired_kernel", "mixture_kernel", "rows_kernel", "keys_kernel", "queries_kernel",
        "merge_lse_kernel", "merge_paired_kernel", "merge_mixture_kernel", "gathered_lse_kernel",
        "gathered_paired_kernel", "gathered_mixture_kernel", "gathered_gradient_kernel",
    }  # fmt: skip


def test_the_sanitizer_sees_an_address_outside(sanitizer, monkeypatch) -> None:
    from streamkl.engines.triton.kernels.tile import products

    def unmasked(tokens, first, dim, block, masked, total=0):
        return original(tokens, first, block, block, masked)

    original = products.load_tile
    monkeypatch.setattr(products, "load_tile", unmasked)
    case = make_case(0, tokens=(5, 5), dims=(24, 24), batch=1)
    with pytest.raises(Exception, match="are no element of an argument"):
        attention_lse(case.tensors["teacher_q"], case.tensors["teacher_k"], backend="triton")


FAR = """
    import torch
    from streamkl import attention_lse

    # Rows 2^28 elements apart: the last one starts beyond element 2^31.
    rows, dim, apart = 12, 16, 1 << 28
    storage = torch.empty((rows - 1) * apart + dim, dtype=torch.bfloat16)
    far = storage.as_strided((1, 1, rows, dim), (0, 0, apart, 1))
    near = torch.randn(1, 1, rows, dim, generator=torch.Generator().manual_seed(0)).bfloat16()
    far.copy_(near)
    expected = attention_lse(near, near, backend="triton")
    print("near")
    assert torch.equal(attention_lse(near, far, backend="triton"), expected)
    print("tokens")
    columns = storage.as_strided((1, 1, 8, rows), (0, 0, 1, apart))
    columns.copy_(near[:, :, :8, :rows])
    few = near[:, :, :8, :rows].contiguous()
    assert torch.equal(attention_lse(few, columns, backend="triton"), attention_lse(few, few, backend="triton"))
    print("columns")
    far.copy_(near)  # the columns lay in the same storage
    selected = torch.arange(rows).flip(0).expand(1, rows, rows)
    torch.testing.assert_close(attention_lse(near, far, topk_indices=selected, backend="triton"), expected)
    print("selected")
"""


def test_kernels_with_offsets_of_32_bits_would_fail_where_ours_pass(tmp_path: Path) -> None:
    """The contract tests strides beyond 2^31 elements; a copy of the kernels with narrow offsets fails it."""
    package = Path(streamkl.__file__).parent
    narrow = tmp_path / "streamkl"
    shutil.copytree(package, narrow)
    for path in (narrow / "engines" / "triton" / "kernels").rglob("*.py"):
        path.write_text(path.read_text().replace("tl.int64", "tl.int32"))
    outputs = []
    for root in (package.parent, tmp_path):
        result = subprocess.run(
            [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(root)!r})\n" + textwrap.dedent(FAR)],
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        outputs.append(result.stdout.strip())
    assert outputs == ["near\ntokens\ncolumns\nselected", "near"]
