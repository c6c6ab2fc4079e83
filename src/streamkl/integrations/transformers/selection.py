"""Selectors by the name of an attention implementation, and as the entries of a JSON file."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

from streamkl.sparse import IndexerSelector, OracleSelector, RandomSelector, Selector, WindowSelector

PREFIX = "streamkl_"
IMPLEMENTATIONS: dict[str, Callable[[Selector], Selector | None]] = {
    "streamkl_sparse": lambda own: own,
    "streamkl_oracle": lambda own: OracleSelector(own.topk, own.block),
    "streamkl_window": lambda own: WindowSelector(own.topk, own.block),
    "streamkl_random": lambda own: RandomSelector(own.topk, own.block),
    "streamkl_dense": lambda own: None,
}
"""The attention implementations, and what selects under each, given the selector that a model was made sparse with."""
KINDS = {"indexer": IndexerSelector, "oracle": OracleSelector, "random": RandomSelector, "window": WindowSelector}


def to_json(selector: Selector) -> dict[str, Any]:
    """A selector's kind and its options.

    Example:
        >>> from streamkl.integrations.transformers.selection import to_json
        >>> from streamkl.sparse import OracleSelector
        >>> to_json(OracleSelector(topk=256, block=64))
        {'kind': 'oracle', 'topk': 256, 'block': 64}
    """
    for kind, cls in KINDS.items():
        if type(selector) is cls:
            return {"kind": kind, **dataclasses.asdict(cast(Any, selector))}
    raise ValueError(f"only the selectors of streamkl.sparse can be saved: got {type(selector).__name__}")


def from_json(entries: dict[str, Any]) -> Selector:
    """The selector that `to_json` described."""
    options = dict(entries)
    kind = options.pop("kind", None)
    if kind not in KINDS:
        raise ValueError(f"the kind of a selector must be one of {', '.join(KINDS)}: got {kind!r}")
    return KINDS[kind](**options)
