"""Imports run one way: who may import whom, read from the sources."""

import ast
import functools
import graphlib
import re
from pathlib import Path

import pytest

import streamkl

ROOT = Path(streamkl.__file__).parent

KERNELS, INSPECT = "streamkl.engines.triton.kernels", "streamkl.engines.triton.inspect"
INDEXER, SPARSE, DISTRIBUTED = "streamkl.indexer", "streamkl.sparse", "streamkl.distributed"

ALLOWED = {
    "__init__.py": {"streamkl.api", "streamkl.sparse.diagnostics"},
    "__main__.py": {"streamkl.cli"},
    "api.py": {"streamkl.loss", "streamkl.padding", "streamkl.reference", "streamkl.validation"},
    "loss.py": {"streamkl.ops", "streamkl.problem", "streamkl.sharding", "streamkl.state", "streamkl.validation"},
    "ops.py": {
        "streamkl.engines",
        "streamkl.padding",
        "streamkl.problem",
        "streamkl.state",
        "streamkl.value_checks",
    },
    "sharding.py": {"streamkl.ops"},
    "dense_attention.py": {"streamkl.api"},
    "distributed/__init__.py": {f"{DISTRIBUTED}.{name}" for name in ("context_parallel", "gathering", "layout")},
    "distributed/layout.py": set(),
    "distributed/gathering.py": {f"{DISTRIBUTED}.layout"},
    "distributed/operators.py": {
        *(f"{DISTRIBUTED}.{name}" for name in ("gathering", "layout")),
        *(f"streamkl.{name}" for name in ("loss", "ops", "problem", "state", "validation", "value_checks")),
    },
    "distributed/context_parallel.py": {
        *(f"{DISTRIBUTED}.{name}" for name in ("gathering", "layout", "operators")),
        *(f"streamkl.{name}" for name in ("api", "dense_attention", "loss", "validation")),
    },
    **{
        f"plan/{name}.py": {f"streamkl.plan.{other}" for other in others}
        for name, others in {
            "__init__": ("assumptions", "choice", "model", "run", "traffic"),
            "assumptions": (),
            "model": (),
            "run": ("model",),
            "traffic": ("model", "run"),
            "memory": ("model", "run"),
            "arithmetic": ("assumptions", "model", "run", "traffic"),
            "choice": ("arithmetic", "assumptions", "memory", "model", "run", "traffic"),
        }.items()
    },
    "flops.py": {"streamkl.ops", "streamkl.problem"},
    "padding.py": set(),
    "autocasting.py": set(),
    "argument_checks.py": {"streamkl.autocasting"},
    "validation.py": {"streamkl.argument_checks", "streamkl.value_checks"},
    "value_checks.py": set(),
    "problem.py": set(),
    "state.py": set(),
    "cache.py": set(),
    "durable.py": set(),
    "text.py": set(),
    "extras.py": set(),
    "hub.py": set(),
    "reference.py": set(),
    "sparse/__init__.py": {
        f"{SPARSE}.{name}" for name in ("arguments", "attention", "diagnostics", "scores", "selection", "selectors")
    },
    "sparse/arguments.py": {
        *(f"streamkl.{name}" for name in ("api", "argument_checks", "problem", "validation", "value_checks")),
    },
    "sparse/ops.py": {"streamkl.engines", "streamkl.ops", "streamkl.problem", "streamkl.value_checks"},
    "sparse/head_groups.py": set(),
    "sparse/attention.py": {
        SPARSE,
        f"{SPARSE}.arguments",
        f"{SPARSE}.head_groups",
        "streamkl.api",
        "streamkl.dense_attention",
        "streamkl.reference",
    },
    "sparse/scores.py": {f"{SPARSE}.arguments", "streamkl.problem"},
    "sparse/selection.py": {SPARSE, f"{SPARSE}.arguments", f"{SPARSE}.head_groups"},
    "sparse/selectors.py": {f"{SPARSE}.arguments", f"{SPARSE}.selection", "streamkl.api", "streamkl.problem"},
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
    "engines/cpu/build.py": {"streamkl.cache", "streamkl.engines.cpu", "streamkl.engines.cpu.compiler"},
    "engines/cpu/compiler.py": set(),
    "engines/cpu/objects.py": {"streamkl.cache", "streamkl.engines.cpu"},
    "engines/triton/__init__.py": {
        "streamkl.engines.triton",
        "streamkl.engines.triton.configs",
        "streamkl.engines.triton.plans",
        "streamkl.problem",
        "streamkl.state",
    },
    "engines/triton/meta.py": {"streamkl.problem"},
    "engines/triton/launch.py": {
        "streamkl.engines.triton.configs",
        "streamkl.engines.triton.meta",
        f"{KERNELS}.groups",
        "streamkl.problem",
    },
    "engines/triton/configs/__init__.py": set(),
    "engines/triton/configs/nvidia.py": {"streamkl.engines.triton.meta"},
    "engines/triton/configs/amd.py": {"streamkl.engines.triton.meta"},
    "engines/triton/configs/architecture.py": {"streamkl.engines.triton.configs", "streamkl.engines.triton.meta"},
    "engines/triton/plans/__init__.py": set(),
    "engines/triton/plans/arguments.py": {
        "streamkl.engines.triton.launch",
        *(f"{KERNELS}.{name}" for name in ("groups", "tile.rows")),
        "streamkl.problem",
        "streamkl.state",
    },
    **{
        f"engines/triton/plans/{name}.py": {
            "streamkl.engines.triton.launch",
            "streamkl.engines.triton.meta",
            "streamkl.engines.triton.plans.arguments",
            f"{KERNELS}.groups",
            *(f"{KERNELS}.{kernel}" for kernel in kernels),
            "streamkl.problem",
            "streamkl.state",
        }
        for name, kernels in {
            "dense": ("dense.forward", "dense.keys", "dense.lse", "dense.queries", "dense.split", "tile.states"),
            "gathered": ("gathered.backward", "gathered.forward"),
            "attention": ("sparse.attention", "sparse.backward"),
            "selection": ("sparse.selection",),
        }.items()
    },
    **{
        f"engines/triton/kernels/{name}.py": {f"{KERNELS}.{other}" for other in others}
        for name, others in {
            "__init__": (),
            "groups": (),
            "tile/__init__": (),
            "tile/tiles": ("groups",),
            "tile/states": ("groups",),
            "tile/products": ("groups", "tile.states", "tile.tiles"),
            "tile/gradient": ("groups", "tile.products", "tile.states"),
            "tile/rows": ("tile.states",),
            **{
                name: ("groups", "tile.gradient", "tile.products", "tile.states", "tile.tiles", *others)
                for name, others in {
                    "dense/__init__": (),
                    "dense/lse": (),
                    "dense/forward": (),
                    "dense/keys": (),
                    "dense/queries": (),
                    "dense/split": (),
                    "gathered/__init__": (),
                    "gathered/selected": (),
                    "gathered/forward": ("gathered.selected",),
                    "gathered/backward": ("gathered.selected",),
                    "sparse/__init__": (),
                    "sparse/attention": ("gathered.selected",),
                    "sparse/backward": ("gathered.selected", "sparse.attention"),
                    "sparse/selection": (),
                }.items()
            },
        }.items()
    },
    "engines/triton/inspect/__init__.py": set(),
    "engines/triton/inspect/binary.py": set(),
    "engines/triton/inspect/compiler.py": {"streamkl.engines.triton.launch"},
    "engines/triton/inspect/budget.py": {"streamkl.engines.triton.launch", f"{INSPECT}.binary"},
    "engines/triton/inspect/matrix.py": {
        "streamkl.engines.triton.launch",
        "streamkl.engines.triton.plans",
        "streamkl.problem",
        "streamkl.state",
    },
    "engines/triton/inspect/table.py": {f"{INSPECT}.budget", f"{INSPECT}.matrix"},
    "engines/triton/inspect/kept.py": {
        f"{INSPECT}.binary",
        f"{INSPECT}.compiler",
        "streamkl.cache",
        "streamkl.engines.triton.launch",
    },
    "engines/triton/inspect/report.py": {INSPECT, f"{INSPECT}.matrix", "streamkl.engines.triton.launch"},
}
"""The modules of the core, and what of the package each may import."""

