"""The same results whatever the CPU offers: products in the inputs' dtype where it has them, in float32 elsewhere."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HASTY = Path(__file__).with_name("hasty-g++")

FAILED = (218,)
"""Seeds of `tests/contract/test_indexer.py` that broke the rule on some CPU: they are run with all instructions."""

FUZZ = """
import torch
from streamkl.testing import check_accuracy, check_index_topk, check_sparse_attention
from streamkl.testing import random_case, random_indexer_case, random_sparse_case
dtypes = (torch.float32, torch.bfloat16, torch.float16)
for seed in INDEXERS:
    case = random_indexer_case(seed, dtypes=dtypes, max_tokens=40, topk=False)
    errors = check_accuracy(case, "cpu")
    assert errors.worst <= 1, f"{errors}; {case}"
for seed in range(10):
    cases = [
        random_case(seed, dtypes=dtypes, max_tokens=96, topk=False),
        random_case(seed, dtypes=dtypes, max_tokens=24, topk=True),
        random_indexer_case(seed, dtypes=dtypes),
    ]
    found = [(case, check_accuracy(case, "cpu")) for case in cases]
    case = random_sparse_case(seed, dtypes=dtypes)
    check_index_topk(case, "cpu")
    found += [(case, check_sparse_attention(case, "cpu", gradients=wanted)) for wanted in (True, False)]
    for case, errors in found:
        assert errors.worst <= 1, f"{errors}; {case}"
from streamkl.engines.cpu import products
print(products())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("isa", "capability"),
    [
        ("AVX512_CORE_AMX", ""),
        ("AVX512_CORE_BF16", ""),
        ("AVX512_CORE_VNNI", ""),
        ("AVX512_CORE", ""),
        pytest.param("AVX2", "avx2", marks=pytest.mark.longest),
    ],
)
def test_fuzz_with_fewer_instructions(isa: str, capability: str) -> None:
    """And ``products``, which the doctor shows, says what a CPU without half-precision products does."""
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": isa}
    if capability:
        environment |= {"ATEN_CPU_CAPABILITY": capability, "CXX": str(HASTY)}
    command = [sys.executable, "-c", FUZZ.replace("INDEXERS", str(FAILED))]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert "products of bfloat16" in result.stdout, result.stderr[-3000:]
    if isa in ("AVX512_CORE_VNNI", "AVX512_CORE", "AVX2"):
        assert "bfloat16 in float32" in result.stdout
    if capability:
        assert result.stdout.startswith(capability.upper())
