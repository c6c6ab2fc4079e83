"""The page of supported models, made by trying a tiny model of each type: ``python docs/tools/models.py``.

It takes about a minute of one core, and writes ``docs/supported-models.md``.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

import streamkl.integrations.transformers as skl
from streamkl.distillation.model import Distiller
from streamkl.integrations.transformers.families import GroupedQuery, family_of
from streamkl.integrations.transformers.indexers import Indexers, own_indexers
from streamkl.sparse import IndexerSelector, OracleSelector
from streamkl.testing.causal_models import VOCAB, model_types, tiny_causal_model

PAGE = Path(__file__).parents[1] / "supported-models.md"
HEAD = """\
# Supported models

<!-- made by docs/tools/models.py; do not edit -->

Every model type of `AutoModelForCausalLM` in transformers {version}, tried on a tiny random model.
{passed} of {all} can be made sparse by [`sparsify`](transformers.md). With all keys selected, also for single queries,
`generate` then writes the tokens that it writes under the model's own attention.

The family `structural` takes models without a family file ([how](transformers.md#other-families)). Layers with a window
stay dense in all of them.

## Sparse

Indexers: `generate` writes the same by indexers with all keys selected, the model's own or new ones, and
[`streamkl distill`](distillation.md) trains them.

| model type | family | indexers | note |
| --- | --- | --- | --- |
"""
REFUSED = """
## Refused

| model type | reason |
| --- | --- |
"""
PROMPT, WRITTEN, BLOCK = 24, 6, 8
"""Tokens of the prompt, tokens that are generated, and queries of a query block."""
WINDOWED = "attends to all keys"
"""In the message that refuses a model each of whose layers has a window."""


class Outcome(NamedTuple):
    """What became of one model type.

    Attributes:
        model_type: Of its config.
        family: The name of its family.
        sparse: Whether ``generate`` writes, with all keys selected, what it writes densely.
        indexers: Whether it does so by indexers, and a step of distillation trains them.
        note: Why it does not, or under which condition.
    """

    model_type: str
    family: str
    sparse: bool
    indexers: bool
    note: str


def try_type(model_type: str) -> Outcome:
    """Makes a tiny model of a type sparse with all keys, and compares what it writes with what it writes densely.

    Args:
        model_type: One of `streamkl.testing.causal_models.model_types`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own
        return _try(model_type)


def _try(model_type: str) -> Outcome:
    try:
        model, note = tiny_causal_model(model_type), ""
    except Exception as error:  # of any kind: transformers' own configs and packages that are not installed
        return Outcome(model_type, "", False, False, f"not tried, since no tiny model can be made: {_short(error)}")
    oracle, family = OracleSelector(PROMPT + WRITTEN, BLOCK), ""
    try:
        family = family_of(model.config).name
        try:
            skl.sparsify(model, oracle, decode="sparse")
        except ValueError as error:
            if WINDOWED not in str(error):
                raise
            model, note = tiny_causal_model(model_type, sliding_window=None), "with `sliding_window=None`"
            skl.sparsify(model, oracle, decode="sparse")
    except ValueError as error:
        return Outcome(model_type, family, False, False, _reason(error))
    sparse = _written(model)
    model.streamkl.remove()
    dense = _written(model)
    if not torch.equal(sparse, dense):
        return Outcome(model_type, family, False, False, "generate writes other tokens")
    try:
        _check_indexers(model, dense)
    except ValueError as error:
        return Outcome(model_type, family, True, False, "; ".join(filter(None, (note, _reason(error)))))
    return Outcome(model_type, family, True, True, note)


def _check_indexers(model: Any, dense: torch.Tensor) -> None:
    """Raises a ``ValueError`` unless indexers select all keys in ``generate``, and learn. The model is of no use then.

    Args:
        model: Not sparse.
        dense: What it writes.
    """
    torch.manual_seed(0)
    family = family_of(model.config)
    new = skl.new_indexers(model, head_dim=4) if isinstance(family, GroupedQuery) else None
    block, activation = (1, None) if family.selects_late else (BLOCK, "relu")  # MiniMax-M3: per query, without a ReLU
    selector = IndexerSelector(PROMPT + WRITTEN, block, activation)
    skl.sparsify(model, selector, new, decode="sparse")
    if not torch.equal(_written(model), dense):
        raise ValueError("indexers write other tokens")
    model.streamkl.remove()
    indexers: Indexers = own_indexers(model, family) if new is None else new
    Distiller(model, family, indexers)(_prompt(), backward=torch.Tensor.backward)
    if any(p.grad is None or not p.grad.isfinite().all() for p in indexers.parameters()):
        raise ValueError("a step of distillation gives no gradients")


def _prompt() -> torch.Tensor:
    """Random tokens, none of them special."""
    return torch.randint(1, VOCAB - 16, (2, PROMPT), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def _written(model: Any) -> torch.Tensor:
    ids = _prompt()
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=WRITTEN, min_new_tokens=WRITTEN, do_sample=False
    )


def _reason(error: Exception) -> str:
    """The part of a refusal that says why."""
    said = str(error).split("standard decoder: ")[-1].split("; register_family")[0]
    return " ".join(said.split())


def _short(error: Exception) -> str:
    """The first sentence of an error."""
    return " ".join(str(error).split()).split(". ")[0].rstrip(".")


def row(outcome: Outcome) -> str:
    """The row of a model type, in the table that it belongs to."""
    kind, note = f"`{outcome.model_type}`", outcome.note
    if outcome.sparse:
        return f"| {kind} | `{outcome.family}` | {'yes' if outcome.indexers else 'no'} | {note} |"
    return f"| {kind} | {note} |"


def page(outcomes: Sequence[Outcome], version: str) -> str:
    """The whole page.

    Args:
        outcomes: Of all model types.
        version: Of transformers.
    """
    passed, refused = [o for o in outcomes if o.sparse], [o for o in outcomes if not o.sparse]
    head = HEAD.format(version=version, passed=len(passed), all=len(outcomes))
    return head + "\n".join(map(row, passed)) + "\n" + REFUSED + "\n".join(map(row, refused)) + "\n"


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    outcomes = [try_type(model_type) for model_type in model_types()]
    PAGE.write_text(page(outcomes, transformers.__version__), encoding="utf-8")
