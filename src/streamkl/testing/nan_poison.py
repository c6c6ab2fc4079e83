"""A pytest plugin: new memory is filled with nan, so that reading an unwritten element fails a test.

Turn it on with ``-p streamkl.testing.nan_poison``, or ``pytest_plugins = ["streamkl.testing.nan_poison"]`` in a
top-level conftest, and ask for the fixture ``nan_poison`` in tests that should run under it. It uses PyTorch's own
switch, which reaches every ``torch.empty`` from Python and C++ alike; that needs deterministic algorithms to be on,
with warnings instead of errors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

deterministic: Any = torch.utils.deterministic  # a module whose switch is a property, which type checkers do not see


@pytest.fixture
def nan_poison() -> Iterator[None]:
    """Fills what ``torch.empty`` and its relatives return with nan (integers with their largest value)."""
    mode = torch.get_deterministic_debug_mode()
    fill = deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic.fill_uninitialized_memory = True
    yield
    deterministic.fill_uninitialized_memory = fill
    torch.set_deterministic_debug_mode(mode)
