"""Kernels that can be read: what belongs together is passed together, under one name."""

import ast
from pathlib import Path

import pytest

from streamkl.engines import triton

MOST = 25
KERNELS = sorted((Path(triton.__file__).parent / "kernels").rglob("*.py"))


def functions(path: Path) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_no_function_of_a_kernel_has_more_than_25_parameters(path: Path) -> None:
    counts = {
        function.name: len([*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs])
        for function in functions(path)
    }
    assert not {name: count for name, count in counts.items() if count > MOST}


def test_the_kernels_are_found() -> None:
    names = {function.name for path in KERNELS for function in functions(path)}
    assert {"lse_kernel", "paired_kernel", "mixture_kernel", "keys_kernel", "queries_kernel"} < names
    assert {
        "gathered_gradient_kernel",
        "sparse_attention_kernel",
        "attention_queries_kernel",
        "attention_keys_kernel",
        "block_scores_kernel",
        "best_keys_kernel",
    } < names
