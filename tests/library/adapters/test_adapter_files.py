"""Saved adapters in fresh processes: every way in, under other names, and without this package."""

import json

import pytest
import torch
from peft import get_peft_model
from safetensors.torch import save_file

from adapter_helpers import FAMILIES, ROWS, batch
from cli_helpers import run_python

WAYS = ("PeftModel", "AutoPeftModel", "AutoModel")

# Run in a new process: argv is the folder, then one of the ways for each adapter in it.
LOAD = """
import json, sys, traceback
from pathlib import Path
import torch
torch.set_num_threads(1)
{imports}
import peft, transformers
from safetensors.torch import load_file

def load(way, folder, auto, name):
    if way == "PeftModel":
        base = getattr(transformers, auto).from_pretrained(folder / "base")
        return peft.PeftModel.from_pretrained(base, folder / "adapter", adapter_name=name)
    if way == "AutoPeftModel":
        return getattr(peft, auto.replace("Auto", "AutoPeft")).from_pretrained(folder / "adapter", adapter_name=name)
    return getattr(transformers, auto).from_pretrained(folder / "adapter")

found = {{}}
for folder in sorted(Path(sys.argv[1]).iterdir()):
    auto = (folder / "auto").read_text()
    expected = load_file(folder / "expected.safetensors")
    for way in sys.argv[2:]:
        try:
            model = load(way, folder, auto, "mine").eval()
            with torch.no_grad():
                logits = model(input_ids=expected["input_ids"]).logits
            found[f"{{folder.name}}/{{way}}"] = "equal" if torch.equal(logits, expected["logits"]) else "different"
        except BaseException as error:
            found[f"{{folder.name}}/{{way}}"] = traceback.format_exception_only(error)[-1].strip()
print("FOUND" + json.dumps(found))
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """One folder a row: its base, its adapter, and what the two together give."""
    root = tmp_path_factory.mktemp("saved")
    for row in ROWS:
        family, folder = FAMILIES[row.family], root / row.name
        row.base().save_pretrained(folder / "base")
        base = family.auto.from_pretrained(folder / "base")
        inputs = batch(base)
        model = get_peft_model(base, row.config()).eval()
        with torch.no_grad():
            save_file({**inputs, "logits": model(**inputs).logits}, folder / "expected.safetensors")
        model.save_pretrained(folder / "adapter")
        (folder / "auto").write_text(family.auto.__name__)
    return root


def load_in_a_new_process(root, imports):
    done = run_python(LOAD.format(imports=imports), root, *WAYS)
    assert "FOUND" in done.stdout, done.stderr
    return json.loads(done.stdout.rpartition("FOUND")[2])


def test_loading_in_every_way_gives_the_same_outputs(saved):
    # peft takes seconds to import: this package waits for the user to do it.
    found = load_in_a_new_process(saved, "import nonlinear_lowrank; assert 'peft' not in sys.modules")
    assert found == {f"{row.name}/{way}": "equal" for row in ROWS for way in WAYS}


def test_loading_without_this_package_names_it(saved):
    found = load_in_a_new_process(saved, "")
    assert len(found) == len(ROWS) * len(WAYS)
    assert {error.split("'NLR_")[0] for error in found.values()} == {"KeyError: "}
