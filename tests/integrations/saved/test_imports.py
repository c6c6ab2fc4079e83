"""Folders of indexers are read where transformers is older than the integration's, or is not there."""

import pkgutil
import subprocess
import sys

from streamkl.integrations import saved

WITHOUT_TRANSFORMERS = """
import importlib, sys
sys.modules["transformers"] = None  # as if it were not installed
for name in {names!r}:
    importlib.import_module(f"streamkl.integrations.saved.{{name}}")
"""


def test_saved_indexers_are_read_without_transformers() -> None:
    names = [module.name for module in pkgutil.iter_modules(saved.__path__)]
    assert "folder" in names
    subprocess.run([sys.executable, "-c", WITHOUT_TRANSFORMERS.format(names=names)], check=True)
