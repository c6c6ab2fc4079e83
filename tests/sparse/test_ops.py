"""The operators of sparse attention under tracing: registration, ``torch.compile`` and ``torch.export``."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.export import Dim, export

from streamkl.sparse import index_topk, oracle_topk, sparse_attention
from streamkl.sparse import ops as sparse_ops

TOPK = 3
Inputs = dict[str, Tensor]


def dense(tokens: tuple[int, int] = (16, 16), seed: int = 0) -> Inputs:
    rng = torch.Generator().manual_seed(seed)
    nq, nk = tokens
    shapes = {
        "q": (1, 4, nq, 8), "k": (1, 2, nk, 8), "v": (1, 2, nk, 8), "index_q": (1, 3, nq, 8), "index_k": (1, nk, 8),
        "index_w": (1, nq, 3),
    }  # fmt: skip
    return {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()}


def packed(cu_seqlens_q: list[int], cu_seqlens_k: list[int], seed: int = 0) -> Inputs:
    """Tokens of packed sequences, and two more that belong to none."""
    plain = dense((cu_seqlens_q[-1] + 2, cu_seqlens_k[-1] + 2), seed)
    inputs = {name: x[0].transpose(0, 1) if x.dim() == 4 else x[0] for name, x in plain.items()}
    return {**inputs, "cu_seqlens_q": torch.tensor(cu_seqlens_q), "cu_seqlens_k": torch.tensor(cu_seqlens_k)}


def attend(query_block: int) -> Callable[[Inputs], Tensor]:
    """The oracle's keys, and attention over them."""

    def run(x: Inputs) -> Tensor:
        mask = {name: cu for name, cu in x.items() if name.startswith("cu")}
        indices = oracle_topk(x["q"], x["k"], topk=TOPK, query_block=query_block, **mask)
        return sparse_attention(x["q"], x["k"], x["v"], indices, query_block=query_block, **mask)

    return run


def select(query_block: int) -> Callable[[Inputs], Tensor]:
    """An indexer's keys."""

    def run(x: Inputs) -> Tensor:
        mask = {name: cu for name, cu in x.items() if name.startswith("cu")}
        return index_topk(
            x["index_q"], x["index_k"], x["index_w"], topk=TOPK, query_block=query_block, normalise=True, **mask
        )

    return run


FUNCTIONS = {"attend": attend, "select": select}
SHORT, LONG = ([0, 4, 9], [0, 6, 13]), ([0, 3, 3, 20, 30], [0, 7, 8, 26, 31])


def op_arguments() -> dict[str, tuple]:
    x, short = dense((9, 13)), packed(*SHORT)
    given = {"dense": x, "packed": {n: t if n.startswith("cu") else t[None] for n, t in short.items()}}
    arguments = {}
    for kind, query_block in (("dense", 1), ("dense", 4), ("packed", 1)):
        y = given[kind]
        q, k, v, index_q = (y[n] if kind == "dense" else y[n].transpose(1, 2) for n in ("q", "k", "v", "index_q"))
        keys = (y.get("cu_seqlens_q"), y.get("cu_seqlens_k"), None, 0, query_block, "tiled")
        lse = torch.ops.streamkl.logsumexp(
            q, k, None, None, *keys[:2], None, False, False, None, 0, 1, False, torch.float32, "tiled"
        )
        index = (index_q, y["index_k"][:, None], y["index_w"].transpose(1, 2), None)
        indices = torch.ops.streamkl.attention_topk(q, k, lse[0] + lse[1], None, TOPK, *keys)
        halves, rest = tuple(x.bfloat16() for x in (q, k, v)), (indices, None, *keys)
        output = torch.ops.streamkl.sparse_attention(q, k, v, *rest, True, None)
        d_out = torch.ones_like(output[0])
        arguments |= {
            f"index_topk-{kind}-{query_block}": (*index, True, True, True, TOPK, *keys),
            f"attention_topk-{kind}-{query_block}": (q, k, lse[0] + lse[1], None, TOPK, *keys),
            f"sparse_attention-{kind}-{query_block}": (q, k, v, indices, None, *keys, True, None),
            f"sparse_attention-{kind}-{query_block}-bfloat16": (*halves, indices, None, *keys, True, None),
            f"sparse_attention_backward-{kind}-{query_block}": (d_out, None, *output, q, k, v, *rest),
            f"sparse_attention_backward-{kind}-{query_block}-lse": (d_out, lse[0], *output, q, k, v, *rest),
        }
    return arguments


ARGUMENTS = op_arguments()


@pytest.mark.slow
@pytest.mark.parametrize("name", ARGUMENTS)
def test_opcheck(name: str) -> None:
    operator = name.split("-")[0]
    arguments = [x.detach() if isinstance(x, Tensor) else x for x in ARGUMENTS[name]]
    if operator == "sparse_attention":  # differentiable, by its first three arguments
        arguments[:3] = [x.requires_grad_() for x in arguments[:3]]
    torch.library.opcheck(getattr(torch.ops.streamkl, operator).default, tuple(arguments))


def test_every_operator_is_opchecked() -> None:
    assert {name.split("-")[0] for name in ARGUMENTS} == set(sparse_ops.SCHEMAS)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("query_block", [1, 4])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_compiled_whole_equals_eager(name: str, query_block: int, dynamic: bool) -> None:
    torch._dynamo.reset()
    function = FUNCTIONS[name](query_block)
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for tokens in ((16, 16), (9, 13), (3, 30)) if dynamic else ((16, 16),):
        torch.testing.assert_close(compiled(dense(tokens)), function(dense(tokens)))


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("query_block", [1, 4])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_packed_and_compiled_whole_equals_eager(name: str, query_block: int, dynamic: bool) -> None:
    """The number of query blocks depends on the sequences' lengths, which PyTorch traces where it is told to."""
    torch._dynamo.reset()
    function = FUNCTIONS[name](query_block)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=query_block > 1):
        compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
        for lengths in (SHORT, LONG) if dynamic else (SHORT,):
            torch.testing.assert_close(compiled(packed(*lengths)), function(packed(*lengths)))


class Model(torch.nn.Module):
    """What ``torch.export`` takes."""

    def __init__(self, function: Callable[[Inputs], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, inputs: Inputs) -> Tensor:
        return self.function(inputs)


def dynamic_lengths(inputs: Inputs) -> dict[str, dict[int, Dim]]:
    """The axis of tokens of each tensor, and of the sequences, of any length."""
    nq, nk, sequences = Dim("nq", max=4096), Dim("nk", max=4096), Dim("sequences", max=100)
    axis = {2: 0, 3: 0} if "cu_seqlens_q" in inputs else {3: 1, 4: 2}
    return {
        name: {0: sequences} if name.startswith("cu") else {axis[x.dim()]: nk if name in ("k", "v", "index_k") else nq}
        for name, x in inputs.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dense", "packed"])
@pytest.mark.parametrize("query_block", [1, 4])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_exported_with_a_dynamic_length_equals_eager(name: str, query_block: int, layout: str) -> None:
    """Lengths as short as a query block among them."""
    given = dense() if layout == "dense" else packed(*SHORT)
    others = [dense(n) for n in ((33, 37), (3, 5))] if layout == "dense" else [packed(*LONG), packed([0, 2], [0, 3])]
    model = Model(FUNCTIONS[name](query_block))
    exported = export(model, (given,), dynamic_shapes=(dynamic_lengths(given),), strict=False).module()
    for inputs in (given, *others):
        torch.testing.assert_close(exported(inputs), model(inputs))
