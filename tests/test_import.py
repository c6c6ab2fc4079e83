"""``import streamkl`` is light: what it loads, and how long it takes, seen from a fresh process."""

import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

FORBIDDEN = ("triton", "transformers", "typer", "rich", "torch.distributed.tensor", "torch._dynamo")

LOADED = f"""
import importlib.machinery, sys, types

class Recorder:
    \"\"\"Finds what is not installed, so that an attempt to import it shows.\"\"\"

    def find_spec(name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, Recorder) if name in {FORBIDDEN[:4]!r} else None

    def create_module(spec):
        return types.ModuleType(spec.name)

    def exec_module(module):
        pass

import torch
sys.meta_path.append(Recorder)
before = set(sys.modules)
import streamkl
streamkl.attention_kl, streamkl.attention_lse
{{call}}
print([name for name in {FORBIDDEN!r} if name in sys.modules and name not in before])
"""

SECONDS = """
import time
import torch
start = time.process_time()
import streamkl
print(time.process_time() - start)
"""

BROKEN = """
import sys
sys.modules["torch"] = None  # as if it were not installed
import streamkl
print(streamkl.__version__)
try:
    streamkl.attention_kl
except ImportError as error:
    print(error)
try:
    streamkl.nonsense
except AttributeError as error:
    print(error)
"""


def fresh(script: str) -> str:
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_import_loads_nothing_that_it_does_not_need() -> None:
    assert fresh(LOADED.replace("{call}", "")) == "[]"


@pytest.mark.slow
def test_import_adds_at_most_three_tenths_of_a_second_to_torch() -> None:
    assert statistics.median(float(fresh(SECONDS)) for _ in range(3)) <= 0.3


def test_a_call_does_not_load_them_either() -> None:
    call = "q = torch.randn(1, 1, 4, 8, requires_grad=True); streamkl.attention_kl(q, q, q, q).backward()"
    assert fresh(LOADED.replace("{call}", call)) == "[]"


def test_without_torch_the_package_imports_and_says_what_is_missing() -> None:
    version, message, attribute = fresh(BROKEN).splitlines()
    assert version
    assert "streamkl.attention_kl did not load" in message
    assert "torch" in message
    assert "streamkl doctor" in message
    assert "no attribute 'nonsense'" in attribute


def test_the_help_of_the_command_line_warns_of_nothing_in_a_fresh_process() -> None:
    """torch, which it loads, warns where there is no NumPy: so NumPy is a dependency."""
    (dependencies,) = re.findall(r"^dependencies = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert '"numpy"' in dependencies
    command = [sys.executable, "-m", "streamkl", "--help"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "Usage" in result.stdout
    assert result.stderr == ""
