"""What holds for both indexers: their tensors, scores, loss and top-k."""

import inspect

import pytest
import torch
from torch import nn

from streamkl import indexer_kl
from streamkl.indexer import HeadIndexer, Indexer, LightningIndexer, apply_rope, rope_tables
from streamkl.sparse import index_topk

HIDDEN, LATENT, TOKENS = 48, 20, 37
KINDS = ["head", "lightning"]


def make(kind: str, **options) -> Indexer:
    torch.manual_seed(0)
    if kind == "head":
        return HeadIndexer(HIDDEN, head_dim=16, **options)
    return LightningIndexer(HIDDEN, heads=4, head_dim=16, rope_dim=8, **options)


def teacher(batch: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(batch, 9, TOKENS, 24), torch.randn(batch, 3, TOKENS, 24)


def test_lightning_projects_as_deepseek_v32_does() -> None:
    indexer = make("lightning", query_dim=LATENT)
    hidden, latent = torch.randn(2, TOKENS, HIDDEN), torch.randn(2, TOKENS, LATENT)
    index_q, index_k, index_w = indexer(hidden, latent)
    tables = rope_tables(torch.arange(TOKENS), 8)
    q = (latent @ indexer.wq_b.weight.T).view(2, TOKENS, 4, 16).transpose(1, 2)
    norm = indexer.k_norm
    k = nn.functional.layer_norm(hidden @ indexer.wk.weight.T, (16,), norm.weight, norm.bias, 1e-6)
    torch.testing.assert_close(index_q, apply_rope(q, *tables))
    torch.testing.assert_close(index_k, apply_rope(k, *tables))
    torch.testing.assert_close(index_w, hidden @ indexer.weights_proj.weight.T / 2)


def test_parameters_have_the_names_that_checkpoints_have() -> None:
    names = {"wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight"}
    assert set(make("lightning").state_dict()) == names
    assert set(make("head").state_dict()) == names - {"wq_b.weight", "weights_proj.weight"} | {"wq.weight"}


def test_head_has_one_head_and_no_weights() -> None:
    indexer = make("head")
    hidden = torch.randn(2, TOKENS, HIDDEN)
    index_q, index_k, index_w = indexer(hidden)
    assert (index_q.shape, index_k.shape, index_w) == ((2, 1, TOKENS, 16), (2, TOKENS, 16), None)
    torch.testing.assert_close(index_q[:, 0, 0], hidden[:, 0] @ indexer.wq.weight.T)  # position 0 is not rotated


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("activation", ["relu", None])
def test_dense_scores_are_their_definition_and_topk_ranks_them(kind, activation) -> None:
    indexer = make(kind, activation=activation)
    hidden = torch.randn(2, TOKENS, HIDDEN)
    q, k, w = indexer(hidden)
    x = torch.einsum("bjnd,bmd->bjnm", q, k) / 4
    x = x.relu() if activation else x
    expected = x.sum(1) if w is None else torch.einsum("bjnm,bnj->bnm", x, w)
    scores = indexer.scores(hidden)
    visible = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    torch.testing.assert_close(scores, expected.masked_fill(~visible, -torch.inf))
    assert torch.equal(indexer.topk(hidden, topk=7), index_topk(q, k, w, activation=activation, topk=7))
    selected = indexer.topk(hidden, 7).long()
    best = scores.topk(7, -1).values
    torch.testing.assert_close(
        scores.gather(-1, selected.clamp(min=0)).masked_fill(selected < 0, -torch.inf), best, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("kind", KINDS)
def test_topk_of_a_query_block_has_its_diagonal_and_then_the_best_of_all_its_queries(kind) -> None:
    indexer, query_block, topk = make(kind, activation=None), 4, 7
    hidden = torch.randn(2, TOKENS, HIDDEN)
    selected = indexer.topk(hidden, topk=topk, query_block=query_block).long()
    assert selected.shape == (2, -(-TOKENS // query_block), topk)
    scores = indexer.scores(hidden)
    for n, queries in enumerate(torch.arange(TOKENS).split(query_block)):
        assert torch.equal(selected[:, n, : len(queries)], queries.expand(2, -1))
        others = scores[:, queries].amax(1)
        others[:, queries] = -torch.inf
        best = others.topk(topk - len(queries)).values
        found = selected[:, n, len(queries) :]
        found_scores = others.gather(-1, found.clamp(min=0)).masked_fill(found < 0, -torch.inf)
        torch.testing.assert_close(found_scores, best, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_topk_has_the_arguments_of_index_topk_packed_or_not(kind) -> None:
    indexer, packed = make(kind), torch.tensor([0, 11, 11, TOKENS], dtype=torch.int32)
    hidden = torch.randn(TOKENS, HIDDEN)
    options = {"topk": 5, "query_block": 4, "causal": True, "window": (9, 0), "normalise": True, "index_scale": 3.0}
    options["backend"] = "tiled"
    named = set(inspect.signature(index_topk).parameters) - {"index_q", "index_k", "index_w", "activation"}
    assert named <= set(inspect.signature(indexer.topk).parameters)
    starts = {"cu_seqlens_q": packed, "cu_seqlens_k": packed}
    expected = index_topk(*indexer(hidden, cu_seqlens=packed), **options, **starts)
    assert torch.equal(indexer.topk(hidden, **options, **starts), expected)
    assert torch.equal(indexer.topk(hidden, **options, cu_seqlens_q=packed), expected)
    for other in (packed[1:], packed + torch.tensor([0, 1, 1, 0], dtype=torch.int32)):
        with pytest.raises(ValueError, match="cu_seqlens_k must be equal to cu_seqlens_q"):
            indexer.topk(hidden, 5, cu_seqlens_q=packed, cu_seqlens_k=other)
    with pytest.raises(ValueError, match="got cu_seqlens_k alone"):
        indexer.topk(hidden, 5, cu_seqlens_k=packed)
    assert torch.equal(indexer.topk(hidden[None], **options), index_topk(*indexer(hidden[None]), **options))


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_indexer_kl_and_trains_the_indexer_alone(kind) -> None:
    indexer = make(kind, query_dim=LATENT)
    q, k = (x.requires_grad_() for x in teacher())
    hidden = torch.randn(2, TOKENS, HIDDEN, requires_grad=True)
    latent = torch.randn(2, TOKENS, LATENT, requires_grad=True)
    weight = torch.rand(2, TOKENS)
    loss = indexer.loss(hidden, q, k, query=latent, row_weight=weight, window=(20, 0), teacher_scale=0.3)
    index = indexer(hidden, latent)
    expected = indexer_kl(q, k, *index, row_weight=weight, window=(20, 0), teacher_scale=0.3)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in indexer.parameters())
    assert all(x.grad is None for x in (hidden, latent, q, k))


@pytest.mark.parametrize("kind", KINDS)
def test_a_support_restricts_the_loss(kind) -> None:
    indexer, (q, k) = make(kind), teacher()
    hidden = torch.randn(2, TOKENS, HIDDEN)
    everything = torch.arange(TOKENS).expand(2, TOKENS, TOKENS)
    dense = indexer.loss(hidden, q, k)
    torch.testing.assert_close(indexer.loss(hidden, q, k, topk_indices=everything), dense)
    assert indexer.loss(hidden, q, k, topk_indices=indexer.topk(hidden, 1)) == 0  # one key each: nothing to learn
    assert dense > 0


@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences_are_those_sequences(kind) -> None:
    indexer, (q, k) = make(kind), teacher(batch=1)
    hidden = torch.randn(1, TOKENS, HIDDEN)
    starts = [0, 11, 11, TOKENS]
    packed = {"cu_seqlens": torch.tensor(starts, dtype=torch.int32)}
    packed_q, packed_k = (x[0].transpose(0, 1) for x in (q, k))
    rows = indexer.loss(hidden[0], packed_q, packed_k, reduction="none", **packed)
    selected, scores = (
        indexer.topk(hidden[0], 6, cu_seqlens_q=packed["cu_seqlens"]),
        indexer.scores(hidden[0], **packed),
    )
    tensors = indexer(hidden[0], **packed)
    assert (rows.shape, selected.shape, scores.shape) == ((1, TOKENS), (TOKENS, 6), (TOKENS, TOKENS))
    for start, end in ((0, 11), (11, TOKENS)):
        part = hidden[:, start:end]
        alone = indexer.loss(part, q[:, :, start:end], k[:, :, start:end], reduction="none")
        torch.testing.assert_close(rows[:, start:end], alone[0])
        torch.testing.assert_close(scores[start:end, start:end], indexer.scores(part)[0])
        torch.testing.assert_close(tensors.index_k[start:end], indexer(part).index_k[0])  # positions start again
        assert torch.equal(selected[start:end], indexer.topk(part, 6)[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_positions_and_the_callers_tables_say_the_same(kind, layout) -> None:
    indexer = make(kind, rope_layout=layout, rope_base=500.0)
    hidden, positions = torch.randn(2, TOKENS, HIDDEN), torch.arange(TOKENS) + 5
    tables = rope_tables(positions, indexer.rope_dim, 500.0)
    expected = indexer(hidden, positions=positions)
    for given in (tables, [x[None] for x in tables], [x[None].expand(2, -1, -1) for x in tables]):
        got = indexer(hidden, position_embeddings=tuple(given))
        torch.testing.assert_close(got.index_q, expected.index_q)
        torch.testing.assert_close(got.index_k, expected.index_k)
    packed = indexer(
        hidden[0], position_embeddings=tuple(x[None] for x in tables), cu_seqlens=torch.tensor([0, TOKENS])
    )
    torch.testing.assert_close(packed.index_k, expected.index_k[0])
    torch.testing.assert_close(indexer.scores(hidden), indexer.scores(hidden, positions=positions))  # distances alone


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_divided_by_the_learned_temperature(kind) -> None:
    indexer, hidden = make(kind, temperature=True), torch.randn(1, TOKENS, HIDDEN)
    before = indexer.scores(hidden)
    indexer.log_temperature.data.fill_(torch.tensor(2.0).log())
    torch.testing.assert_close(indexer.scores(hidden), before / 2)


def test_weights_stay_float32_beside_bfloat16_and_all_is_float64_in_float64() -> None:
    indexer = make("lightning").bfloat16()
    indexer.weights_proj.float()
    index_q, index_k, index_w = indexer(torch.randn(1, 5, HIDDEN, dtype=torch.bfloat16))
    assert (index_q.dtype, index_k.dtype, index_w.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    doubled = make("lightning").double()(torch.randn(1, 5, HIDDEN).double())
    assert all(x.dtype == torch.float64 for x in doubled)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_torch_compile_traces_through_the_loss(kind) -> None:
    indexer, (q, k) = make(kind), teacher()
    hidden = torch.randn(2, TOKENS, HIDDEN)
    compiled = torch.compile(lambda *tensors: indexer.loss(*tensors), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(hidden, q, k), indexer.loss(hidden, q, k))


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_casts_queries_and_keys_alike(kind) -> None:
    indexer, (q, k) = make(kind), teacher()
    hidden = torch.randn(2, TOKENS, HIDDEN)
    exact = indexer.loss(hidden, q, k)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        index_q, index_k, _ = indexer(hidden)
        loss, selected = indexer.loss(hidden, q, k), indexer.topk(hidden, 5)
    assert index_q.dtype == index_k.dtype == torch.bfloat16
    assert (loss.dtype, selected.shape) == (torch.float32, (2, TOKENS, 5))
    torch.testing.assert_close(loss, exact, rtol=0.05, atol=0)
    loss.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in indexer.parameters())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda i, x: i(x[0]), r"hidden must be of shape \[batch, tokens, dim\]: got \[37, 48\]"),
        (lambda i, x: i(x, cu_seqlens=torch.tensor([0, 3])), r"of shape \[tokens, dim\] with cu_seqlens"),
        (lambda i, x: i(x, x[:, :3]), r"query must have the tokens of hidden, \[2, 37\]"),
        (lambda i, x: i(x, positions=torch.arange(37), position_embeddings=(x, x)), "got both"),
        (lambda i, x: i(x, position_embeddings=rope_tables(torch.arange(36), 8)), r"cos must be of shape"),
        (lambda i, x: i(x, position_embeddings=rope_tables(torch.arange(37), 4)), "rope_dim = 8 dims: got 4"),
        (lambda i, x: LightningIndexer(8, head_dim=8, rope_dim=9), "rope_dim must be even and at most head_dim, 8"),
        (lambda i, x: HeadIndexer(8, rope_layout="pairs"), "rope_layout must be one of 'half', 'interleaved'"),
        (lambda i, x: HeadIndexer(8, activation="gelu"), "activation must be 'relu' or None: got 'gelu'"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused(call, message) -> None:
    with pytest.raises(ValueError, match=message):
        call(make("lightning"), torch.randn(2, TOKENS, HIDDEN))


@pytest.mark.parametrize(("head_dim", "rotated"), [(32, 16), (128, 64), (6, 2)])
def test_half_of_a_lightning_head_is_rotated_unless_said_otherwise(head_dim: int, rotated: int) -> None:
    assert LightningIndexer(128, heads=4, head_dim=head_dim).rope_dim == rotated
