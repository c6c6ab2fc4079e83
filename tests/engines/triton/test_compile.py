"""Kernels compiled for GPUs that are not here, in a process where Triton compiles instead of interpreting."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from streamkl.engines.triton.inspect.budget import TARGETS
from streamkl.engines.triton.inspect.table import ALIKE, variants

ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


def kernels(*arguments: str, timeout: int = 1800) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "streamkl", "kernels", *arguments], env=ENVIRONMENT, capture_output=True, text=True,
        timeout=timeout,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "targets",
    [
        pytest.param(("sm_90", "gfx942"), marks=pytest.mark.longest),
        pytest.param(("sm_80", "sm_90", "sm_100", "gfx942"), marks=pytest.mark.nightly),
    ],
    ids=["one_of_each_vendor", "all"],
)
def test_kernels_of_the_quick_table_are_within_their_budgets(targets: tuple[str, ...], tmp_path: Path) -> None:
    output = tmp_path / "kernels.json"
    result = kernels("--quick", "--check", "--target", *targets, "--output", str(output))
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert "upper bound, not measured" in " ".join(result.stdout.split())
    rows = json.loads(output.read_text())
    assert {row["arch"] for row in rows} == set(targets)
    assert all(row["spills"] == 0 and row["shared"] <= row["shared_limit"] for row in rows)
    kernels_made = len({(row["arch"], row["ir"]) for row in rows})
    assert f"{len(rows)} rows of {len(targets)} targets, {kernels_made} different kernels, in " in result.stdout
    assert result.stdout.rstrip().endswith(" of processor time): 0 over budget")


def test_no_two_rows_of_the_table_are_the_same_and_every_target_has_all_of_them_or_is_like_another() -> None:
    rows = variants()
    assert len(set(rows)) == len({str(row) for row in rows}) == len(rows)
    of_target = {arch: {row._replace(arch="") for row in rows if row.arch == arch} for arch in TARGETS}
    whole = of_target["sm_90"]
    assert all(found < whole if arch in ALIKE else found == whole for arch, found in of_target.items())
    assert set(variants(quick=True)) < set(rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "kind", "dim", "packed"),
    [
        ("sm_86", "mixture", "128", "mixture 128 bfloat16 worst"),
        pytest.param(
            "sm_120",
            "train_gathered",
            "576",
            "train_gathered 576/128 J=64 weighted float16 worst",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_packed_sequences_in_a_window_spill_nothing_where_registers_are_scarcest(
    target: str, kind: str, dim: str, packed: str, tmp_path: Path
) -> None:
    output = tmp_path / "kernels.json"
    result = kernels("--check", "--target", target, "--kind", kind, "--dim", dim, "--output", str(output))
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert f"{target} {packed}" in {row["variant"] for row in json.loads(output.read_text())}


WRITTEN_ALIKE = """
import json, sys
import torch
from streamkl.engines.triton.inspect.compiler import compile_launch
from streamkl.engines.triton.inspect.matrix import Variant, launches

def ptx(arch, kind, worst):
    variant = Variant(arch, kind, (128, 128), torch.bfloat16, True, worst=worst)
    texts = (compile_launch(launch, arch).asm["ptx"] for launch in launches(variant))
    return [[line for line in text.splitlines() if arch not in line] for text in texts]

print(json.dumps([all(ptx(arch, *row) == ptx(other, *row) for row in [("mixture", True), ("train", False)])
                  for arch, other in json.loads(sys.argv[1]).items()]))
"""


@pytest.mark.slow
def test_targets_that_the_table_takes_as_alike_get_the_same_ptx(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", WRITTEN_ALIKE, json.dumps(ALIKE)],
        env={**ENVIRONMENT, "TRITON_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    assert json.loads(result.stdout) == [True] * len(ALIKE)


COMPILED_APART = """
import json, os, sys
from pathlib import Path
import torch
from streamkl.engines.triton.inspect.matrix import Variant
from streamkl.engines.triton.inspect.report import figures

def rows(cache, *dims):
    folder = Path(sys.argv[1]) / cache
    os.environ.update(STREAMKL_CACHE=str(folder), TRITON_CACHE_DIR=str(folder / "triton"))
    found = [figures(Variant("gfx942", "lse", dim, torch.bfloat16, False))[0]._asdict() for dim in dims]
    return found, len(list(folder.rglob("*.hsaco")))

