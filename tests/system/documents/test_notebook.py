"""docs/tutorial.ipynb runs from top to bottom, with few steps and little text."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

import pytest

from bench.support.paths import ROOT
from tests.support.checkout import PATIENCE_SECONDS, make_checkout

NOTEBOOK = ROOT / "docs" / "tutorial.ipynb"


@pytest.fixture(autouse=True)
def _tools() -> None:
    for name in ("nbclient", "nbformat", "ipykernel"):
        if importlib.util.find_spec(name) is None:
            if os.environ.get("CI"):
                pytest.fail(f"{name} is not installed")
            pytest.skip(f"{name} is not installed")


def test_the_notebook_is_kept_without_results() -> None:
    import nbformat

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("default")  # those of Jupyter's own packages
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat
    from nbclient import NotebookClient

    checkout = make_checkout(tmp_path / "potstill")
    for name, value in (checkout.environment | {"HF_HUB_OFFLINE": "1"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    shortened = 0
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.source, count = re.subn(r"^STEPS = \d+", "STEPS = 6", cell.source, flags=re.M)
            shortened += count
    assert shortened == 1
    client = NotebookClient(
        notebook, timeout=PATIENCE_SECONDS, resources={"metadata": {"path": str(checkout.folder)}}
    )
    client.execute()
    shown = {
        kind
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        for kind in output.get("data", {})
    }
    assert {"image/png", "text/html"} <= shown
