"""Imports run one way: who may import whom, read from the sources."""

import ast
from pathlib import Path

import streamkl

ROOT = Path(streamkl.__file__).parent

KERNELS, INSPECT = "streamkl.engines.triton.kernels", "streamkl.engines.triton.inspect"
INDEXER, SPARSE = "streamkl.indexer", "streamkl.sparse"

ALLOWED = {
    "__init__.py": {"streamkl.api", "streamkl.sparse.diagnostics"},
    "__main__.py": {"streamkl.cli"},
    "api.py": {"streamkl.loss", "streamkl.reference", "streamkl.validation"},
    "loss.py": {"streamkl.ops", "streamkl.problem", "streamkl.sharding", "streamkl.validation"},
    "ops.py": {
        "streamkl.engines",
        "streamkl.problem",
        "streamkl.state",
        "streamkl.validation",
    },
    "sharding.py": {"streamkl.ops"},
    "flops.py": {"streamkl.ops", "streamkl.problem"},
    "validation.py": set(),
    "problem.py": set(),
    "state.py": set(),
    "cache.py": set(),
    "reference.py": set(),
    "sparse/__init__.py": {
        f"{SPARSE}.{name}" for name in ("arguments", "attention", "diagnostics", "scores", "selection", "selectors")
    },
    "sparse/arguments.py": {"streamkl.api", "streamkl.problem", "streamkl.validation"},
    "sparse/ops.py": {"streamkl.engines", "streamkl.ops", "streamkl.problem", "streamkl.validation"},
    "sparse/attention.py": {SPARSE, "streamkl.api", "streamkl.reference", "streamkl.validation"},
    "sparse/scores.py": {f"{SPARSE}.arguments", "streamkl.problem"},
    "sparse/selection.py": {SPARSE, f"{SPARSE}.arguments"},
    "sparse/selectors.py": {f"{SPARSE}.arguments", f"{SPARSE}.selection", "streamkl.problem"},
    "sparse/diagnostics.py": {SPARSE, f"{SPARSE}.arguments", "streamkl.problem"},
    "indexer/__init__.py": {f"{INDEXER}.base", f"{INDEXER}.head", f"{INDEXER}.lightning", f"{INDEXER}.rope"},
    "indexer/rope.py": set(),
    "indexer/base.py": {
        "streamkl.api",
        f"{INDEXER}.rope",
        *(f"{SPARSE}.{name}" for name in ("arguments", "scores", "selection")),
    },
    "indexer/head.py": {f"{INDEXER}.base", f"{INDEXER}.rope"},
    "indexer/lightning.py": {f"{INDEXER}.base", f"{INDEXER}.rope"},
    "engines/__init__.py": {"streamkl.problem", "streamkl.state"},
    "engines/tiled.py": {
        "streamkl.engines.tiled_attention",
        "streamkl.engines.tiled_topk",
        "streamkl.problem",
        "streamkl.state",
    },
    "engines/tiled_attention.py": {"streamkl.problem"},
    "engines/tiled_topk.py": {"streamkl.problem"},
    "engines/cpu/__init__.py": {"streamkl.engines.cpu", "streamkl.problem", "streamkl.state"},
    "engines/cpu/build.py": {"streamkl.cache"},
    "engines/triton/__init__.py": {"streamkl.engines.triton", "streamkl.problem", "streamkl.state"},
    "engines/triton/meta.py": {"streamkl.problem"},
    "engines/triton/nvidia.py": {"streamkl.engines.triton.meta"},
    "engines/triton/amd.py": {"streamkl.engines.triton.meta"},
    "engines/triton/architecture.py": {"streamkl.engines.triton", "streamkl.engines.triton.meta"},
    "engines/triton/launch.py": {"streamkl.engines.triton", "streamkl.engines.triton.meta", "streamkl.problem"},
    "engines/triton/arguments.py": {
        "streamkl.engines.triton.launch",
        f"{KERNELS}.rows",
        "streamkl.problem",
        "streamkl.state",
    },
    "engines/triton/plans.py": {
        "streamkl.engines.triton.arguments",
        "streamkl.engines.triton.launch",
        "streamkl.engines.triton.meta",
        *(f"{KERNELS}.{name}" for name in ("backward", "forward", "lse", "primitives", "split")),
        "streamkl.problem",
        "streamkl.state",
    },
    "engines/triton/attention.py": {
        "streamkl.engines.triton.launch",
        "streamkl.engines.triton.meta",
        f"{KERNELS}.attention",
        "streamkl.problem",
    },
    "engines/triton/listed.py": {
        "streamkl.engines.triton.arguments",
        "streamkl.engines.triton.launch",
        "streamkl.engines.triton.meta",
        *(f"{KERNELS}.{name}" for name in ("listed", "listed_backward")),
        "streamkl.problem",
        "streamkl.state",
    },
    "engines/triton/kernels/__init__.py": set(),
    "engines/triton/kernels/primitives.py": set(),
    "engines/triton/kernels/gradient.py": {f"{KERNELS}.primitives"},
    "engines/triton/kernels/rows.py": {f"{KERNELS}.primitives"},
    "engines/triton/kernels/lse.py": {f"{KERNELS}.primitives"},
    "engines/triton/kernels/forward.py": {f"{KERNELS}.primitives"},
    "engines/triton/kernels/backward.py": {f"{KERNELS}.gradient", f"{KERNELS}.primitives"},
    "engines/triton/kernels/split.py": {f"{KERNELS}.forward", f"{KERNELS}.primitives"},
    "engines/triton/kernels/listed.py": {f"{KERNELS}.forward", f"{KERNELS}.primitives"},
    "engines/triton/kernels/attention.py": {f"{KERNELS}.listed", f"{KERNELS}.primitives"},
    "engines/triton/kernels/listed_backward.py": {
        f"{KERNELS}.gradient",
        f"{KERNELS}.listed",
        f"{KERNELS}.primitives",
    },
    "engines/triton/inspect/__init__.py": set(),
    "engines/triton/inspect/binary.py": set(),
    "engines/triton/inspect/compiler.py": {"streamkl.engines.triton.launch"},
    "engines/triton/inspect/budget.py": {"streamkl.engines.triton.launch", f"{INSPECT}.binary"},
    "engines/triton/inspect/matrix.py": {
        "streamkl.engines.triton",
        "streamkl.engines.triton.launch",
        "streamkl.problem",
        "streamkl.state",
    },
    "engines/triton/inspect/report.py": {
        INSPECT,
        f"{INSPECT}.compiler",
        f"{INSPECT}.matrix",
        "streamkl.cache",
        "streamkl.engines.triton.launch",
    },
}
"""The modules of the core, and what of the package each may import."""

