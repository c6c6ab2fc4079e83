from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    """The tiny models."""
    spec = importlib.util.spec_from_file_location("tiny", Path(__file__).parent / "tiny.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def llama(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Llama."""
    return tiny.llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def prose(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of text."""
    return tiny.prose(tmp_path_factory.mktemp("prose") / "prose.txt")


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing asks a hub."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
