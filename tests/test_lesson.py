"""teach/lesson.ipynb: it runs from top to bottom, and its saved outputs are those of such a run."""

import re
import shutil

import nbformat
import pytest
from nbclient import NotebookClient

from tests.conftest import ROOT

LESSON = ROOT / "teach" / "lesson.ipynb"


def check_numbers(notebook):
    """Outputs are permuted without positions only, and naive.py's logits are the model's; -> the
    runs whose validation loss is printed."""
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", [])]
    text = "".join(out.text for out in outputs if out.get("name") == "stdout")
    of_outputs = dict(re.findall(r"(\w+) +largest difference of the outputs: (\S+)", text))
    assert float(of_outputs["none"]) < 1e-6 and float(of_outputs["abs"]) > 0.1
    of_logits = dict(re.findall(r"(\w+) +largest logit .*, largest difference (\S+)", text))
    assert of_logits.keys() == {"t5", "tupe_r"} and max(map(float, of_logits.values())) < 1e-12
    return re.findall(r"^(\w+) +validation loss \d", text, re.MULTILINE)


@pytest.mark.slow
def test_lesson_runs(tmp_path, corpus_file, monkeypatch):
    """Every cell runs (nbclient raises the first error), in a copy of the project."""
    hidden = shutil.ignore_patterns("out", "cache", ".*", "__pycache__")
    shutil.copytree(ROOT, tmp_path / "project", ignore=hidden)
    monkeypatch.setenv("LESSON_STEPS", "4")
    monkeypatch.setenv("LESSON_DATASET", corpus_file)
    notebook = nbformat.read(LESSON, as_version=4)
    teach = {"metadata": {"path": str(tmp_path / "project" / "teach")}}
    NotebookClient(notebook, timeout=600, resources=teach).execute()
    first, then = ["none", "abs", "tupe_r"], ["mine", "alibi"]
    assert check_numbers(notebook) == [*first, *first, *then]


def test_saved_outputs_are_clean():
    """The notebook is saved as executed in order, without errors, warnings and private paths."""
    notebook = nbformat.read(LESSON, as_version=4)
    check_numbers(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for output in (output for cell in cells for output in cell.outputs):
        assert output.output_type in ("stream", "display_data") and output.get("name") != "stderr"
        assert not re.search(r"/(home|root|tmp|work|Users|content)/", output.get("text", ""))
