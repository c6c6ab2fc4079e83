"""Wrong input is a ``ValueError`` that says what was given and what was expected, before any engine runs."""

import math
import re
from types import SimpleNamespace

import pytest
import torch

import streamkl.ops
from streamkl import attention_kl, attention_lse, indexer_kl


def tensors(**changes: object) -> dict:
    """A call that works, with some of its arguments changed."""
    call = {
        "teacher_q": torch.randn(2, 6, 10, 16),
        "teacher_k": torch.randn(2, 3, 12, 16),
        "student_q": torch.randn(2, 2, 10, 8),
        "student_k": torch.randn(2, 1, 12, 8),
    }
    return {**call, **changes}


def packed(**changes: object) -> dict:
    call = {
        "teacher_q": torch.randn(10, 6, 16),
        "teacher_k": torch.randn(12, 3, 16),
        "student_q": torch.randn(10, 2, 8),
        "student_k": torch.randn(12, 1, 8),
        "cu_seqlens_q": torch.tensor([0, 4, 10]),
        "cu_seqlens_k": torch.tensor([0, 7, 12]),
    }
    return {**call, **changes}


z = torch.zeros
BAD = {
    "teacher_q not a tensor": (lambda: tensors(teacher_q=[1.0]), "teacher_q must be a tensor: got list"),
    "student_k none": (lambda: tensors(student_k=None), "student_k must be a tensor: got NoneType"),
    "rank 3 without cu_seqlens": (lambda: tensors(student_q=z(2, 10, 8)), "student_q must be of shape [batch, heads"),
    "rank 5": (lambda: tensors(teacher_k=z(1, 2, 3, 12, 16)), "got [1, 2, 3, 12, 16]"),
    "rank 4 with cu_seqlens": (lambda: packed(teacher_q=z(1, 10, 6, 16)), "[tokens, heads, dim] with cu_seqlens"),
    "nested": (
        lambda: tensors(student_q=torch.nested.nested_tensor([z(2, 4, 8), z(2, 5, 8)], layout=torch.jagged)),
        "student_q must be a dense tensor: got a nested tensor",
    ),
    "integer dtype": (lambda: tensors(teacher_q=z(2, 6, 10, 16, dtype=torch.int64)), "got torch.int64"),
    "complex dtype": (lambda: tensors(student_k=z(2, 1, 12, 8, dtype=torch.complex64)), "got torch.complex64"),
    "float8 dtype": (lambda: tensors(student_k=z(2, 1, 12, 8).to(torch.float8_e4m3fn)), "float8"),
    "sparse layout": (lambda: tensors(student_k=z(2, 1, 12, 8).to_sparse()), "student_k must be a dense tensor"),
    "teacher dtypes differ": (lambda: tensors(teacher_k=z(2, 3, 12, 16).double()), "must share one dtype"),
    "student dtypes differ": (lambda: tensors(student_q=z(2, 2, 10, 8).half()), "got torch.float16 and torch.float32"),
    "device differs": (lambda: tensors(student_k=z(2, 1, 12, 8, device="meta")), "the device of teacher_q, cpu: got"),
    "device of cu_seqlens": (lambda: packed(cu_seqlens_k=z(3, dtype=torch.int32, device="meta")), "cu_seqlens_k must"),
    "batch of q and k": (lambda: tensors(teacher_k=z(1, 3, 12, 16)), "the same batch: got 2 and 1"),
    "batch of teacher and student": (
        lambda: tensors(student_q=z(3, 2, 10, 8), student_k=z(3, 1, 12, 8)),
        "teacher_q and student_q must have the same batch: got 2 and 3",
    ),
    "queries": (lambda: tensors(student_q=z(2, 2, 9, 8)), "teacher_q and student_q must have the same tokens"),
    "keys": (lambda: tensors(student_k=z(2, 1, 13, 8)), "teacher_k and student_k must have the same tokens"),
    "teacher head dim": (lambda: tensors(teacher_k=z(2, 3, 12, 8)), "the same head dim: got 16 and 8"),
    "student head dim": (lambda: tensors(student_k=z(2, 1, 12, 9)), "the same head dim: got 8 and 9"),
    "teacher key heads": (lambda: tensors(teacher_k=z(2, 4, 12, 16)), "a multiple of teacher_k heads: got 6 and 4"),
    "student key heads": (lambda: tensors(student_k=z(2, 3, 12, 8)), "a multiple of student_k heads: got 2 and 3"),
    "distributions": (lambda: tensors(student_q=z(2, 4, 10, 8)), "group of teacher heads: got 6 and 4"),
    "more distributions than heads": (lambda: tensors(student_q=z(2, 12, 10, 8)), "got 6 and 12"),
    "no heads": (lambda: tensors(student_q=z(2, 0, 10, 8)), "student_q must have at least one head"),
    "no key heads": (lambda: tensors(teacher_k=z(2, 0, 12, 16)), "teacher_k must have at least one head"),
    "no width": (lambda: tensors(student_q=z(2, 2, 10, 0)), "student_q must have at least one dimension"),
    "causal not a bool": (lambda: tensors(causal="yes"), "causal must be True or False: got 'yes'"),
    "causal a mask": (lambda: tensors(causal=torch.ones(10, 12)), "causal must be True or False"),
    "window a number": (lambda: tensors(window=5), "window must be two integers (left, right)"),
    "window of three": (lambda: tensors(window=(1, 2, 3)), "got (1, 2, 3)"),
    "window of floats": (lambda: tensors(window=(1.5, 0)), "got (1.5, 0)"),
    "span of no token": (lambda: tensors(causal=True, key_span=0), "key_span must be an integer from 1 to 1048576"),
    "span of a float": (lambda: tensors(causal=True, key_span=4.0), "key_span must be an integer"),
    "span without causal": (lambda: tensors(key_span=4), "for causal=True: got key_span=4 with causal=False"),
    "span in a window": (
        lambda: tensors(causal=True, key_span=4, window=(8, 0)),
        "key_span has no window: got key_span=4 with window=(8, 0)",
    ),
    "span and padding": (
        lambda: tensors(causal=True, key_span=4, key_padding_mask=torch.ones(2, 12) > 0),
        "for keys that are tokens: got it together with key_span=4",
    ),
    "cu_seqlens_q alone": (lambda: packed(cu_seqlens_k=None), "go together: got cu_seqlens_q alone"),
    "cu_seqlens_k alone": (lambda: packed(cu_seqlens_q=None), "go together: got cu_seqlens_k alone"),
    "cu_seqlens a list": (lambda: packed(cu_seqlens_q=[0, 4, 10]), "cu_seqlens_q must be a tensor: got list"),
    "cu_seqlens of rank 2": (lambda: packed(cu_seqlens_q=z(1, 3, dtype=torch.int32)), "[sequences + 1]: got [1, 3]"),
    "cu_seqlens empty": (lambda: packed(cu_seqlens_k=z(0, dtype=torch.int32)), "[sequences + 1]: got [0]"),
    "cu_seqlens floating": (lambda: packed(cu_seqlens_q=z(3)), "must be int32 or int64: got torch.float32"),
    "cu_seqlens counts": (lambda: packed(cu_seqlens_q=torch.tensor([0, 10])), "number of sequences: got 1 and 2"),
    "cu_seqlens start": (lambda: packed(cu_seqlens_q=torch.tensor([1, 4, 10])), "cu_seqlens_q must start at 0: got 1"),
    "cu_seqlens fall": (lambda: packed(cu_seqlens_k=torch.tensor([0, 7, 6])), "must not fall: got 6 after 7"),
    "cu_seqlens end": (lambda: packed(cu_seqlens_k=torch.tensor([0, 7, 13])), "within the 12 tokens given: got 13"),
    "scale a tensor": (lambda: tensors(teacher_scale=torch.tensor(1.0)), "a learned temperature multiplies q"),
    "scale a string": (lambda: tensors(student_scale="1"), "student_scale must be a Python float: got '1'"),
    "scale nan": (lambda: tensors(student_scale=float("nan")), "student_scale must be finite: got nan"),
    "scale infinite": (lambda: tensors(teacher_scale=float("inf")), "teacher_scale must be finite: got inf"),
    "activation": (lambda: tensors(student_activation="gelu"), "one of None, 'relu': got 'gelu'"),
    "divergence": (lambda: tensors(divergence="js"), "one of 'forward', 'reverse': got 'js'"),
    "reduction": (lambda: tensors(reduction="batchmean"), "one of 'mean', 'sum', 'none': got 'batchmean'"),
    "backend": (lambda: tensors(backend="cuda"), "one of 'auto', 'reference', 'triton', 'cpu', 'tiled': got 'cuda'"),
    "deterministic": (lambda: tensors(deterministic=1), "deterministic must be one of None, True, False: got 1"),
    "lse a number": (lambda: tensors(teacher_lse=1.0), "teacher_lse must be a tensor: got float"),
    "lse of the student's heads": (lambda: tensors(teacher_lse=z(2, 2, 10)), "[2, 6, 10]: got [2, 2, 10]"),
    "lse packed with a batch": (lambda: packed(teacher_lse=z(1, 6, 10)), "shape [6, 10]: got [1, 6, 10]"),
    "lse of bfloat16": (lambda: tensors(teacher_lse=z(2, 6, 10).bfloat16()), "float32 or float64, because"),
    "rest of the student's heads": (lambda: tensors(teacher_rest=z(2, 2, 10)), "teacher_rest"),
    "rest of bfloat16": (lambda: tensors(teacher_rest=z(2, 6, 10).bfloat16()), "teacher_rest must be float32"),
    "lse on another device": (lambda: tensors(teacher_lse=z(2, 6, 10, device="meta")), "the queries, cpu: got meta"),
    "weight a list": (lambda: tensors(row_weight=[1.0]), "row_weight must be a tensor: got list"),
    "weight of the keys": (lambda: tensors(row_weight=z(2, 12)), "[2, 2, 10] or [2, 10]: got [2, 12]"),
    "weight of the teacher's heads": (lambda: tensors(row_weight=z(2, 6, 10)), "got [2, 6, 10]"),
    "weight of bool": (lambda: tensors(row_weight=torch.ones(2, 10) > 0), "(a mask: mask.float()): got torch.bool"),
    "weight negative": (lambda: tensors(row_weight=torch.full((2, 10), -0.5)), "not negative: got -0.5"),
    "weight nan": (lambda: tensors(row_weight=torch.full((2, 10), torch.nan)), "finite and not negative: got nan"),
    "weight infinite": (lambda: tensors(row_weight=torch.full((2, 10), torch.inf)), "finite and not negative: got inf"),
    "weight with gradient": (lambda: tensors(row_weight=torch.ones(2, 10, requires_grad=True)), "not differentiated"),
    "reverse of a group mean": (lambda: tensors(divergence="reverse"), "head by head"),
    "teacher gradient of a group mean": (
        lambda: tensors(teacher_k=torch.randn(2, 3, 12, 16, requires_grad=True)),
        "got 6 and 2; detach teacher_q and teacher_k",
    ),
}  # fmt: skip