BENCH = {
    "__init__": set(),
    "models": set(),
    "baselines": set(),
    "products": {"engines.cpu"},
    "cells": {"testing"},
    "suites": {"bench.cells", "bench.models", "testing"},
    "implementations": {"engines", "engines.cpu", "problem", "bench", "bench.cells", "bench.products"},
    "gate": {"bench.cells", "testing"},
    "guard": {"bench", "bench.cells", "bench.implementations", "bench.measure", "testing"},
    "measure": {"bench.cells"},
    "isolated": {"bench.cells", "bench.implementations"},
    "costs": {"bench.gate"},
    "machine": {"engines"},
    "records": {"bench.cells"},
    "report": {"bench.cells", "bench.records"},
    "plots": {"bench.cells", "bench.records", "bench.report"},
    "attention": {
        "bench.costs",
        "bench.isolated",
        "bench.measure",
        "integrations.transformers",
        "integrations.transformers.checkpointing",
        "testing.materialised",
    },
    "distill": {
        "bench",
        "bench.costs",
        "bench.isolated",
        "bench.measure",
        "distillation.indexers",
        "distillation.model",
        "distillation.settings",
        "integrations.transformers.families",
    },
    "run": {"bench", "bench.cells", "bench.implementations", "bench.records", "bench.suites"},
    "prefill/__init__": set(),
    "prefill/allocator": set(),
    "prefill/layer": {"bench", "bench.gate", "bench.models", "sparse"},
    "prefill/models": set(),
    "prefill/stopwatch": set(),
    "prefill/gate": {"bench.gate", "integrations.transformers", "sparse"},
    "prefill/records": {"bench.prefill.stopwatch"},
    "prefill/plots": {"bench.prefill.records", "bench.prefill.stopwatch", "bench.report"},
    "prefill/run": {
        "bench",
        "bench.prefill",
        "bench.prefill.records",
        "bench.prefill.stopwatch",
        "integrations.transformers",
        "integrations.transformers.families",
        "sparse",
    },
    "serve/__init__": set(),
    "serve/server": set(),
    "serve/records": set(),
    "serve/plots": {"bench.serve.records"},
    "serve/run": {"bench.machine", "bench.serve.records", "bench.serve.server"},
}
"""The modules of the benchmark, and what each may import besides the public functions."""

