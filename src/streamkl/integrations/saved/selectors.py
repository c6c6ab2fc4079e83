"""Selectors in JSON."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

from streamkl.integrations.saved.schema import LARGEST, Check, entries, integer, one_of
from streamkl.sparse import IndexerSelector, OracleSelector, RandomSelector, Selector, WindowSelector

KINDS = {"indexer": IndexerSelector, "oracle": OracleSelector, "random": RandomSelector, "window": WindowSelector}
OPTIONS: dict[str, dict[str, Check]] = {
    "indexer": {"activation": one_of("relu", None), "normalise": one_of(None, True, False)},
    "oracle": {"per_kv_head": one_of(True, False)},
    "random": {"seed": integer(-(1 << 63), (1 << 64) - 1)},  # the range of torch's generators
    "window": {"sinks": integer(0, LARGEST)},
}
"""The optional entries of each kind besides ``topk`` and ``query_block``."""


def to_json(selector: Selector) -> dict[str, Any]:
    """A selector's kind and its options.

    Raises:
        ValueError: `from_json` could not read it again.

    Examples:
        >>> from streamkl.integrations.saved.selectors import to_json
        >>> from streamkl.sparse import OracleSelector
        >>> to_json(OracleSelector(topk=256, query_block=64))
        {'kind': 'oracle', 'topk': 256, 'query_block': 64, 'per_kv_head': False}
    """
    for kind, cls in KINDS.items():
        if type(selector) is cls:
            options = {"kind": kind, **dataclasses.asdict(cast(Any, selector))}
            check_selector(options, "the selector")
            return options
    raise ValueError(f"only the selectors of streamkl.sparse can be saved: got {type(selector).__name__}")


def check_selector(value: Any, place: str) -> None:
    """Raises a ``ValueError`` unless a value describes a selector.

    Args:
        value: The value.
        place: Its place, for the message.
    """
    kind = value.get("kind") if isinstance(value, dict) else None
    one_of(*KINDS)(kind, f"kind of {place}")
    size = integer(1, LARGEST)
    required = {"kind": one_of(kind), "topk": size, "query_block": size}
    entries(required, OPTIONS[cast(str, kind)])(value, place)


def from_json(value: dict[str, Any]) -> Selector:
    """The selector that `to_json` described.

    Raises:
        ValueError: The value describes no selector.
    """
    check_selector(value, "the selector")
    return KINDS[value["kind"]](**{name: option for name, option in value.items() if name != "kind"})
