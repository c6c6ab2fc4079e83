"""Checks the built site: ``python docs/tools/check.py build/site`` fails on broken links and undocumented names.

Links include those that the site's builder takes as they are: images, files and anchors within a page. A public name is
one in ``__all__`` of a module below; it must have a docstring and an anchor in the reference.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

PAGES = {
    "streamkl": "streamkl",
    "streamkl.sparse": "sparse",
    "streamkl.indexer": "indexer",
    "streamkl.distributed": "distributed",
    "streamkl.integrations.transformers": "transformers",
    "streamkl.distillation": "distillation",
    "streamkl.testing": "testing",
}
"""The public modules, and the page of the reference that each has."""


class Page(HTMLParser):
    """Anchors and targets of a page."""

    def __init__(self, path: Path) -> None:
        """Reads the page."""
        super().__init__()
        self.anchors: set[str] = set()
        self.targets: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keeps what the page has and what it points to."""
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.anchors.add(value)
            elif name in ("href", "src") and value:
                self.targets.add(value)


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
            if callable(found) and not inspect.getdoc(found):
                missing.append(f"{module}.{public} has no docstring")
            if f"{module}.{public}" not in shown:
                missing.append(f"{module}.{public} is not in the reference")
    return missing


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    wrong = [*broken_links(folder), *undocumented(folder)]
    sys.exit("\n".join(wrong) if wrong else 0)
