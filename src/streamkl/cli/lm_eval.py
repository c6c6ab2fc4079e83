"""``streamkl lm-eval``: lm-eval with sparse attention registered."""

from __future__ import annotations

import typer

from streamkl.cli.errors import UserError
from streamkl.extras import how_to_install

SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""All arguments, also ``--help``, are passed to lm-eval."""

MODEL_ARGS = """streamkl lm-eval runs lm-eval on a sparse model. Its --model_args, of which the last is hf's own:

  pretrained=FOLDER   a model of transformers: a folder, or a name
  selector=NAME       oracle, window or random; without it the indexers, or the selector that the model was saved with
  indexers=FOLDER     indexers as `streamkl distill` writes them, in place of a selector
  topk=N              how many keys are selected per query block; 256, or as the indexers were saved
  query_block=N       how many queries share their top-k; 64, or as the indexers were saved
  decode=sparse       sparse or dense: how the tokens after a prompt attend
  NAME=VALUE          anything else that lm-eval's model hf takes; batch_size is 1

For example:

  streamkl lm-eval --model_args pretrained=FOLDER,selector=oracle,topk=256,query_block=64 --tasks lambada_openai

All other arguments are lm-eval's:
"""


def lm_eval(context: typer.Context) -> None:
    """Runs lm-eval on a sparse model: --model_args pretrained=FOLDER,selector=oracle,topk=256,query_block=64.

    With indexers=FOLDER in place of a selector, the indexers select. All other arguments are lm-eval's.
    """
    if {"-h", "--help"} & set(context.args):
        typer.echo(MODEL_ARGS)
    try:
        from streamkl.evaluation import harness
    except ImportError as error:
        raise UserError(
            f"this command needs transformers and lm-eval: {how_to_install('hf', 'eval')} ({error})"
        ) from None
    try:
        harness.main(context.args)
    except ValueError as error:
        raise UserError(str(error)) from None
