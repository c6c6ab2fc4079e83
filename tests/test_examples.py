"""Every example in the README, in ``docs/`` and in a docstring runs."""

import doctest
import importlib
import importlib.util
import inspect
import pkgutil
import re
import runpy
from pathlib import Path

import pytest

import streamkl

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def python_blocks() -> list:
    """Each page's ``python`` blocks, joined: a page reads from top to bottom."""
    elsewhere = {"quickstart-sparse.md"} | ({"transformers.md"} if not installed("transformers") else set())
    pages = [page for page in PAGES if page.name not in elsewhere]  # the first's run in test_quickstart.py
    blocks = {page: re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S) for page in pages}
    return [pytest.param("\n".join(code), id=page.name) for page, code in blocks.items() if code]


def modules() -> list[str]:
    names = (name for _, name, _ in pkgutil.walk_packages(streamkl.__path__, "streamkl."))
    needs = {
        "triton": ("streamkl.engines.triton.", "streamkl.cli.kernels"),
        "transformers": (
            "streamkl.integrations.",
            "streamkl.testing.smollm2",
            "streamkl.bench.prefill",
            *(f"streamkl.evaluation.{name}" for name in ("layers", "run", "subject")),
        ),
        "lm_eval": ("streamkl.evaluation.harness",),
        "matplotlib": ("streamkl.bench.plots", "streamkl.evaluation.plots"),
    }
    missing = tuple(prefix for package, prefixes in needs.items() if not installed(package) for prefix in prefixes)
    return [n for n in names if not n.endswith("__main__") and not n.startswith(missing)]


@pytest.mark.parametrize("code", python_blocks())
def test_page_examples_run(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(code, "<example>", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out, "an example prints what it computes"


def test_first_readme_example_prints_a_loss_and_gradients(capsys: pytest.CaptureFixture[str]) -> None:
    first = re.search(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    assert first is not None
    exec(compile(first.group(1), "<README>", "exec"), {"__name__": "__main__"})
    output = capsys.readouterr().out
    assert re.search(r"loss \d+\.\d+", output)
    assert "gradients" in output


def test_training_example_learns() -> None:
    losses = runpy.run_path(str(ROOT / "examples" / "train_student.py"))["main"]()
    assert losses[-1] < 0.2 * losses[0]


@pytest.mark.parametrize("module", modules())
def test_docstring_examples_run(module: str) -> None:
    failed, _ = doctest.testmod(importlib.import_module(module), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert failed == 0


@pytest.mark.parametrize("name", [name for name in streamkl.__all__ if name != "__version__"])
def test_public_functions_are_typed_documented_and_shown(name: str) -> None:
    function = getattr(streamkl, name)
    signature, doc = inspect.signature(function), inspect.getdoc(function)
    assert doc is not None
    assert ">>>" in doc
    assert signature.return_annotation is not inspect.Signature.empty
    for parameter in signature.parameters.values():
        assert parameter.annotation is not inspect.Parameter.empty, parameter
        assert re.search(rf"^\s+{parameter.name}: ", doc, re.M), f"{parameter.name} is not documented"


def test_the_contract_names_tests_that_exist() -> None:
    page = (ROOT / "docs" / "contract.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page)
    assert len(named) >= 30
    for path, function in named:
        source = (ROOT / path).read_text()
        assert not function or f"def {function}(" in source, f"{path}::{function}"


def test_every_contract_test_is_in_the_contract() -> None:
    page = (ROOT / "docs" / "contract.md").read_text()
    for path in sorted((ROOT / "tests" / "contract").glob("test_*.py")):
        for function in re.findall(r"^def (test_\w+)\(", path.read_text(), re.M):
            assert function in page, f"{path.name}::{function} is not in docs/contract.md"