FAMILIES, KEPT = "integrations.transformers.families", "integrations.transformers.indexers"
DISTILLATION = {
    "__init__": {"distillation.settings"},
    "settings": set(),
    "attention": {
        "api", "autocasting", "dense_attention", "distillation.layer", "sparse",
        "integrations.transformers.recording", FAMILIES,
    },
    "figures": {"api", "distributed", "sparse", "sparse.head_groups", "integrations.transformers.recording"},
    "layer": {
        "api", "distillation.figures", "distributed", "indexer", "sparse", "integrations.transformers.recording",
        FAMILIES,
    },
    "mesh": {"distillation", "distributed", FAMILIES},
    "teacher": {"distillation", FAMILIES},
    "model": {
        "distillation", "distillation.layer", "distillation.mesh", "integrations.transformers.capture",
        "integrations.transformers.probe", FAMILIES, KEPT,
    },
    "indexers": {
        "distillation.settings", "distillation.teacher", "indexer", "integrations.saved.description", FAMILIES, KEPT
    },
    "packing": {"distillation.settings", "text"},
    "order": set(),
    "shards": {"text"},
    "tokenizing": {
        "cache", "durable", "text", *(f"distillation.{name}" for name in ("packing", "settings", "shards"))
    },
    "needles": set(),
    "samples": {"distillation", "distillation.order", "distillation.shards"},
    "ranks": set(),
    "replica": set(),
    "checkpoints": {"durable"},
    "curves": {"durable"},
    "trainer": {
        "distillation", "sparse", KEPT,
        *(f"distillation.{name}" for name in ("checkpoints", "curves", "model", "replica")),
    },
    "arguments": {"distillation", "distillation.settings"},
    "resuming": {"cache", "distillation", "distillation.checkpoints", "distillation.settings"},
    "results": {"distillation", "distillation.checkpoints", "distillation.settings"},
    "sequences": {
        "distillation", "text", *(f"distillation.{name}" for name in ("packing", "samples", "settings", "shards"))
    },
    "training": {
        "distillation", "integrations.transformers", "integrations.transformers.description", FAMILIES,
        "integrations.transformers.checkpoint",
        *(f"distillation.{name}" for name in ("arguments", "resuming", "results", "samples", "sequences")),
        *(f"distillation.{name}" for name in ("settings", "trainer")),
    },
    "run": {
        "distillation", "integrations.saved.folder", "integrations.transformers", FAMILIES,
        *(f"distillation.{name}" for name in ("indexers", "mesh", "model", "results", "sequences")),
        *(f"distillation.{name}" for name in ("settings", "trainer", "training")),
    },
    "joint": {
        "api", "indexer", *(f"distillation.{name}" for name in ("figures", "layer", "mesh", "model")),
        *(f"integrations.transformers.{name}" for name in ("capture", "model", "recording")),
    },
    "joint_trainer": {"distillation.trainer"},
    "finetune": {
        "integrations.transformers.checkpointing",
        "distillation", "extras", KEPT, "integrations.transformers.model",
        *(f"distillation.{name}" for name in ("joint", "joint_trainer", "mesh", "results", "sequences")),
        *(f"distillation.{name}" for name in ("settings", "training")),
    },
    "estimate": {f"distillation.{name}" for name in ("arguments", "settings", "training")},
}  # fmt: skip
"""The modules of distillation, and what each may import."""


