"""What the README and the pages of ``docs/`` promise about themselves: length, words, links, and the site's tools."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted(DOCS.rglob("*.md"))
OLD_WORDS = r"a list a quer[y]|unite[d] list|contestan[t]|lists? for [0-9]+ querie[s]|\bone-sweep\b|\bnearness\b"


def tool(name: str) -> ModuleType:
    """A module of ``docs/tools``."""
    spec = importlib.util.spec_from_file_location(f"docs_tools_{name}", DOCS / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def prose(text: str) -> list[str]:
    """The lines of a page that are neither code, formulas nor tables."""
    without = re.sub(r"^(```|~~~|\$\$).*?^\1\s*$", "", text, flags=re.M | re.S)
    return [line for line in without.splitlines() if not line.startswith(("|", "    ", "![", "<"))]


def test_the_readme_has_at_most_900_words_and_shows_python_before_word_250() -> None:
    words = len(README.split())
    before = len(README[: README.index("```python\n")].split())
    assert words <= 900, f"{words} words"
    assert before < 250, f"the first line of Python comes after {before} words"


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.name)
def test_pages_use_the_glossarys_words_and_wrap_at_120(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    if page.name != "glossary.md":
        assert re.findall(OLD_WORDS, text, re.I) == []
    # a word that cannot be broken, such as a link or inline code, may reach beyond
    long = [line for line in prose(text) if len(line) > 120 and " " in line.strip() and "`" not in line]
    assert long == []


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


def test_the_reference_of_the_command_line_has_every_command_and_option() -> None:
    pytest.importorskip("markdown")
    page = tool("commands").reference()
    for command in ("bench run", "build", "distill", "doctor", "evaluate", "kernels", "lm-eval", "oracle", "selfcheck"):
        assert re.search(rf"^##+ `streamkl {command}`$", page, re.M), command
    for option in ("--steps", "--resume", "--device", "--output"):
        assert f"`{option}`" in page


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
