"""``streamkl lm-eval``: lm-eval with sparse attention registered."""

from __future__ import annotations

import typer

from streamkl.cli.errors import UserError

SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""All arguments, also ``--help``, are passed to lm-eval."""


def lm_eval(context: typer.Context) -> None:
    """Runs lm-eval on a sparse model: --model_args pretrained=FOLDER,selector=oracle,topk=256,query_block=64.

    With indexers=FOLDER in place of a selector, the indexers select. All other arguments are lm-eval's.
    """
    try:
        from streamkl.evaluation import harness
    except ImportError as error:
        raise UserError(
            f"this command needs transformers and lm-eval: pip install 'streamkl[hf,eval]' ({error})"
        ) from None
    try:
        harness.main(context.args)
    except ValueError as error:
        raise UserError(str(error)) from None
