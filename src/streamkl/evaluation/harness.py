"""``streamkl`` as a model of lm-eval: a model of transformers with sparse attention. Needs the ``eval`` extra."""

from __future__ import annotations

import sys
from typing import Any

from lm_eval.__main__ import cli_evaluate  # pyright: ignore[reportMissingImports]  # an extra
from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]  # an extra
from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]  # an extra

from streamkl.evaluation.methods import SELECTORS, Method
from streamkl.integrations.transformers import load_indexers, sparsify

NAME = "streamkl"


@register_model(NAME)
class SparseLM(HFLM):
    """lm-eval's ``hf`` with selected keys; further ``model_args`` are those of ``hf``.

    Args:
        pretrained: A name or a folder.
        selector: ``oracle``, ``window`` or ``random``; if not given, the indexers, or the saved selector of the model.
        topk: How many keys are selected per query block; by default 256 with a selector, else as the indexers were
            saved.
        query_block: How many queries share their top-k; by default 64 with a selector, else as the indexers were saved.
        indexers: A folder of indexers.
        decode: ``sparse`` or ``dense``: how the tokens after a prompt attend; sparse, or as a model was saved.
        kwargs: As ``hf`` takes them.
    """

    def __init__(
        self, pretrained: Any, selector: str | None = None, topk: int | None = None, query_block: int | None = None,
        indexers: str | None = None, decode: Any = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        if str(kwargs.get("batch_size") or 1) != "1":
            raise ValueError(
                f"batch_size must be 1: got {kwargs['batch_size']}; padding would select keys for its query block"
            )
        if selector is not None and selector not in SELECTORS:
            raise ValueError(f"selector must be one of {', '.join(SELECTORS)}: got {selector!r}")
        if selector is not None and indexers is not None:
            raise ValueError("selector and indexers exclude each other: give one of them")
        if selector is None and indexers is None and (topk is not None or query_block is not None):
            raise ValueError("topk and query_block go with a selector or with indexers: give one of them")
        super().__init__(pretrained, **kwargs)  # pyright: ignore[reportCallIssue]  # lm-eval's decorator hides its types
        model: Any = self.model  # pyright: ignore[reportAttributeAccessIssue]
        saved_sparse = getattr(model, "streamkl", None)
        if saved_sparse is None or selector is not None or indexers is not None:
            decode = decode or "sparse"
        if selector is not None:
            sparsify(
                model,
                Method(selector, 256 if topk is None else topk, 64 if query_block is None else query_block).make(),
                decode=decode,
            )
        elif indexers is not None:
            loaded, saved = load_indexers(indexers, model)
            activation = next(iter(loaded.values())).activation  # pyright: ignore[reportAttributeAccessIssue]
            chosen = Method(
                "indexer",
                saved.topk if topk is None else topk,
                saved.query_block if query_block is None else query_block,
            ).make(activation)  # pyright: ignore
            sparsify(model, chosen, loaded, decode=decode)
        elif saved_sparse is None:
            sparsify(model, decode=decode)  # a model with indexers of its own; it raises for others
        elif decode is not None:
            sparsify(model, saved_sparse.selector, saved_sparse.indexers, decode=decode)


def main(arguments: list[str]) -> None:
    """Runs lm-eval's own command line, with ``--model streamkl`` unless a model is named.

    Args:
        arguments: As ``lm-eval`` takes them.
    """
    runs = not arguments or arguments[0] not in ("ls", "validate", "-h", "--help")
    if runs and arguments and not any(word.split("=")[0] in ("--model", "-M") for word in arguments):
        arguments = [*arguments, "--model", NAME]
    sys.argv = ["lm-eval", *arguments]
    cli_evaluate()
