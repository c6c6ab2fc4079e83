"""Every example in the README, in ``docs/`` and in a docstring runs."""

import doctest
import importlib
import importlib.util
import inspect
import pkgutil
import re
import runpy
import shutil
import struct
import subprocess
import zlib
from pathlib import Path

import pytest
import torch

import streamkl
from streamkl.engines import triton

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def python_blocks() -> list:
    """Each page's ``python`` blocks, joined: a page reads from top to bottom."""
    pages = [page for page in PAGES if page.name != "quickstart-sparse.md"]  # which runs in test_quickstart.py
    blocks = {page: "\n".join(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)) for page in pages}
    return [
        pytest.param(
            code,
            id=str(page.relative_to(ROOT)),
            marks=pytest.mark.skipif("transformers" in code and not installed("transformers"), reason="transformers"),
        )
        for page, code in blocks.items()
        if code
    ]


def modules() -> list[str]:
    names = (name for _, name, _ in pkgutil.walk_packages(streamkl.__path__, "streamkl."))
    needs = {
        "triton": ("streamkl.engines.triton.", "streamkl.cli.kernels"),
        "transformers": (
            "streamkl.integrations.",
            "streamkl.testing.causal_models",
            "streamkl.testing.smollm2",
            "streamkl.bench.prefill",
            *(f"streamkl.evaluation.{name}" for name in ("layers", "run", "subject")),
        ),
        "lm_eval": ("streamkl.evaluation.harness",),
        "vllm": ("streamkl.integrations.vllm.",),
        "matplotlib": ("streamkl.bench.plots", "streamkl.evaluation.plots"),
    }
    absent = {package for package in needs if not installed(package)}
    absent |= {"triton"} if triton.unsupported(torch.device("cpu")) else set()  # too old
    missing = tuple(prefix for package, prefixes in needs.items() if package in absent for prefix in prefixes)
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


def test_indexer_example_learns() -> None:
    before, after = runpy.run_path(str(ROOT / "examples" / "train_indexer.py"))["main"](steps=40)
    assert before < 0.6
    assert after > 0.9


def test_attention_example_learns() -> None:
    pytest.importorskip("transformers")
    first, last = runpy.run_path(str(ROOT / "examples" / "distill_attention.py"))["main"](steps=24, length=24)
    assert last < 0.7 * first


@pytest.mark.slow
def test_sparsity_example_measures_every_layer() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    masses = runpy.run_path(str(ROOT / "examples" / "how_sparse.py"))["main"](tokens=128, budgets=(8, 32))
    assert {budget: len(layers) for budget, layers in masses.items()} == {8: 30, 32: 30}
    assert all(0 < few <= many <= 1.001 for few, many in zip(*masses.values(), strict=True))


@pytest.mark.slow
def test_generation_example_is_dense_again_at_the_end() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    main = runpy.run_path(str(ROOT / "examples" / "sparse_generate.py"))["main"]
    answers = main(tokens=160, topk=160, query_block=32)
    assert answers["all keys again"] == answers["all keys"]


needs_dpkg = pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="the texts come in Debian packages")


def debian_package(folder: Path, files: dict[str, bytes]) -> Path:
    """A package of these files, by their paths."""
    control = "Package: texts\nVersion: 1\nArchitecture: all\nMaintainer: nobody\nDescription: texts\n"
    for name, content in {**files, "DEBIAN/control": control.encode()}.items():
        path = folder / "package" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    package = folder / "texts.deb"
    subprocess.run(["dpkg-deb", "--build", str(folder / "package"), str(package)], check=True, capture_output=True)
    return package


@needs_dpkg
def test_novels_are_read_from_a_debian_package(tmp_path: Path) -> None:
    def string(text: str) -> bytes:
        return struct.pack(">2i", 9, len(text)) + text.encode()

    lines = ["NORTHANGER ABBEY", "", "No one who had ever", "seen her.", "", "Second."]
    vector = struct.pack(">2i", 16, len(lines)) + b"".join(map(string, lines))
    record = b"X\n" + struct.pack(">4I", 3, 0, 0, 5) + b"UTF-8" + vector
    database = struct.pack(">I", len(record)) + zlib.compress(record)
    package = debian_package(tmp_path, {"usr/lib/R/site-library/janeaustenr/data/Rdata.rdb": database})
    main = runpy.run_path(str(ROOT / "examples" / "austen.py"))["main"]
    (written,) = main(package, tmp_path / "books")
    assert written.name == "northanger-abbey.txt"
    assert written.read_text() == "NORTHANGER ABBEY\n\nNo one who had ever seen her.\n\nSecond.\n"


@needs_dpkg
def test_a_handbook_is_read_from_a_debian_package_but_for_what_is_not_translated(tmp_path: Path) -> None:
    german = b'<div class="para">Ein <code>Wort</code>:<div class="note">Beiwerk</div> und\n mehr.</div>'
    english = b'<div class="para">Not translated.</div>'
    html = "usr/share/doc/debian-handbook/html"
    files = {f"{html}/de-DE/{n}.html": german + english for n in range(5)}
    package = debian_package(tmp_path, {**files, f"{html}/en-US/0.html": english})
    main = runpy.run_path(str(ROOT / "examples" / "handbook.py"))["main"]
    main(package, tmp_path / "new", "de-DE")
    assert (tmp_path / "new" / "train" / "0.txt").read_text() == "Ein Wort:\n\nund mehr.\n"
    assert "Not translated." in (tmp_path / "new" / "test" / "4.txt").read_text()
    assert len(list((tmp_path / "new").glob("*/*.txt"))) == 5


def test_every_example_says_how_it_is_started_and_is_run_by_a_test() -> None:
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for path in sorted((ROOT / "examples").glob("*.*")):
        start = path.read_text()[:800]
        assert re.search(rf"(python|bash) examples/{path.name}|make {path.stem}", start), path.name
        assert f'"{path.name}"' in tests, f"no test runs {path.name}"


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
