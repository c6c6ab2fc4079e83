"""Selectors by the name of an attention implementation."""

from __future__ import annotations

from collections.abc import Callable

from streamkl.sparse import OracleSelector, RandomSelector, Selector, WindowSelector

PREFIX = "streamkl_"
IMPLEMENTATIONS: dict[str, Callable[[Selector], Selector | None]] = {
    "streamkl_sparse": lambda own: own,
    "streamkl_oracle": lambda own: OracleSelector(own.topk, own.query_block),
    "streamkl_window": lambda own: WindowSelector(own.topk, own.query_block),
    "streamkl_random": lambda own: RandomSelector(own.topk, own.query_block),
    "streamkl_dense": lambda own: None,
}
"""The attention implementations, and the selector of each, given the selector of `sparsify`."""