narrow, wide = (64, 64), (576, 128)
print(json.dumps([rows("one", narrow, wide), rows("another", wide), rows("one", narrow, wide)]))
"""


@pytest.mark.slow
def test_rows_with_the_same_ir_are_compiled_once_and_could_not_differ(tmp_path: Path) -> None:
    """A head dim leaves no trace in a forward kernel that reads heads in chunks, as all do that are misaligned."""
    result = subprocess.run(
        [sys.executable, "-c", COMPILED_APART, str(tmp_path)], env=ENVIRONMENT, capture_output=True, text=True,
        timeout=600,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    (together, compiled), (apart, compiled_apart), (again, _) = json.loads(result.stdout)
    assert again == together
    assert compiled == compiled_apart == 1
    narrow, wide = ({**row, "variant": ""} for row in together)
    assert narrow == wide == {**apart[0], "variant": ""}
    assert together[1] == apart[0]


@pytest.mark.slow
def test_on_sm_90_the_forward_issues_at_most_one_and_a_half_clocks_per_clock_of_products(tmp_path: Path) -> None:
    output = tmp_path / "kernels.json"
    kernels("--quick", "--target", "sm_90", "--kind", "paired", "--output", str(output))
    (row,) = (row for row in json.loads(output.read_text()) if row["variant"] == "sm_90 paired 128 bfloat16")
    print(f"{row['issue_clocks']:.0f} clocks of issue, {row['mma_clocks']:.0f} of products")
    assert row["issue_clocks"] <= 1.5 * row["mma_clocks"]


@pytest.mark.slow
def test_check_fails_on_a_broken_budget(tmp_path: Path) -> None:
    """A table whose tiles do not fit the shared memory."""
    table = tmp_path / "configs.json"
    table.write_text(json.dumps({"gfx942": {"lse": {"128": {"rows": 128, "keys": 256, "warps": 4, "stages": 4}}}}))
    result = subprocess.run(
        [sys.executable, "-m", "streamkl", "kernels", "--target", "gfx942", "--kind", "lse", "--quick", "--check"],
        env={**ENVIRONMENT, "STREAMKL_CONFIGS": str(table), "STREAMKL_CACHE": str(tmp_path)}, capture_output=True,
        text=True, timeout=600,
    )  # fmt: skip
    assert result.returncode == 1, result.stdout + result.stderr
    assert "over budget" in result.stdout


def test_an_interpreter_compiles_nothing_and_says_so() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "streamkl", "kernels"], env={**ENVIRONMENT, "TRITON_INTERPRET": "1"},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert result.returncode != 0
    assert "TRITON_INTERPRET=1" in result.stderr


@pytest.mark.slow
def test_torch_compile_traces_through_the_operators_with_this_engine() -> None:
    script = """
import torch
from streamkl import attention_kl
q = torch.randn(1, 2, 20, 16, requires_grad=True)
def loss(q):
    return attention_kl(q.detach(), q.detach(), q, q, student_scale=0.1, causal=True, backend="triton")
eager, compiled = loss(q), torch.compile(loss, fullgraph=True, backend="aot_eager")(q)
a, b = (torch.autograd.grad(x, q)[0] for x in (eager, compiled))
assert torch.allclose(eager, compiled, rtol=1e-6, atol=1e-7) and torch.allclose(a, b, rtol=1e-6, atol=1e-7)
print("equal")
"""
    result = subprocess.run(
        [sys.executable, "-c", script], env={**ENVIRONMENT, "TRITON_INTERPRET": "1"}, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    assert result.stdout.strip() == "equal", result.stderr[-3000:]


MISALIGNED = """
import json, torch
from streamkl.engines.triton.inspect.compiler import compile_launch
from streamkl.engines.triton.inspect.matrix import Variant, launches

class Lowered(Exception):
    pass

def stop(ir):
    raise Lowered(ir)

def ir_of(kind, dims):
    found = []
    for launch in launches(Variant("sm_90", kind, dims, torch.float16, False)):
        try:
            compile_launch(launch, "sm_90", False, stop)
        except Lowered as lowered:
            found.append(str(lowered))
    return found

def same(kind, *dims):
    (first, *others) = (ir_of(kind, d) for d in dims)
    return bool(first) and all(other == first for other in others)

print(json.dumps({
    "mixture": same("mixture", (64, 64), (128, 128), (256, 256), (576, 128)),
    "queries_group": same("queries_group", (128, 128), (192, 128), (576, 128)),
    "otherwise": same("queries_group", (64, 64), (128, 128)),
}))
"""


@pytest.mark.slow
def test_kernels_over_misaligned_heads_do_not_depend_on_the_dims_that_have_no_rows() -> None:
    result = subprocess.run([sys.executable, "-c", MISALIGNED], env=ENVIRONMENT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    assert json.loads(result.stdout) == {"mixture": True, "queries_group": True, "otherwise": False}


KEYS = """
import json, sys
from streamkl.engines.triton.inspect.kept import _launch_key
from streamkl.engines.triton.inspect.matrix import launches
from streamkl.engines.triton.inspect.table import variants

rows = [row for row in variants(["sm_90"]) if row.kind in ("mixture", "lse_gathered", "train_gathered")]
rows = rows[::-1] if sys.argv[1] == "last first" else rows
keys = {str(row): [_launch_key(launch, row.arch, row.aligned) for launch in launches(row)] for row in rows}
print(json.dumps(keys))
"""


@pytest.mark.slow
def test_the_key_of_a_cached_kernel_does_not_depend_on_the_kernels_before_it() -> None:
    first, second = (
        subprocess.run([sys.executable, "-c", KEYS, order], env=ENVIRONMENT, capture_output=True, text=True, check=True)
        for order in ("first first", "last first")
    )
    assert json.loads(first.stdout) == json.loads(second.stdout)
