"""The gradients of sparse attention: their definition, edges, determinism, and what PyTorch asks of an operator."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from streamkl import attention_lse, indexer_kl
from streamkl.sparse import sparse_attention
from streamkl.testing.memory import counted_peak

Tensors = tuple[Tensor, Tensor, Tensor]


def attention(
    tokens: int = 37,
    dtype: torch.dtype = torch.float32,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (16, 24),
) -> Tensors:
    rng = torch.Generator().manual_seed(0)
    shapes = ((1, heads[0], tokens, dims[0]), (1, heads[1], tokens, dims[0]), (1, heads[1], tokens, dims[1]))
    q, k, v = (torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes)
    return q, k, v


def random_indices(tokens: int, topk: int, query_block: int) -> Tensor:
    """``[1, query_blocks, topk]``: keys drawn without repetition."""
    query_blocks = -(-tokens // query_block)
    return torch.rand(query_blocks, tokens, generator=torch.Generator().manual_seed(1)).argsort(-1)[None, :, :topk]


def upstream(out: Tensor) -> Tensor:
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(out.dtype)


def gradients(function: Callable[..., Tensor], tensors: Tensors, *args: Any, **options: Any) -> Tensors:
    out = function(*tensors, *args, **options)
    return torch.autograd.grad(out, tensors, upstream(out))


def packed(tensors: Tensors) -> tuple[Tensors, dict[str, Any]]:
    """The same tokens as three sequences, one of them empty, and three tokens that belong to none."""
    tokens = tensors[0].shape[2]
    cu = torch.tensor([0, 11, 11, tokens - 3])
    q, k, v = (x.detach()[0].transpose(0, 1).requires_grad_() for x in tensors)
    return (q, k, v), {"cu_seqlens_q": cu, "cu_seqlens_k": cu}


@pytest.mark.parametrize("query_block", [1, 3])
@pytest.mark.parametrize("layout", ["dense", "packed"])
def test_gradcheck_in_float64(layout: str, query_block: int) -> None:
    tensors, options = attention(7, torch.float64, (2, 1), (3, 2)), {}
    indices = random_indices(7, 4, query_block)
    if layout == "packed":
        cu = torch.tensor([0, 3, 7])
        options = {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
        tensors = tuple(x.detach()[0].transpose(0, 1).requires_grad_() for x in tensors)
        indices = random_indices(7, 4, 1)[0][: 7 if query_block == 1 else 1 + 2]
    assert torch.autograd.gradcheck(
        lambda *x: sparse_attention(*x, indices, query_block=query_block, **options, backend="tiled"), tensors
    )


@pytest.mark.parametrize("query_block", [1, 16])
@pytest.mark.parametrize("causal", [False, True])
def test_selecting_every_key_gives_the_gradients_of_dense_attention(
    backend: str, causal: bool, query_block: int
) -> None:
    tensors = attention()
    indices = random_indices(37, 37, query_block)
    ours = gradients(sparse_attention, tensors, indices, query_block=query_block, causal=causal, backend=backend)
    exact = tuple(x.detach().double().requires_grad_() for x in tensors)
    dense = gradients(scaled_dot_product_attention, exact, is_causal=causal, enable_gqa=True)
    for name, found, wanted in zip("qkv", ours, dense, strict=True):
        torch.testing.assert_close(found, wanted.float(), rtol=2e-5, atol=2e-5, msg=f"d{name}")


def test_a_query_with_one_key_has_no_gradient_and_gives_the_value_its_own(backend: str) -> None:
    """The softmax of one logit is constant: rounding must not give it a gradient."""
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = attention(13, dtype=dtype, heads=(2, 2))
        indices = torch.arange(13)[None, :, None]
        dq, dk, dv = gradients(sparse_attention, (q, k, v), indices, backend=backend)
        assert not dq.any()
        assert not dk.any()
        torch.testing.assert_close(dv, upstream(v))


def test_a_query_that_sees_no_key_adds_exactly_zero_whatever_it_holds(backend: str) -> None:
    q, k, v = attention(13)
    indices = random_indices(13, 6, 1)
    indices[:, ::3] = -1
    d_out = upstream(torch.empty(1, 4, 13, 24))
    hostile_q, hostile_d = q.detach().clone(), d_out.clone()
    hostile_q[:, :, ::3], hostile_d[:, :, ::3] = torch.nan, torch.inf
    found = []
    for queries, d in ((q, d_out), (hostile_q.requires_grad_(), hostile_d)):
        out = sparse_attention(queries, k, v, indices, causal=False, backend=backend)
        found.append(torch.autograd.grad(out, (queries, k, v), d))
    for clean, hostile in zip(*found, strict=True):
        assert torch.equal(clean, hostile)
    assert not found[1][0][:, :, ::3].any()


def test_keys_that_nobody_selected_have_gradients_of_exactly_zero(backend: str) -> None:
    tensors = attention()
    indices = random_indices(20, 7, 4)  # of the first 20 keys alone
    _, dk, dv = gradients(
        sparse_attention, tensors, indices.repeat(1, 2, 1), query_block=4, causal=False, backend=backend
    )
    assert dk[:, :, :20].any()
    assert not dk[:, :, 20:].any()
    assert not dv[:, :, 20:].any()


def test_a_gradient_that_is_not_finite_reaches_its_own_query_and_keys_alone(backend: str) -> None:
    q, k, v = attention()
    indices = random_indices(37, 5, 2)
    out = sparse_attention(q, k, v, indices, query_block=2, causal=False, backend=backend)
    d_out = upstream(out)
    d_out[0, 1, 8] = torch.nan
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), d_out)
    is_nan = torch.zeros(4, 37, dtype=torch.bool)
    is_nan[1, 8] = True
    assert torch.equal(dq[0].isnan().any(-1), is_nan)
    reached = torch.zeros(2, 37, dtype=torch.bool)
    reached[0, indices[0, 4]] = True  # key head 0, of query heads 0 and 1
    assert torch.equal(dk[0].isnan().any(-1), reached)
    assert torch.equal(dv[0].isnan().any(-1), reached)


@pytest.mark.parametrize("layout", ["dense", "packed"])
@pytest.mark.parametrize("query_block", [1, 4])
def test_repeated_backwards_are_bit_equal(backend: str, query_block: int, layout: str) -> None:
    _check_repeats(backend, query_block, layout, 2 if backend == "triton" else 20)


@pytest.mark.slow
@pytest.mark.parametrize("query_block", [1, 4])
def test_250_backwards_on_the_cpu_are_bit_equal(query_block: int) -> None:
    _check_repeats("cpu", query_block, "dense", 250)


def _check_repeats(backend: str, query_block: int, layout: str, repeats: int) -> None:
    tokens = 19 if backend == "triton" else 300
    tensors, options = attention(tokens, torch.bfloat16, heads=(6, 3)), {}
    indices = random_indices(tokens, 9, query_block)
    if layout == "packed":
        tensors, options = packed(tensors)
        indices = random_indices(tokens, 9, 1)[0]
        if query_block > 1:
            indices = indices[: sum(-(-n // query_block) for n in (11, tokens - 14, 3))]
    first = gradients(sparse_attention, tensors, indices, query_block=query_block, backend=backend, **options)
    for _ in range(repeats):
        again = gradients(sparse_attention, tensors, indices, query_block=query_block, backend=backend, **options)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


@pytest.mark.parametrize("causal", [False, True])
def test_the_lse_is_that_of_the_selected_keys_and_a_constant(backend: str, causal: bool) -> None:
    q, k, v = attention()
    indices = random_indices(37, 6, 4)
    out, lse = sparse_attention(q, k, v, indices, query_block=4, causal=causal, return_lse=True, backend=backend)
    per_query = indices.repeat_interleave(4, 1)[:, :37]
    expected = attention_lse(q.detach(), k.detach(), causal=causal, topk_indices=per_query, backend="tiled")
    torch.testing.assert_close(lse, expected, rtol=1e-6, atol=1e-6)
    assert out.requires_grad
    assert not lse.requires_grad
    plain = sparse_attention(q, k, v, indices, query_block=4, causal=causal, backend=backend)
    assert torch.equal(plain, out)


def test_the_lse_is_a_teachers_in_a_loss_on_the_same_keys() -> None:
    q, k, v = attention()
    indices = random_indices(37, 12, 1)
    _, lse = sparse_attention(q, k, v, indices, return_lse=True)
    index_q, index_k = torch.randn(1, 1, 37, 8, requires_grad=True), torch.randn(1, 37, 8)
    given = indexer_kl(q, k, index_q, index_k, topk_indices=indices, teacher_lse=lse)
    torch.testing.assert_close(given, indexer_kl(q, k, index_q, index_k, topk_indices=indices))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.slow
def test_compiled_whole_its_gradients_equal_eager(dynamic: bool) -> None:
    torch._dynamo.reset()

    def step(q: Tensor, k: Tensor, v: Tensor, indices: Tensor) -> Tensor:
        out, lse = sparse_attention(q, k, v, indices, query_block=4, return_lse=True)
        return out * torch.where(lse.isfinite(), lse, 0.0)[..., None]

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for tokens in (37, 26) if dynamic else (37,):
        tensors, indices = attention(tokens), random_indices(tokens, 6, 4)
        eager = gradients(step, tensors, indices)
        for found, wanted in zip(gradients(compiled, tensors, indices), eager, strict=True):
            torch.testing.assert_close(found, wanted)


def test_autocast_casts_the_inputs_as_it_does_for_attention() -> None:
    tensors, indices = attention(), random_indices(37, 6, 4)
    with torch.autocast("cpu", torch.bfloat16):
        out = sparse_attention(*tensors, indices, query_block=4)
    assert out.dtype == torch.bfloat16
    found = torch.autograd.grad(out, tensors, upstream(out))
    assert [x.dtype for x in found] == [torch.float32] * 3
    halves = tuple(x.detach().bfloat16().requires_grad_() for x in tensors)
    for ours, wanted in zip(found, gradients(sparse_attention, halves, indices, query_block=4), strict=True):
        assert torch.equal(ours, wanted.float())


def test_checkpointed_gradients_are_those_of_a_plain_backward() -> None:
    tensors, indices = attention(), random_indices(37, 6, 4)

    def checkpointed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return checkpoint(lambda *x: sparse_attention(*x, indices, query_block=4), q, k, v, use_reentrant=False)

    plain = gradients(sparse_attention, tensors, indices, query_block=4)
    for found, wanted in zip(gradients(checkpointed, tensors), plain, strict=True):
        assert torch.equal(found, wanted)


def test_only_the_inputs_that_need_gradients_have_them() -> None:
    q, k, v = (x.detach() for x in attention())
    sparse_attention(q, k.requires_grad_(), v, random_indices(37, 6, 4), query_block=4).sum().backward()
    assert k.grad is not None
    assert q.grad is None
    assert v.grad is None


def test_a_second_differentiation_raises() -> None:
    tensors, indices = attention(), random_indices(37, 6, 4)
    out = sparse_attention(*tensors, indices, query_block=4)
    (dq,) = torch.autograd.grad(out.sum(), tensors[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="not differentiated a second time"):
        dq.sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize("query_block", [1, 64])
@pytest.mark.parametrize("engine", ["tiled", "cpu"])
def test_forward_and_backward_take_memory_of_tokens_times_topk_and_never_of_all_pairs(
    engine: str, query_block: int
) -> None:
    peaks = {}
    for tokens in (2048, 4096, 8192):
        tensors, indices = attention(tokens, heads=(2, 1)), random_indices(tokens, 32, query_block)
        peaks[tokens] = counted_peak(
            lambda x=tensors, at=indices: gradients(sparse_attention, x, at, query_block=query_block, backend=engine)
        )
    print(engine, query_block, peaks)
    assert peaks[8192] <= 2.1 * peaks[4096], peaks
    assert peaks[8192] < 8192 * 8192, "a byte for every pair"
