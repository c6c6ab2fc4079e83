"""A Markdown extension: ``$...$`` and ``$$...$$`` become MathML, which browsers show without a script or a font."""

from __future__ import annotations

import re
from typing import Any, Literal
from xml.etree import ElementTree

from latex2mathml.converter import convert
from markdown import Markdown
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor
from markdown.preprocessors import Preprocessor

BLOCK = re.compile(r"^\$\$\s*\n?(.+?)\n?\s*\$\$\s*$", re.M | re.S)
FENCED = re.compile(r"^(```|~~~).*?^\1", re.M | re.S)
INLINE = r"(?<![\\$\w])\$(?=\S)([^$]+?)(?<=\S)\$(?!\w)"


def mathml(latex: str, display: Literal["inline", "block"]) -> str:
    """A formula in MathML, with a little room behind names of functions, which the converter leaves out."""
    made = convert(latex.strip(), display=display)
    return re.sub(r"(<mi>(?:ln|max|softmax|mean|act)</mi>)(?!<mspace)", r'\1<mspace width="0.17em" />', made)


class _Blocks(Preprocessor):
    def run(self, lines: list[str]) -> list[str]:
        text = "\n".join(lines)
        fences = [match.span() for match in FENCED.finditer(text)]

        def show(match: re.Match[str]) -> str:
            if any(start <= match.start() < end for start, end in fences):
                return match.group(0)
            html = f'<div class="math">{mathml(match.group(1), "block")}</div>'
            return f"\n{self.md.htmlStash.store(html)}\n"

        return BLOCK.sub(show, text).split("\n")


class _Inline(InlineProcessor):
    def handleMatch(  # noqa: N802 (the name is Markdown's)
        self, m: re.Match[str], data: str
    ) -> tuple[ElementTree.Element | str | None, int | None, int | None]:
        return self.md.htmlStash.store(mathml(m.group(1), "inline")), m.start(0), m.end(0)


class MathML(Extension):
    """Registers both forms before anything else reads their backslashes and underscores."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802 (the name is Markdown's)
        """Adds the two processors."""
        md.preprocessors.register(_Blocks(md), "mathml-blocks", 24)  # after fences (25) are stashed
        md.inlinePatterns.register(_Inline(INLINE, md), "mathml-inline", 185)  # after backticks (190)


def makeExtension(**options: Any) -> MathML:  # noqa: N802 (the name is Markdown's)
    """What Markdown calls."""
    return MathML(**options)
