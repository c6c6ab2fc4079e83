"""Selected keys on the CPU engine: more than are processed at once, on several threads, in flat scratch."""

from collections.abc import Callable, Iterator

import pytest
import torch

from streamkl import attention_kl, attention_lse, indexer_kl, value_checks
from streamkl.engines import cpu
from streamkl.testing import STUDENT, TEACHER, Case, Heads, check_accuracy, evaluate, make_case, make_indexer_case
from streamkl.testing.indexer_cases import IndexerHeads

QUERIES, KEYS, SELECTED = 130, 900, 700
REPEATS = 20


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def large_topk(topk_heads: int | None = None, keys: int = KEYS, seed: int = 0) -> torch.Tensor:
    """``[1, Nq, K]`` or ``[1, topk_heads, Nq, K]``, of different lengths, ragged against every power of two."""
    shape = (1, QUERIES) if topk_heads is None else (1, topk_heads, QUERIES)
    rng = torch.Generator().manual_seed(seed)
    selected = torch.rand(*shape, keys, generator=rng).argsort(-1)[..., :SELECTED]
    lengths = torch.randint(1, SELECTED + 1, (*shape, 1), generator=rng)
    return torch.where(torch.arange(SELECTED) < lengths, selected, -1)


def long_case(kind: str, dtype: torch.dtype, **options) -> Case:
    options = {"tokens": (QUERIES, KEYS), "batch": 1, "dtypes": (dtype, dtype), "causal": True, **options}
    if kind == "indexer":
        return make_indexer_case(1, heads=IndexerHeads(6, 2, 20), topk_indices=large_topk(), **options)
    if kind == "heads":
        topk = large_topk(4)
        return make_case(2, heads=Heads(4, 2, 4, 1), topk_indices=topk, wanted=STUDENT + TEACHER, **options)
    return make_case(3, heads=Heads(12, 1, 2, 1), topk_indices=large_topk(), **options)


def run(case: Case, **options) -> dict[str, torch.Tensor]:
    function = indexer_kl if case.function == "indexer_kl" else attention_kl
    options = {**case.options, "teacher_lse": case.teacher_lse, "backend": "cpu", **options}
    return evaluate(function, case.tensors, case, **options).named()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["heads", "groups", "indexer"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("teacher_lse", [False, True], ids=["", "lse"])
def test_a_large_topk_is_accurate_on_several_threads(teacher_lse: bool, dtype: torch.dtype, kind: str, threads) -> None:
    threads(3)
    case = long_case(kind, dtype, teacher_lse=teacher_lse)
    errors = check_accuracy(case, "cpu")
    assert errors.worst <= 1, f"{errors}; {case}"


@pytest.mark.parametrize("large", [30.0, 3000.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_that_rise_along_the_selected_keys(dtype: torch.dtype, large: float) -> None:
    """The first keys set the row max of each lane; far larger logits in later ones must move it."""
    rising = torch.arange(KEYS).expand(1, 40, KEYS)
    case = make_case(
        2, tokens=(40, KEYS), batch=1, dtypes=(dtype, dtype), wanted=STUDENT + TEACHER, topk_indices=rising
    )
    for name in ("teacher_k", "student_k"):
        case.tensors[name] = (case.tensors[name] * (1 + torch.linspace(0.0, large, KEYS)[:, None])).to(dtype)
    errors = check_accuracy(case, "cpu")
    assert errors.worst <= 1, f"{errors}; {case}"


def test_keys_whose_logits_are_minus_infinity_are_passed_over() -> None:
    q, k = torch.ones(1, 1, 4, 16), torch.ones(1, 1, 600, 16)
    k[:, :, :300] = -float("inf")
    every, finite = torch.arange(600).expand(1, 4, 600), torch.arange(300, 600).expand(1, 4, 300)
    lse = (attention_lse(q, k, topk_indices=keys, backend="cpu") for keys in (every, finite))
    torch.testing.assert_close(*lse)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["heads", "groups", "indexer"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_repeated_calls_are_bit_equal(dtype: torch.dtype, kind: str, threads) -> None:
    """With more threads than head groups, so that the rows of each are partitioned."""
    threads(3)
    case = long_case(kind, dtype)
    first = run(case)
    for _ in range(REPEATS):
        for name, value in run(case).items():
            assert torch.equal(value, first[name]), name


def broken_topk(seed: int, nk: int) -> torch.Tensor:
    """Correct indices, but for some entries: keys twice, beyond the last one, or below -1."""
    rng = torch.Generator().manual_seed(seed)
    shape, columns = (1 + seed % 2, 1 + seed % 3, 70), 1 + seed * 7 % nk
    topk = torch.rand(*shape, nk, generator=rng).argsort(-1)[..., :columns]
    topk[torch.rand(topk.shape, generator=rng) < 0.3] = -1
    for wrong in (nk, -2, topk[0, 0, 0, 0], 2**31 - 1)[: seed % 5]:
        batch, head, row, column = (int(torch.randint(n, (), generator=rng)) for n in topk.shape)
        topk[batch, head, row, column] = wrong
    topk = topk.int() if seed % 2 else topk
    return topk.repeat_interleave(2, -1)[..., ::2] if seed % 3 == 1 else topk


@pytest.mark.parametrize("seed", range(60))
def test_wrong_indices_are_those_of_the_check_in_pytorch(seed: int, threads, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cpu.unsupported(torch.device("cpu")) is None  # this loads the library
    threads(3)
    monkeypatch.setattr(value_checks, "TOPK_CHUNK", 64)
    nk = 1 + seed * 13 % 200
    topk = broken_topk(seed, nk)
    messages = []
    for first_wrong_row in (None, cpu.first_wrong_row):
        try:
            value_checks.check_topk(topk, nk, first_wrong_row=first_wrong_row)
        except ValueError as error:
            messages.append(str(error))
    assert cpu.first_wrong_row(topk, nk) == value_checks._first_wrong_row(topk, nk)
    assert len(messages) == 2 * (cpu.first_wrong_row(topk, nk) >= 0)
    assert len(set(messages)) <= 1


def test_this_engine_checks_topk_indices_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(value_checks, "_first_wrong_row", None)
    case = long_case("indexer", torch.float32)
    run(case)
    case.options["topk_indices"] = case.options["topk_indices"].clone()
    case.options["topk_indices"][0, 77, :2] = 5
    with pytest.raises(ValueError, match="topk_indices must not have a key twice in a row: got 5"):
        run(case)


@pytest.mark.slow
def test_scratch_of_a_thread_is_small_and_does_not_grow_with_the_sequence(allocations) -> None:
    short, long = (allocations(tokens, "bfloat16", "topk", "cpu", threads=1) for tokens in (1025, 8193))
    print(f"{short} at 1,025 tokens, {long} at 8,193")
    assert short["scratch"] > 1 << 19, "the hook saw nothing"
    assert long["scratch"] <= 4 << 20
    assert abs(long["scratch"] - short["scratch"]) <= 0.1 * short["scratch"]
