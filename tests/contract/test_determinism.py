"""Repeated calls give the same bits."""

import pytest
import torch

from streamkl import attention_kl
from streamkl.testing import STUDENT, TEACHER, Heads, evaluate, make_case


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("heads", "teacher_lse", "wanted"),
    [
        (Heads(4, 2, 4, 2), False, STUDENT + TEACHER),
        (Heads(4, 2, 4, 2), True, STUDENT),
        (Heads(8, 2, 2, 1), False, STUDENT),
    ],
    ids=["rows", "one_pass", "groups"],
)
def test_repeated_calls_are_bit_equal(heads, teacher_lse, wanted, dtype, backend) -> None:
    case = make_case(0, heads=heads, dtypes=(dtype, dtype), causal=True, teacher_lse=teacher_lse, wanted=wanted)
    runs = [
        evaluate(
            attention_kl, case.tensors, case, **case.options, teacher_lse=case.teacher_lse, deterministic=True,
            backend=backend,
        ).named()
        for _ in range(20 if backend == "cpu" else 3)  # the others add up in one order, whatever the threads do
    ]  # fmt: skip
    for run in runs[1:]:
        for name, value in runs[0].items():
            assert torch.equal(value, run[name]), name
