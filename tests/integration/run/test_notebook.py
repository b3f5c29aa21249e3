"""The example notebook: submit, wait, metrics, samples, logs, delete, on real engines."""

from __future__ import annotations

from pathlib import Path

import nbclient
import nbformat
import pytest

from tests.integration.run.laptop import ROOT, processes_of

pytestmark = pytest.mark.timeout(600)


@pytest.mark.long
def test_the_notebook_runs(tmp_path: Path, example: Path) -> None:
    notebook = nbformat.read(ROOT / "examples/notebook/client.ipynb", as_version=4)
    first = notebook.cells[1]
    assert "STEPS = 60" in first.source
    first.source = first.source.replace("STEPS = 60", "STEPS = 4").replace(
        'Path("../quickstart").resolve()', f"Path({str(example)!r})"
    )
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=300, resources=resources).execute()
    outputs = [
        "".join(str(output) for output in cell.get("outputs", [])) for cell in notebook.cells
    ]
    assert "'Succeeded', 4" in outputs[6]
    assert "rollout/raw_reward" in outputs[7]
    assert "image/png" in outputs[8]
    assert "response" in outputs[9]
    assert "TrainerSucceeded" in outputs[10]
    assert "state='Succeeded'" in outputs[11]
    assert not (tmp_path / "runs/notebook").exists()
    assert processes_of(tmp_path / "runs/notebook") == []