def index(**changes: object) -> dict:
    call = {
        "teacher_q": torch.randn(2, 6, 10, 16),
        "teacher_k": torch.randn(2, 3, 12, 16),
        "index_q": torch.randn(2, 4, 10, 8),
        "index_k": torch.randn(2, 12, 8),
        "index_w": torch.randn(2, 10, 4),
    }
    return {**call, **changes}


def packed_index(**changes: object) -> dict:
    call = {
        "teacher_q": torch.randn(10, 6, 16),
        "teacher_k": torch.randn(12, 3, 16),
        "index_q": torch.randn(10, 4, 8),
        "index_k": torch.randn(12, 8),
        "index_w": torch.randn(10, 4),
        "cu_seqlens_q": torch.tensor([0, 4, 10]),
        "cu_seqlens_k": torch.tensor([0, 7, 12]),
    }
    return {**call, **changes}


def selected(*shape: int) -> torch.Tensor:
    """Only padding."""
    return torch.full(shape, -1)


BAD_INDEXER = {
    "index_k none": (lambda: index(index_k=None), "index_k must be a tensor: got NoneType"),
    "index_k with heads": (lambda: index(index_k=z(2, 1, 12, 8)), "[batch, tokens, dim], one key for all index heads"),
    "index_k packed with heads": (lambda: packed_index(index_k=z(12, 1, 8)), "[tokens, dim] with cu_seqlens, one key"),
    "index_q of rank 3": (lambda: index(index_q=z(2, 10, 8)), "index_q must be of shape [batch, heads, tokens, dim]"),
    "index dtypes differ": (lambda: index(index_k=z(2, 12, 8).half()), "index_q and index_k must share one dtype"),
    "index head dim": (lambda: index(index_k=z(2, 12, 9)), "index_q and index_k must have the same head dim"),
    "index keys": (lambda: index(index_k=z(2, 13, 8)), "teacher_k and index_k must have the same tokens"),
    "index queries": (lambda: index(index_q=z(2, 4, 11, 8)), "teacher_q and index_q must have the same tokens"),
    "no index heads": (lambda: index(index_q=z(2, 0, 10, 8)), "index_q must have at least one head"),
    "weights a list": (lambda: index(index_w=[1.0]), "index_w must be a tensor: got list"),
    "weights by heads": (lambda: index(index_w=z(2, 4, 10)), "index_w must be of shape [2, 10, 4]"),
    "weights packed with a batch": (lambda: packed_index(index_w=z(1, 10, 4)), "index_w must be of shape [10, 4]"),
    "weights of integers": (lambda: index(index_w=z(2, 10, 4).long()), "index_w must be float64, float32, bfloat16"),
    "weights of float64": (lambda: index(index_w=z(2, 10, 4).double()), "got torch.float64 beside torch.float32"),
    "weights elsewhere": (lambda: index(index_w=z(2, 10, 4, device="meta")), "index_w must be on the device"),
    "activation": (lambda: index(activation="gelu"), "activation must be one of None, 'relu': got 'gelu'"),
    "index_scale": (lambda: index(index_scale="1"), "index_scale must be a Python float: got '1'"),
    "rest of the index heads": (lambda: index(teacher_rest=z(2, 4, 10)), "[2, 6, 10]: got [2, 4, 10]"),
    "lse of the index heads": (lambda: index(teacher_lse=z(2, 4, 10)), "[2, 6, 10]: got [2, 4, 10]"),
    "row weight of the index heads": (lambda: index(row_weight=z(2, 4, 10)), "[2, 1, 10] or [2, 10]: got [2, 4, 10]"),
    "heads of the index heads": (lambda: index(topk_indices=selected(2, 4, 10, 3)), "[2, 10, K] or [2, 1, 10, K]: got"),
}
BAD_TOPK = {
    "a list": (lambda: tensors(topk_indices=[1]), "topk_indices must be a tensor: got list"),
    "of the keys": (lambda: tensors(topk_indices=selected(2, 12, 3)), "[2, 10, K] or [2, 2, 10, K]: got [2, 12, 3]"),
    "of the teacher's heads": (lambda: tensors(topk_indices=selected(2, 6, 10, 3)), "got [2, 6, 10, 3]"),
    "packed with a batch": (lambda: packed(topk_indices=selected(1, 10, 3)), "[10, K] or [2, 10, K]: got [1, 10, 3]"),
    "of int16": (lambda: tensors(topk_indices=selected(2, 10, 3).short()), "must be int32 or int64: got torch.int16"),
    "a mask": (lambda: tensors(topk_indices=selected(2, 10, 12) < 0), "must be int32 or int64: got torch.bool"),
    "elsewhere": (lambda: tensors(topk_indices=selected(2, 10, 3).to("meta")), "topk_indices must be on the device"),
    "beyond the keys": (lambda: tensors(topk_indices=selected(2, 10, 3) + 13), "from 0 to 11, or -1 for none: got 12"),
    "below -1": (lambda: tensors(topk_indices=selected(2, 10, 3) - 1), "or -1 for none: got -2"),
    "twice": (lambda: tensors(topk_indices=selected(2, 10, 3) + 5), "must not have a key twice in a row: got 4"),
}


