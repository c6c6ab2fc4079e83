"""The host side: grids, guards, what is allocated, and that nothing waits for the device."""

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from streamkl.engines import triton
from streamkl.engines.triton.configs import architecture
from streamkl.engines.triton.launch import Launch, is_aligned
from streamkl.engines.triton.meta import Group
from streamkl.problem import Inputs, Problem, Side, Support
from streamkl.state import RowStats

pytest.importorskip("triton")

ARCH = "sm_90"


def meta_problem(
    heads=(8, 2, 8, 2),
    tokens=(4096, 4096),
    batch=2,
    dims=(128, 64),
    packed=0,
    deterministic=False,
    head_summed=False,
    selected=0,
) -> tuple[Problem, Inputs, RowStats]:
    def tensor(count: int, n: int, dim: int) -> torch.Tensor:
        return torch.empty(batch, count, n, dim, dtype=torch.bfloat16, device="meta")

    nq, nk = tokens
    inputs = Inputs(
        tensor(heads[0], nq, dims[0]), tensor(heads[1], nk, dims[0]), tensor(heads[2], nq, dims[1]),
        tensor(heads[3], nk, dims[1]), torch.empty(batch, nq, heads[2], device="meta").mT if head_summed else None,
    )  # fmt: skip
    cu = (torch.empty(packed + 1, dtype=torch.int32, device="meta") for _ in range(2)) if packed else (None, None)
    topk = torch.empty(batch, 1, nq, selected, dtype=torch.int32, device="meta") if selected else None
    support = Support.of(inputs.b_q, inputs.b_k, None, 0, *cu, topk=topk)
    problem = Problem(
        Side.of(*inputs[:2]), Side.of(inputs.b_q, inputs.b_k, head_summed=head_summed), support, deterministic
    )  # fmt: skip
    counts = (heads[0], heads[0], problem.distributions, problem.distributions)
    rows = [torch.empty(batch, n, nq, device="meta") for n in counts]
    return problem, inputs, RowStats(*rows)


def every_plan(problem: Problem, inputs: Inputs, stats: RowStats) -> dict[str, list[Launch]]:
    from streamkl.engines.triton import _plans

    plans = _plans(problem.support)
    found = {
        "lse": plans.logsumexp(problem.support, problem.a, inputs.a_q, inputs.a_k, None, ARCH)[0],
        "lse of b": plans.logsumexp(problem.support, problem.b, inputs.b_q, inputs.b_k, inputs.b_w, ARCH)[0],
        "backward": plans.backward(problem, inputs, stats, stats.m_b, stats.m_b, problem.head_group == 1, True, ARCH)[
            0
        ],
        "train": plans.train(problem, inputs, stats, stats.m_b, ARCH)[0],
    }
    if problem.head_group == 1 and not problem.b.head_summed:
        found["paired"] = plans.paired_rows(problem, inputs, ARCH)[0]
    else:
        found["mixture"] = plans.mixture_rows(problem, inputs, stats.m_a, stats.ln_l_a, ARCH)[0]
    return found


@pytest.mark.parametrize("selected", [0, 16])
def test_batch_times_heads_beyond_65535_lies_on_grid_x(selected: int) -> None:
    plans = every_plan(*meta_problem(heads=(1000, 1000, 1000, 1000), tokens=(64, 64), batch=80, selected=selected))
    for name, launches in plans.items():
        for launch in launches:
            assert isinstance(launch.programs, int), name  # one number: all of it on axis x, which holds 2^31 - 1
            if "ROWS" in launch.constants:
                assert launch.programs >= 80_000, name


@pytest.mark.parametrize("packed", [1, 7, 300])
def test_packed_grids_have_a_spare_block_per_sequence(packed: int) -> None:
    problem, inputs, stats = meta_problem(batch=1, packed=packed)
    for launch in every_plan(problem, inputs, stats)["paired"]:
        rows = 4096 * Group.of(problem).pack
        assert launch.arguments["counts"].blocks == rows // launch.constants["ROWS"] + packed


