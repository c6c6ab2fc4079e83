"""What tests of the command line share: a terminal so wide that no message is wrapped, whatever path it names."""

import pytest


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