EVALUATION = {
    "__init__": set(),
    "haystack": {"text"},
    "tasks": {"evaluation.haystack", "text"},
    "methods": {"sparse"},
    "plan": {"evaluation.methods", "evaluation.tasks"},
    "records": set(),
    "statistics": set(),
    "subject": {
        "evaluation.methods",
        "integrations.transformers",
        "integrations.saved.folder",
        "integrations.transformers.checkpoint",
        "integrations.transformers.probe",
    },
    "layers": {"evaluation.methods", "evaluation.subject", "integrations.transformers", "sparse"},
    "run": {f"evaluation.{name}" for name in ("haystack", "layers", "methods", "plan", "records", "subject", "tasks")},
    "summary": {"evaluation.methods", "evaluation.records", "evaluation.statistics"},
    "plots": {"evaluation.methods", "evaluation.statistics", "evaluation.summary"},
    "report": {"evaluation", "evaluation.methods", "evaluation.statistics", "evaluation.summary"},
    "harness": {"evaluation.methods", "integrations.transformers"},
}
"""The modules of the evaluation, and what each may import besides the public functions."""

SAVED = {
    "__init__": set(),
    "schema": set(),
    "folder": {"", "schema"},
    "selectors": {"schema"},
    "settings": {"schema", "selectors"},
    "description": {"schema", "selectors"},
    "beside": {""},
}
"""The files that integrations share, and what of them each may import; all may import what is `BELOW`."""

VLLM = {
    "__init__": {"config", "families"},
    "families": set(),
    "pages": set(),
    "metadata": set(),
    "settings": set(),
    "config": {"families", "settings"},
    "scheduler": {"settings"},
    "index_cache": set(),
    "backends/__init__": set(),
    "backends/sparse": {"", "metadata", "settings"},
    "backends/gpu": {"backends.sparse"},
    "backends/cpu": {"", "backends"},
    "backends/flash": {"", "backends"},
    "backends/triton": {"", "backends"},
    "ops": {"config", "pages"},
    "attention": {"", "backends", "index_cache"},
    "models": {"attention", "settings"},
}
"""The modules of the plugin for vLLM, what of it each may import; all may import `SAVED` and what is `BELOW`."""