BENCH = {
    "__init__": set(),
    "models": set(),
    "baselines": set(),
    "products": {"engines.cpu"},
    "cells": {"testing"},
    "suites": {"bench.cells", "bench.models", "testing"},
    "contestants": {"engines", "engines.cpu", "problem", "bench", "bench.cells", "bench.products"},
    "gate": {"bench.cells", "testing"},
    "measure": {"bench.cells"},
    "isolated": {"bench.cells", "bench.contestants"},
    "machine": {"engines"},
    "records": {"bench.cells"},
    "report": {"bench.cells", "bench.records"},
    "plots": {"bench.cells", "bench.records", "bench.report"},
    "run": {"bench", "bench.cells", "bench.contestants", "bench.records", "bench.suites"},
}
"""The modules of the benchmark, and what each may import besides the public functions."""


def imports(path: Path) -> set[str]:
    """The modules of the package that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "streamkl":
            found |= {f"streamkl.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return {name for name in found if name.split(".")[0] == "streamkl"}


def test_the_core_imports_only_what_lies_below_it() -> None:
    for name, allowed in ALLOWED.items():
        assert imports(ROOT / name) <= allowed, name


def test_every_core_module_has_a_rule() -> None:
    apart = ("bench", "cli", "selfcheck", "testing")
    core = {str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py") if path.parts[-2] not in apart}
    assert core == set(ALLOWED)


def test_the_benchmark_imports_only_what_lies_below_it_and_the_core_does_not_import_it() -> None:
    assert {path.stem for path in (ROOT / "bench").glob("*.py")} == set(BENCH)
    for name, allowed in BENCH.items():
        found = imports(ROOT / "bench" / f"{name}.py") - {"streamkl"}
        assert found <= {f"streamkl.{module}" for module in allowed}, name
    importers = {
        str(path.relative_to(ROOT))
        for path in ROOT.rglob("*.py")
        if any(name.startswith("streamkl.bench") for name in imports(path)) and path.parent.name != "bench"
    }
    assert importers == {"cli/bench.py", "cli/selfcheck.py", "selfcheck/checks.py", "selfcheck/report.py"}


def test_nothing_imports_testing_but_the_doctor_and_the_benchmark() -> None:
    importers = {
        str(path.relative_to(ROOT))
        for path in ROOT.rglob("*.py")
        if any(name.startswith("streamkl.testing") for name in imports(path)) and path.parent.name != "testing"
    }
    assert importers == {
        "cli/doctor.py", "bench/cells.py", "bench/gate.py", "bench/suites.py", "selfcheck/checks.py"
    }  # fmt: skip