@pytest.mark.parametrize("name", BAD_INDEXER)
def test_bad_input_of_an_indexer_is_refused_before_any_engine(name: str, no_engine: None) -> None:
    call, message = BAD_INDEXER[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        indexer_kl(**call())


@pytest.mark.parametrize("wanted", [False, True], ids=["", "gradients"])
@pytest.mark.parametrize("name", BAD_TOPK)
def test_bad_topk_indices_are_refused_before_any_engine(name: str, wanted: bool, idle_engine: None) -> None:
    call, message = BAD_TOPK[name]
    arguments = call()
    arguments["student_q"].requires_grad_(wanted)
    with pytest.raises(ValueError, match=re.escape(message)):
        attention_kl(**arguments)
    with pytest.raises(ValueError, match=re.escape(message)):
        attention_kl(**arguments, backend="reference")


def test_heads_of_the_lse_are_a_multiple_of_topk_heads(no_engine: None) -> None:
    with pytest.raises(ValueError, match="q heads must be a multiple of topk_indices heads: got 6 and 4"):
        attention_lse(z(2, 6, 10, 8), z(2, 3, 10, 8), topk_indices=selected(2, 4, 10, 3))


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any use of an engine is a failure."""

    def choose(*_: object) -> None:
        pytest.fail("an engine was reached")

    monkeypatch.setattr(streamkl.ops.engines, "choose", choose)


@pytest.fixture
def idle_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any engine may be chosen, and can do nothing."""
    idle = streamkl.ops.engines.Choice(SimpleNamespace(), "for a test")  # type: ignore[arg-type]
    monkeypatch.setattr(streamkl.ops.engines, "choose", lambda *_: idle)


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_before_any_engine(name: str, no_engine: None) -> None:
    call, message = BAD[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        attention_kl(**call())


@pytest.mark.parametrize("name", ["weight negative", "weight nan", "weight infinite"])
def test_bad_weights_are_refused_where_gradients_are_wanted(name: str, no_engine: None) -> None:
    call, message = BAD[name]
    arguments = call()
    arguments["student_q"].requires_grad_()
    with pytest.raises(ValueError, match=re.escape(message)):
        attention_kl(**arguments)


@pytest.mark.parametrize("wrong", ["another mask", "log2", "unscaled", "far below"])
@pytest.mark.parametrize("heads", [6, 2])
def test_a_teacher_lse_that_does_not_normalise_the_teacher_is_refused(wrong: str, heads: int) -> None:
    call = tensors(student_q=torch.randn(2, heads, 10, 8, requires_grad=True), causal=True)
    q, k = call["teacher_q"], call["teacher_k"]
    lse = {
        "another mask": lambda: attention_lse(q, k),
        "log2": lambda: attention_lse(q, k, causal=True) / math.log(2),
        "unscaled": lambda: attention_lse(q, k, causal=True, scale=1.0),
        "far below": lambda: attention_lse(q, k, causal=True) - 200,  # probabilities overflow
    }[wrong]()
    attention_kl(**call, teacher_lse=attention_lse(q, k, causal=True))
    with pytest.raises(ValueError, match="so that its probabilities sum to 1: got rows that sum to"):
        attention_kl(**call, teacher_lse=lse)


VALUES = ("cu_seqlens start", "cu_seqlens fall", "cu_seqlens end", "weight negative", "weight nan")


@pytest.mark.parametrize("name", VALUES)
def test_the_reference_refuses_bad_values_too(name: str) -> None:
    call, message = BAD[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        attention_kl(**call(), backend="reference")


BAD_LSE = {
    "rank": (lambda: {"q": z(2, 3, 4), "k": z(2, 3, 4)}, "q must be of shape [batch, heads, tokens, dim]"),
    "heads": (lambda: {"q": z(1, 4, 5, 8), "k": z(1, 3, 5, 8)}, "q heads must be a multiple of k heads: got 4 and 3"),
    "dtypes": (lambda: {"q": z(1, 4, 5, 8), "k": z(1, 4, 5, 8).double()}, "q and k must share one dtype"),
    "head dim": (lambda: {"q": z(1, 4, 5, 8), "k": z(1, 4, 5, 9)}, "the same head dim: got 8 and 9"),
    "scale": (lambda: {"q": z(1, 4, 5, 8), "k": z(1, 4, 5, 8), "scale": "x"}, "scale must be a Python float"),
    "backend": (lambda: {"q": z(1, 4, 5, 8), "k": z(1, 4, 5, 8), "backend": "x"}, "backend must be one of"),
}


@pytest.mark.parametrize("name", BAD_LSE)
def test_bad_input_of_attention_lse_is_refused(name: str, no_engine: None) -> None:
    call, message = BAD_LSE[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        attention_lse(**call())


def test_there_are_at_least_forty_cases() -> None:
    assert len(BAD) >= 40


def test_a_teacher_that_asks_for_gradients_is_fine_where_none_are_taken() -> None:
    call = tensors(teacher_k=torch.randn(2, 3, 12, 16, requires_grad=True))
    with torch.no_grad():
        attention_kl(**call)


@pytest.mark.parametrize("wanted", [False, True], ids=["", "gradients"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("given", [False, True], ids=["", "lse"])
@pytest.mark.parametrize("heads", [6, 2, 1])
def test_topk_indices_are_checked_once_per_loss(
    backend: str, heads: int, given: bool, reduction: str, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    topk = torch.stack([torch.randperm(12)[:5] for _ in range(20)]).view(2, 10, 5)
    call = tensors(student_q=torch.randn(2, heads, 10, 8, requires_grad=wanted), topk_indices=topk)
    if given:
        call["teacher_lse"] = attention_lse(call["teacher_q"], call["teacher_k"], topk_indices=topk)
    checks, check = [], streamkl.ops.value_checks.check_topk
    monkeypatch.setattr(
        streamkl.ops.value_checks, "check_topk", lambda *args, **options: checks.append(args) or check(*args, **options)
    )
    attention_kl(**call, reduction=reduction, backend=backend)
    assert len(checks) == 1


def test_values_on_other_devices_are_read_only_when_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    from streamkl import value_checks

    falling = torch.tensor([0, 7, 6], device="meta")
    value_checks.check_cu_seqlens(falling, falling, 10, 10)
    monkeypatch.setenv("STREAMKL_CHECK", "1")
    with pytest.raises(NotImplementedError):  # it tries to read what a meta tensor does not have
        value_checks.check_cu_seqlens(falling, falling, 10, 10)


@pytest.mark.parametrize(
    ("teacher", "student", "packed", "question"),
    [
        ((1, 8, 20, 4), (1, 20, 8, 4), False, r"did you mean \.transpose\(1, 2\) of student_q\?"),
        ((1, 20, 8, 4), (1, 4, 20, 4), False, r"did you mean \.transpose\(1, 2\) of teacher_q\?"),
        ((1, 20, 8, 4), (1, 20, 4, 4), False, r"did you mean \.transpose\(1, 2\) of teacher_q and student_q\?"),
        ((20, 8, 4), (8, 20, 4), True, r"did you mean \.transpose\(0, 1\) of student_q\?"),
        ((1, 2, 20, 4), (1, 2, 19, 4), False, None),
    ],
)
def test_heads_and_tokens_that_look_swapped_are_asked_about(teacher, student, packed, question) -> None:
    starts = torch.tensor([0, min(teacher[0], student[0])]) if packed else None
    with pytest.raises(ValueError, match="must have the same tokens") as raised:
        attention_kl(
            z(*teacher), z(*teacher), z(*student), z(*student), causal=True, cu_seqlens_q=starts, cu_seqlens_k=starts
        )
    if question is None:
        assert "did you mean" not in str(raised.value)
    else:
        assert re.search(question, str(raised.value)), raised.value