TRANSFORMERS = {
    "__init__": {
        "requirements",
        "attention",
        "capture",
        "distiller",
        "families",
        "indexers",
        "loading",
        "model",
        "recording",
        "trainer",
    },
    "requirements": set(),
    "selection": set(),
    "checkpoint": set(),
    "checkpointing": set(),
    "index_cache": set(),
    "layout": set(),
    "masks": {"layout"},
    "recording": {"layout", "masks"},
    "taps": {"masks", "recording"},
    "capture": {"", "recording", "selection"},
    "pairing": set(),
    "distiller": {"capture", "pairing", "recording"},
    "trainer": {"capture", "distiller"},
    "module_call": {"families", "masks"},
    "own_indexer": {"families", "module_call"},
    "layer": {"", "families", "layout", "masks", "module_call", "own_indexer", "recording", "selection"},
    "attention": {"layer", "masks", "module_call", "recording", "selection"},
    "description": {"families"},
    "indexers": {"", "families"},
    "probe": {"attention", "families", "layer", "masks", "selection"},
    "model": {"", "capture", "families", "indexers", "layer", "recording", "selection"},
    "loading": {"model", "selection"},
    "families/base": set(),
    "families/dsa": {"families.base"},
    "families/llama": {"families.base"},
    "families/qwen3": {"families.base"},
    "families/qwen3_next": {"families.base"},
    "families/qwen3_5": {"families.base"},
    "families/gemma3": {"families.base"},
    "families/deepseek_v32": {"families.dsa"},
    "families/compressed": {"families.base"},
    "families/deepseek_v4": {"families.base", "families.compressed"},
    "families/glm5_next": {"families.base", "families.compressed", "families.dsa"},
    "families/qwen4_exp": {"families.base", "families.compressed"},
    "families/glm_moe_dsa": {"families.dsa"},
    "families/structural": {"families.base"},
    "families/axk2": {"families.dsa"},
    "families/dots3_note": {"families.base", "families.dsa"},
    "families/mistral_large4": {"families.base", "families.dsa"},
    "families/hy_v4": {"families.dsa"},
    "families/minimax_m3_vl": {"families.base"},
    "families/__init__": {
        f"families.{name}"
        for name in (
            "axk2",
            "base",
            "deepseek_v32",
            "deepseek_v4",
            "dots3_note",
            "dsa",
            "gemma3",
            "glm5_next",
            "glm_moe_dsa",
            "hy_v4",
            "llama",
            "minimax_m3_vl",
            "mistral_large4",
            "qwen3",
            "qwen3_5",
            "qwen3_next",
            "qwen4_exp",
            "structural",
        )
    },
}
"""The modules of the integration into transformers, what of it each may import; all may import `SAVED` and what is
`BELOW`."""
BELOW = {
    "streamkl",
    "streamkl.autocasting",
    "streamkl.dense_attention",
    "streamkl.durable",
    "streamkl.extras",
    "streamkl.hub",
    SPARSE,
    INDEXER,
    f"{INDEXER}.base",
    f"{INDEXER}.rope",
}

CPP = {
    "tile": {"tile"},
    "passes": {"passes", "tile"},
    "dense": {"", "dense", "passes", "tile"},
    "gathered": {"", "gathered", "passes", "tile"},
    "sparse": {"", "dense", "gathered", "passes", "sparse", "tile"},
    "": {"", "tile"},
}
"""The folders of the CPU engine's C++, and those whose headers each may include; ``kernels.h`` is in none."""

ABOVE = ("bench", "cli", "distillation", "evaluation", "integrations", "selfcheck")
"""Where models of transformers are used."""


@functools.cache
def imports(path: Path, package: str = "streamkl") -> set[str]:
    """The modules of a package that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == package:
            found |= {f"{package}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return {name for name in found if name.split(".")[0] == package}


@functools.cache
def import_graph() -> dict[str, set[str]]:
    """The modules of the package, and those of them that each imports, anywhere in it."""
    paths = {".".join(path.relative_to(ROOT.parent).with_suffix("").parts): path for path in ROOT.rglob("*.py")}
    paths = {name.removesuffix(".__init__"): path for name, path in paths.items()}
    found = {}
    for name, path in paths.items():
        nodes = list(ast.walk(ast.parse(path.read_text())))
        named = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        for node in (node for node in nodes if isinstance(node, ast.ImportFrom)):
            modules = (f"{node.module}.{alias.name}" for alias in node.names)
            named |= {module if module in paths else str(node.module) for module in modules}
        found[name] = named & paths.keys() - {name}
    return found


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Not even for their types, nor inside of functions."""
    graphlib.TopologicalSorter(import_graph()).prepare()


def test_the_core_imports_only_what_lies_below_it() -> None:
    for name, allowed in ALLOWED.items():
        assert imports(ROOT / name) <= allowed, name


def test_cpp_includes_run_one_way_and_passes_over_all_and_over_selected_keys_do_not_include_each_other() -> None:
    root = ROOT / "engines" / "cpu"
    sources = [*root.rglob("*.h"), *root.rglob("*.cpp")]
    assert {path.relative_to(root).parent.name for path in sources} == set(CPP)
    for path in sources:
        named = re.findall(r'^#include "([^"]+)"', path.read_text(), re.MULTILINE)
        assert {Path(name).parent.name for name in named} <= CPP[path.relative_to(root).parent.name], path
        assert all((root / name).is_file() for name in named), path


def test_every_core_module_has_a_rule() -> None:
    apart = ("bench", "cli", "distillation", "evaluation", "integrations", "selfcheck", "testing")
    paths = (path.relative_to(ROOT) for path in ROOT.rglob("*.py"))
    core = {str(path) for path in paths if path.parts[0] not in apart}
    assert core == set(ALLOWED)


