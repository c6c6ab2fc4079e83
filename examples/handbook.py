"""A handbook in a language that most models have hardly read, as text to learn and text to be judged by.

    apt-get download debian-handbook
    python examples/handbook.py debian-handbook_*.deb new --language de-DE

Writes the Debian Administrator's Handbook (GPL-2+ or CC-BY-SA 3.0) as ``new/train`` and ``new/test``, a file per
section; every fifth section is a test. Paragraphs that are not translated yet are left out.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from html.parser import HTMLParser
from pathlib import Path

HTML = "usr/share/doc/debian-handbook/html"


class Paragraphs(HTMLParser):
    """Collects the text of ``<div class="para">``, without that of the divisions inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._divisions: list[bool] = []
        self._text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Opens a division."""
        if tag == "div":
            self._end_paragraph()
            self._divisions.append(("class", "para") in attrs)

    def handle_endtag(self, tag: str) -> None:
        """Closes the last division."""
        if tag == "div" and self._divisions:
            self._end_paragraph()
            self._divisions.pop()

    def handle_data(self, data: str) -> None:
        """Keeps the text of a paragraph."""
        if self._divisions and self._divisions[-1]:
            self._text.append(data)

    def _end_paragraph(self) -> None:
        if text := " ".join("".join(self._text).split()):
            self.found.append(text)
        self._text = []


def paragraphs(page: Path) -> list[str]:
    """The paragraphs of a page."""
    parser = Paragraphs()
    parser.feed(page.read_text(encoding="utf-8"))
    return parser.found


def main(package: Path, folder: Path, language: str) -> None:
    """Writes the sections of the handbook in one language."""
    with tempfile.TemporaryDirectory() as unpacked:
        subprocess.run(["dpkg-deb", "-x", str(package), unpacked], check=True)
        pages = sorted((Path(unpacked) / HTML / language).glob("*.html"))
        english = Path(unpacked) / HTML / "en-US"
        for n, page in enumerate(pages):
            same = set(paragraphs(english / page.name)) if (english / page.name).exists() else set()
            text = "\n\n".join(paragraph for paragraph in paragraphs(page) if paragraph not in same)
            target = folder / ("test" if n % 5 == 4 else "train") / f"{page.stem}.txt"
            target.parent.mkdir(parents=True, exist_ok=True)
            if text:
                target.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("package", type=Path)
    options.add_argument("folder", type=Path)
    options.add_argument("--language", default="de-DE")
    given = options.parse_args()
    main(given.package, given.folder, given.language)
