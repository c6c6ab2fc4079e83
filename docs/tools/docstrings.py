"""A Markdown extension: ``::`` at the end of a docstring's sentence, which announces code, is shown as a colon."""

from __future__ import annotations

import re
from typing import Any

from markdown import Markdown
from markdown.extensions import Extension
from markdown.preprocessors import Preprocessor


class _Colons(Preprocessor):
    def run(self, lines: list[str]) -> list[str]:
        return [re.sub(r"(?<=[\w`)])::$", ":", line) for line in lines]


class Docstrings(Extension):
    """Adds the preprocessor."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802 (the name is Markdown's)
        """Runs before code is found."""
        md.preprocessors.register(_Colons(md), "docstring-colons", 90)


def makeExtension(**options: Any) -> Docstrings:  # noqa: N802 (the name is Markdown's)
    """What Markdown calls."""
    return Docstrings(**options)