def test_the_benchmark_imports_only_what_lies_below_it_and_the_core_does_not_import_it() -> None:
    bench = ROOT / "bench"
    assert {str(path.relative_to(bench).with_suffix("")) for path in bench.rglob("*.py")} == set(BENCH)
    for name, allowed in BENCH.items():
        found = imports(bench / f"{name}.py") - {"streamkl"}
        assert found <= {f"streamkl.{module}" for module in allowed}, name
    importers = {
        str(path.relative_to(ROOT))
        for path in ROOT.rglob("*.py")
        if any(name.startswith("streamkl.bench") for name in imports(path)) and not path.is_relative_to(bench)
    }
    assert importers == {
        "cli/bench.py",
        "cli/evaluate.py",
        "cli/prefill.py",
        "cli/selfcheck.py",
        "cli/serve.py",
        "selfcheck/checks.py",
        "selfcheck/report.py",
    }


def test_the_evaluation_imports_only_what_lies_below_it_and_the_command_line_alone_imports_it() -> None:
    assert {path.stem for path in (ROOT / "evaluation").glob("*.py")} == set(EVALUATION)
    for name, allowed in EVALUATION.items():
        found = imports(ROOT / "evaluation" / f"{name}.py") - {"streamkl"}
        assert found <= {f"streamkl.{module}" for module in allowed}, name
    importers = {
        str(path.relative_to(ROOT))
        for path in ROOT.rglob("*.py")
        if any(name.startswith("streamkl.evaluation") for name in imports(path)) and path.parent.name != "evaluation"
    }
    assert importers == {"cli/evaluate.py", "cli/lm_eval.py"}


def test_distillation_imports_only_what_lies_below_it_and_only_the_command_line_and_its_benchmark_import_it() -> None:
    assert {path.stem for path in (ROOT / "distillation").glob("*.py")} == set(DISTILLATION)
    for name, allowed in DISTILLATION.items():
        found = imports(ROOT / "distillation" / f"{name}.py")
        assert found <= {f"streamkl.{module}" for module in allowed}, name
    importers = {
        str(path.relative_to(ROOT))
        for path in ROOT.rglob("*.py")
        if any(name.startswith("streamkl.distillation") for name in imports(path))
        and path.parent.name != "distillation"
    }
    assert importers == {"bench/distill.py", "cli/distill.py", "cli/finetune.py", "cli/tokenize.py", "cli/training.py"}


def test_nothing_imports_testing_but_the_doctor_and_the_benchmark() -> None:
    importers = {
        str(path.relative_to(ROOT))
        for path in ROOT.rglob("*.py")
        if any(name.startswith("streamkl.testing") for name in imports(path)) and path.parent.name != "testing"
    }
    assert importers == {
        "cli/doctor.py", "bench/attention.py", "bench/cells.py", "bench/gate.py", "bench/guard.py",
        "bench/suites.py", "selfcheck/checks.py",
    }  # fmt: skip


@pytest.mark.parametrize(("integration", "table"), [("saved", SAVED), ("transformers", TRANSFORMERS), ("vllm", VLLM)])
def test_an_integration_imports_only_what_lies_below_it_and_the_core_does_not_import_it(
    integration: str, table: dict[str, set[str]]
) -> None:
    folder, package = ROOT / "integrations" / integration, f"streamkl.integrations.{integration}"
    files = {f"streamkl.integrations.saved.{name}".removesuffix(".__init__") for name in SAVED}
    shared = set() if integration == "saved" else files
    assert {str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("*.py")} == set(table)
    for name, allowed in table.items():
        found = imports(folder / f"{name}.py") - BELOW - shared
        assert found <= {f"{package}.{module}".rstrip(".") for module in allowed}, name
    importers = {path for path in ROOT.rglob("*.py") if any("integrations" in name for name in imports(path))}
    assert all(path.relative_to(ROOT).parts[0] in ABOVE for path in importers)


def test_transformers_is_imported_by_its_integration_by_what_stands_on_it_and_by_what_tests_it() -> None:
    importers = {path.relative_to(ROOT) for path in ROOT.rglob("*.py") if imports(path, "transformers")}
    apart = {path for path in importers if path.parts[0] not in ABOVE}
    assert apart == {Path("testing") / f"{name}.py" for name in ("causal_models", "needle", "smollm2", "tiny_models")}
