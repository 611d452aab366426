"""Every notebook runs from top to bottom in its small setting, and is committed with the outputs of its full one."""

import os
import pathlib

import nbformat
import pytest
from nbclient import NotebookClient

import checkmate_tf

ROOT = pathlib.Path(checkmate_tf.__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

# The kernel's client warns of its own machinery, which is not under test.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning",
                                        "ignore::pytest.PytestUnraisableExceptionWarning")


def parameters(notebook):
    return next(cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ()))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs_in_the_small_setting(path, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.delenv("DISPLAY", raising=False)
    notebook = nbformat.read(path, as_version=4)
    cell = parameters(notebook)
    assert cell.source.startswith("FULL = True")
    cell.source = cell.source.replace("FULL = True", "FULL = False")
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    pictures = sum("image/png" in output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", ()))
    assert pictures > 0 or path.stem.startswith("04")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_committed_with_the_outputs_of_the_full_setting(path):
    notebook = nbformat.read(path, as_version=4)
    assert parameters(notebook).source.startswith("FULL = True")
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in cells) and sum(bool(cell.outputs) for cell in cells) >= len(cells) / 3
    assert not any(output.output_type == "error" for cell in cells for output in cell.outputs)
