"""A Markdown extension: references that are made from the help of the command line.

The line ``<!-- commands -->`` becomes every command, ``<!-- settings -->`` the fields of a distillation's settings, and
``<!-- finetune settings -->`` those of the joint stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, fields
from typing import Any

import typer
from markdown import Markdown
from markdown.extensions import Extension
from markdown.preprocessors import Preprocessor

from streamkl.cli import app
from streamkl.distillation.settings import NEEDED, FinetuneSettings, RunSettings, Settings


def reference() -> str:
    """Every command of ``streamkl`` in Markdown: what it does, how it is called, its arguments and options."""
    return "\n".join(_group(typer.main.get_command(app), "streamkl"))


def settings(kind: type[RunSettings] = Settings) -> str:
    """Every field of the settings of a run in Markdown: its type, default and meaning."""
    rows = ["| field | type | default | meaning |", "| --- | --- | --- | --- |"]
    for field in fields(kind):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        shown = "required" if field.name in NEEDED else f"`{default!r}`"
        rows.append(f"| `{field.name}` | `{field.type}` | {shown} | {_prose(field.metadata['help'])} |")
    return "\n".join(rows)


MARKS = {
    "<!-- commands -->": reference,
    "<!-- settings -->": settings,
    "<!-- finetune settings -->": lambda: settings(FinetuneSettings),
}
"""The lines that are replaced, and by what."""


def _group(group: Any, path: str) -> Iterator[str]:
    for name, command in sorted(group.commands.items()):
        if command.hidden:
            continue
        full = f"{path} {name}"
        yield from _command(command, full)
        if hasattr(command, "commands"):
            yield from _group(command, full)


def _command(command: Any, path: str) -> Iterator[str]:
    level = "#" * path.count(" ")
    context = command.make_context(path, [], resilient_parsing=True)
    yield f"#{level} `{path}`\n"
    yield f"{_prose(command.help or '')}\n"
    yield f"```text\n{path} {' '.join(command.collect_usage_pieces(context))}\n```\n"
    shown = [parameter for parameter in command.params if not getattr(parameter, "hidden", False)]
    rows = [row for row in (_row(parameter, context) for parameter in shown) if row]
    if rows:
        yield "| argument or option | default | meaning |\n| --- | --- | --- |"
        yield from rows
        yield ""


def _row(parameter: Any, context: Any) -> str | None:
    if parameter.name == "help":
        return None
    names = [*parameter.opts, *parameter.secondary_opts]
    if parameter.param_type_name == "argument":
        names = [parameter.metavar or parameter.name.upper()]
    default = parameter.get_default(context)
    if callable(default) or default is None or default is False or default in ("", [], ()):
        default = ""
    elif default is True:
        default = f"`{parameter.opts[0]}`"
    else:
        values = default if isinstance(default, (list, tuple)) else [default]
        default = f"`{' '.join(str(getattr(value, 'value', value)) for value in values)}`"
    if getattr(parameter, "required", False):
        default = "required"
    help_text = _prose(getattr(parameter, "help", None) or "").replace("\n", " ").replace("|", "\\|")
    return f"| {', '.join(f'`{name}`' for name in names)} | {default} | {help_text} |"


def _prose(text: str) -> str:
    """Help as Markdown: what a terminal shows as it is must not become emphasis or HTML."""
    parts = text.replace("\f", "").replace("\b", "").split("`")
    escaped = [part if n % 2 else part.replace("*", "\\*").replace("<", "&lt;") for n, part in enumerate(parts)]
    return "`".join(escaped).strip()


class _Commands(Preprocessor):
    def run(self, lines: list[str]) -> list[str]:
        parts = (MARKS[line.strip()]().split("\n") if line.strip() in MARKS else [line] for line in lines)
        return [line for part in parts for line in part]


class Commands(Extension):
    """Expands the marks before anything else reads the page."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802 (the name is Markdown's)
        """Adds the preprocessor."""
        md.preprocessors.register(_Commands(md), "commands", 100)


def makeExtension(**options: Any) -> Commands:  # noqa: N802 (the name is Markdown's)
    """What Markdown calls."""
    return Commands(**options)
