"""Checks the built site: ``python docs/tools/check.py build/site`` fails on broken links and undocumented names.

Links include those that the site's builder takes as they are: images, files and anchors within a page. A public name is
one in ``__all__`` of a module below; it must have a docstring and an anchor in the reference, and so must have a
docstring every method and property of a public class, and a description every field. Two backticks that are left in a
page come from a literal that a line break cuts in two.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

PAGES = {
    "streamkl": "streamkl",
    "streamkl.sparse": "sparse",
    "streamkl.indexer": "indexer",
    "streamkl.distributed": "distributed",
    "streamkl.plan": "plan",
    "streamkl.integrations.transformers": "transformers",
    "streamkl.distillation": "distillation",
    "streamkl.testing": "testing",
}
"""The public modules, and the page of the reference that each has."""


class Page(HTMLParser):
    """Anchors, targets and text of a page."""

    def __init__(self, path: Path) -> None:
        """Reads the page."""
        super().__init__()
        self.anchors: set[str] = set()
        self.targets: set[str] = set()
        self.text: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keeps what the page has and what it points to."""
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.anchors.add(value)
            elif name in ("href", "src") and value:
                self.targets.add(value)

    def handle_data(self, data: str) -> None:
        """Keeps the text."""
        self.text.append(data)


def broken_links(site: Path) -> list[str]:
    """Links to pages, files and anchors of the site that are not there."""
    pages = {path.resolve(): Page(path) for path in site.rglob("*.html")}
    broken = []
    for path, page in pages.items():
        for target in sorted(page.targets):
            link = urlsplit(target)
            if link.scheme or link.netloc or path.name == "404.html":
                continue
            file = (path.parent / unquote(link.path)).resolve() if link.path else path
            file = file / "index.html" if file.is_dir() else file
            if not file.exists():
                broken.append(f"{path.relative_to(site.resolve())}: {target} is not there")
            elif link.fragment and file in pages and unquote(link.fragment) not in pages[file].anchors | {"__top"}:
                broken.append(f"{path.relative_to(site.resolve())}: {target} has no such anchor")
    return broken


def undocumented(site: Path) -> list[str]:
    """Public names that have no docstring, or that the reference does not show."""
    missing = []
    for module, name in PAGES.items():
        shown = Page(site / "reference" / name / "index.html").anchors
        for public in importlib.import_module(module).__all__:
            if public == "__version__":
                continue
            found = getattr(importlib.import_module(module), public)
            if callable(found):
                missing.extend(f"{module}.{part}" for part in undescribed(found))
            if f"{module}.{public}" not in shown:
                missing.append(f"{module}.{public} is not in the reference")
    return missing


def undescribed(found: Any) -> Iterator[str]:
    """The parts of a function or class that have no description of their own: itself, its methods, its fields."""
    doc = found.__dict__.get("__doc__") if isinstance(found, type) else inspect.getdoc(found)
    if not doc or re.match(rf"{found.__name__}\(", doc):  # the latter is made for dataclasses and named tuples
        yield f"{found.__name__} has no docstring"
        return
    if not isinstance(found, type):
        return
    for name, member in vars(found).items():
        is_code = isinstance(member, (property, classmethod, staticmethod)) or inspect.isfunction(member)
        if is_code and not name.startswith("_") and not inspect.getdoc(getattr(found, name)):
            yield f"{found.__name__}.{name} has no docstring"
    fields = dataclasses.fields(found) if dataclasses.is_dataclass(found) else ()
    for name in [f.name for f in fields if "help" not in f.metadata] or getattr(found, "_fields", ()):
        if not re.search(rf"^\s+{name}: ", doc, re.M):
            yield f"{found.__name__}.{name} is not described"


def broken_literals(site: Path) -> list[str]:
    """Pages with two backticks in their text."""
    pages = {path: Page(path).text for path in sorted(site.rglob("*.html"))}
    return [
        f"{path.relative_to(site)}: two backticks are left in {part.strip()[:80]!r}"
        for path, text in pages.items()
        for part in text
        if "``" in part
    ]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    wrong = [*broken_links(folder), *undocumented(folder), *broken_literals(folder)]
    sys.exit("\n".join(wrong) if wrong else 0)
