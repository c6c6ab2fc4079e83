"""Options with several values after one name: ``--lengths 2048 4096`` means ``--lengths 2048 --lengths 4096``."""

from __future__ import annotations

from typing import Any

import typer.core


class ManyValues(typer.core.TyperCommand):
    """A command whose list options take all words up to the next option; its arguments come before them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # a context of click, or of the copy that typer has
        """Repeats the name of a list option before each of its values."""
        lists = {name for p in self.params if getattr(p, "multiple", False) for name in p.opts}
        return super().parse_args(ctx, _repeated(args, lists))


def _repeated(args: list[str], lists: set[str]) -> list[str]:
    found: list[str] = []
    option = ""
    for n, word in enumerate(args):
        if word == "--":
            return found + args[n:]
        if word.startswith("-"):
            option = word if word in lists else ""
            if not option or n + 1 == len(args) or args[n + 1].startswith("-"):
                found.append(word)  # a flag, or a list option without a value, which the parser refuses
        else:
            found += [option, word] if option else [word]
    return found
