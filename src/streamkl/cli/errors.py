"""Errors that a user can fix: one look and one exit code for all commands."""

from __future__ import annotations

import importlib.util

import typer


class UserError(typer.BadParameter):
    """Ends a command as a wrong option does: with the message in a panel on stderr, and exit code 2."""

    def format_message(self) -> str:
        """The message, without click's "Invalid value"."""
        return self.message


def require_vllm() -> None:
    """Ends a command that runs vLLM where there is none."""
    if importlib.util.find_spec("vllm") is None:
        raise UserError("there is no vLLM in this environment: install it as docs/serving.md says")