@pytest.mark.parametrize("packed", [0, 3])
@pytest.mark.parametrize("how", ["one_pass", "deterministic", "selected"])
@pytest.mark.parametrize("heads", [(8, 2, 8, 2), (8, 2, 2, 1), (8, 2, 4, 1)], ids=["per_head", "groups", "indexer"])
def test_nothing_is_read_and_only_outputs_rows_accumulators_and_partials_are_allocated(heads, how, packed):
    """Meta tensors have no values to read: a plan that waited for one would fail here."""
    head_summed = heads == (8, 2, 4, 1)
    problem, inputs, stats = meta_problem(
        heads, (48, 5000), 1, packed=packed, deterministic=how == "deterministic", head_summed=head_summed,
        selected=2048 if how == "selected" else 0,
    )  # fmt: skip
    allowed = {tuple(x.shape) for x in (*inputs, *stats) if x is not None} | {()}

    class Allocations(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                shape = tuple(out.shape)
                partial = len(shape) == 3 and shape[0] <= 5 and shape[2] in (48 * 8, 48 * 2, 48)  # states of split keys
                partial = partial or (len(shape) > 1 and shape[1:] in allowed)  # gradients and sums of split keys
                assert shape in allowed or partial, (func, shape)
            return out

    with Allocations():
        every_plan(problem, inputs, stats)


@pytest.mark.parametrize("heads", [(8, 2, 8, 2), (8, 2, 2, 1)], ids=["per_head", "groups"])
def test_deterministic_plans_add_nothing_in_a_random_order(heads) -> None:
    for name, launches in every_plan(*meta_problem(heads, (48, 5000), 1, deterministic=True)).items():
        for launch in launches:
            if launch.kernel.__name__ == "keys_kernel":
                want = launch.constants["WANT"]
                assert not any((want.dq, want.loss, want.atomic_a, want.atomic_b)), name


@pytest.mark.parametrize("bad", ["no json", '{"sm_90": {"paired": {"128": {"depth": 3}}}}', '{"sm_90": [1]}'])
def test_a_table_that_cannot_be_read_is_refused_by_name(bad: str, tmp_path: Path) -> None:
    path = tmp_path / "configs.json"
    path.write_text(bad)
    with pytest.raises(ValueError, match=r"STREAMKL_CONFIGS .*configs\.json"):
        architecture._add_own({"sm_90": {}}, str(path))


def test_a_table_for_a_new_gpu_starts_from_the_one_before_it(tmp_path: Path) -> None:
    path = tmp_path / "configs.json"
    path.write_text(json.dumps({"sm_103": {"paired": {"128": {"rows": 64, "keys": 32, "warps": 4, "stages": 1}}}}))
    tables = {arch: dict(table) for arch, table in architecture._tables().items()}
    architecture._add_own(tables, str(path))
    assert set(tables["sm_103"]) == set(tables["sm_100"])
    assert tables["sm_103"]["paired"][128].rows == 64


@pytest.mark.parametrize(
    ("heads", "topk_heads", "rows"),
    [((8, 2, 8, 2), 1, 4), ((8, 2, 8, 4), 1, 2), ((8, 2, 8, 2), 8, 1), ((8, 2, 4, 1), 1, 4)],
    ids=["share_keys", "share_fewer", "topk_per_head", "indexer"],
)
def test_heads_that_share_a_topk_head_and_key_heads_share_a_program(heads, topk_heads, rows) -> None:
    problem, inputs, stats = meta_problem(heads, (64, 64), 1, head_summed=heads == (8, 2, 4, 1), selected=16)
    support = replace(problem.support, topk=torch.empty(1, topk_heads, 64, 16, dtype=torch.int32, device="meta"))
    for name, launches in every_plan(replace(problem, support=support), inputs, stats).items():
        passes = [launch for launch in launches if "ROWS" in launch.constants]
        if name in ("backward", "train", "lse of b"):
            assert {launch.programs for launch in passes} == {64 * heads[2] // rows}, name


def test_deterministic_gradients_of_selected_keys_are_refused_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, *_ = meta_problem(selected=16, deterministic=True)
    refusal = triton.unsupported(torch.device("cuda"), problem)
    assert refusal is not None
    assert "not deterministic with topk_indices" in refusal
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert triton.unsupported(torch.device("cpu"), problem) is None  # one program after another


@pytest.mark.parametrize("packed", [0, 3])
@pytest.mark.parametrize(("query_block", "programs"), [(1, 4096 * 8), (64, 64 * 8 * 2)])
def test_sparse_attention_has_a_program_per_query_block_and_key_head_and_reads_nothing(
    query_block, programs, packed
) -> None:
    """A query block of 64 with four heads makes two tiles of 128 rows."""
    from streamkl.engines.triton.plans.attention import sparse_attention, sparse_attention_backward

    problem, inputs, _ = meta_problem((32, 8, 32, 8), batch=1, packed=packed)
    indices = torch.empty(1, 4096 // query_block, 2048, dtype=torch.int32, device="meta")
    q, k = inputs[:2]
    given = (problem.support, problem.a, q, k, k[..., :64], indices, query_block)
    (launch,), output = sparse_attention(*given, True, ARCH)
    assert launch.programs == programs
    assert launch.constants["ROWS"] == (16 if query_block == 1 else 128)
    for out in (output.out, output.rest):
        assert out.shape == (1, 32, 4096, 64)
        assert out.transpose(1, 2).is_contiguous()
    launches, gradients = sparse_attention_backward(*given, output, torch.empty_like(output.out), ARCH)
    assert [launch.kernel.__name__ for launch in launches] == ["attention_queries_kernel", "attention_keys_kernel"]
    assert launches[1].programs >= 4096 // launches[1].constants["KEYS"] * 8
    assert [x.shape for x in gradients] == [q.shape, k.shape, (1, 8, 4096, 64)]


def test_few_queries_split_the_keys_and_merge() -> None:
    launches = every_plan(*meta_problem(tokens=(1, 65536), batch=1))["paired"]
    assert [launch.kernel.__name__ for launch in launches] == ["paired_kernel", "merge_paired_kernel"]
    assert launches[0].programs >= architecture.processors(ARCH)


@pytest.mark.parametrize("packed", [0, 3])
@pytest.mark.parametrize("query_block", [1, 64])
def test_a_selection_holds_some_scores_at_a_time_and_reads_nothing(query_block, packed) -> None:
    """Beside the result, which has 2,048 keys for each of 65,536 queries: 64 MB of scores and 128 MB of ranks."""
    from streamkl.engines.triton.plans.selection import index_topk

    tokens = 65_536
    problem, inputs, _ = meta_problem((8, 2, 8, 1), (tokens, tokens), 1, packed=packed, head_summed=True)
    allocated = []

    class Allocations(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and func.overloadpacket is torch.ops.aten.empty:
                allocated.append(out.numel() * out.element_size())
            return out

    with Allocations():
        launches, out = index_topk(
            problem.support, problem.b, inputs.b_q, inputs.b_k, inputs.b_w, None, 2048, query_block,
            tokens // query_block, ARCH,
        )  # fmt: skip
    assert sum(allocated) <= out.numel() * 4 + (200 << 20)
    assert {launch.kernel.__name__ for launch in launches} == {"block_scores_kernel", "best_keys_kernel"}


def test_the_tensors_device_is_current_while_a_kernel_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    events = []

    @contextlib.contextmanager
    def guard(device):
        events.append(("enter", device))
        yield
        events.append(("exit", device))

    class Kernel:
        def __getitem__(self, counts):
            return lambda **arguments: events.append(("launch", counts))

    monkeypatch.setattr(torch.cuda, "device", guard)
    device = torch.device("cuda", 3)
    Launch(Kernel(), 5, {}).run(device)
    assert events == [("enter", device), ("launch", (5,)), ("exit", device)]


def test_an_empty_grid_is_not_launched() -> None:
    Launch(None, 0, {}).run(torch.device("cuda", 0))


def test_alignment_is_what_allows_loads_of_16_bytes() -> None:
    x = torch.empty(1, 2, 8, 64, dtype=torch.bfloat16)
    assert is_aligned(x)
    assert not is_aligned(x[..., 1:])
    assert not is_aligned(x.transpose(-1, -2))
    assert not is_aligned(torch.empty(1, 2, 8, 40, dtype=torch.bfloat16))


@pytest.mark.slow
def test_a_table_of_ones_own_replaces_rows(tmp_path: Path) -> None:
    path = tmp_path / "configs.json"
    path.write_text(json.dumps({"sm_90": {"paired": {"128": {"rows": 64, "keys": 32, "warps": 4, "stages": 1}}}}))
    script = (
        "from streamkl.engines.triton.configs import architecture; "
        "print(architecture.config('sm_90', 'paired', 128).rows)"
    )
    for environment, rows in (({}, "128"), ({"STREAMKL_CONFIGS": str(path)}, "64")):
        result = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert result.stdout.strip() == rows, result.stderr


def test_every_table_has_every_kind() -> None:
    kinds = ("lse", "paired", "mixture", "keys_one", "keys_group", "queries_one", "queries_group", "keys_both",
             "lse_index", "mixture_index", "keys_index", "queries_index", "lse_gathered", "paired_gathered",
             "mixture_gathered", "gradient_gathered", "attention", "attention_queries", "attention_keys",
             "selection")  # fmt: skip
    for arch in ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950", "sm_103", "gfx999"):
        for kind in kinds:
            for flavour in ("", "_misaligned", "_float32"):
                for width in (16, 64) if kind == "keys_both" else (16, 64, 128, 192, 256, 576):
                    assert architecture.config(arch, kind + flavour, width).rows >= 16
