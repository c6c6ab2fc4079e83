"""Tests of the contract: what every engine promises, whatever it is. ``docs/contract.md`` lists them."""

import pytest


@pytest.fixture(autouse=True)
def _hostile_memory(nan_poison: None, small_tiles: None) -> None:
    """Fresh memory is nan, and problems have many tiles."""
