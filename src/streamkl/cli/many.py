"""Options with several values after one name: ``--lengths 2048 4096`` means ``--lengths 2048 --lengths 4096``.

So does ``--lengths=2048 4096``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import typer.core

LISTS = {
    "<list[Path]>": "PATH ...",
    "<list[str]>": "WORD ...",
    "<list[int]>": "NUMBER ...",
    "<list[float]>": "NUMBER ...",
}


class ManyValues(typer.core.TyperCommand):
    """A command whose list options take all words up to the next option; its arguments come before them."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for parameter in self.params:
            shown = getattr(parameter, "display_type_rich", None)  # older typers show no type
            if shown is not None:
                setattr(parameter, "display_type_rich", functools.partial(_in_words, shown))  # noqa: B010

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # a context of click, or of the copy that typer has
        """Repeats the name of a list option before each of its values; of an unknown option names the nearest one."""
        lists = {name for p in self.params if getattr(p, "multiple", False) for name in p.opts}
        try:
            return super().parse_args(ctx, _repeated(args, lists))
        except Exception as error:  # an unknown option: click's error, or that of the copy that typer has
            if getattr(error, "possibilities", None):
                error.possibilities = error.possibilities[:1]  # pyright: ignore[reportAttributeAccessIssue]
            raise


def _in_words(shown: Callable[..., str | None], ctx: Any) -> str | None:
    """The type that the help shows: words in place of Python's lists."""
    return LISTS.get(shown(ctx=ctx) or "", shown(ctx=ctx))


def _repeated(args: list[str], lists: set[str]) -> list[str]:
    found: list[str] = []
    option = ""
    for n, word in enumerate(args):
        if word == "--":
            return found + args[n:]
        if word.startswith("-"):
            name, given, value = word.partition("=")
            option = name if name in lists else ""
            if option and given:
                found += [option, value]
            elif not option or n + 1 == len(args) or args[n + 1].startswith("-"):
                found.append(word)  # a flag, or a list option without a value, which the parser refuses
        else:
            found += [option, word] if option else [word]
    return found
