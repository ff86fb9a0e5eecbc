"""Pushing a model to a hub, and loading it from there without this package."""

import json

from cli_helpers import HIDE_THE_PACKAGE, python_prints
from hub_helpers import local_hub
from nonlinear_lowrank.hub.modeling_file import MODELING_FILE

AT_THE_HUB = """
import os, sys
from pathlib import Path
home, address = Path(sys.argv[1]), sys.argv[2]
os.environ |= {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": address, "HF_HOME": str(home), "HF_TOKEN": "hf_x", "NO_PROXY": "*",
               "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_MODULES_CACHE": str(home / "modules")}
import torch
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
torch.manual_seed(0)
tokens = torch.arange(2, 9)[None]
"""
PUSH = """
sys.path.insert(0, sys.argv[3])
import nonlinear_lowrank as nlr
from model_helpers import llama, randomised
model = llama().eval()
nlr.augment(model, nlr.NobleConfig(rank=3), verbose=False)
randomised(model).push_to_hub("model")
print(model(tokens).logits.sum().item())
"""
LOAD = f"""
{HIDE_THE_PACKAGE}
model = AutoModelForCausalLM.from_pretrained("me/model", trust_remote_code=True)
print(model(tokens).logits.sum().item())
model.save_pretrained(home / "again")
"""
WITH_US = """
import nonlinear_lowrank as nlr
for place in ("me/model", home / "again"):
    model = AutoModelForCausalLM.from_pretrained(place)
    assert type(model).__module__ == "nonlinear_lowrank.hub.classes"
    print(model(tokens).logits.sum().item())
"""


def test_pushed_models_load_with_and_without_the_package(tmp_path, request):
    helpers = request.config.rootpath / "tests" / "helpers"
    with local_hub() as (address, files):
        pushed = float(python_prints(AT_THE_HUB + PUSH, tmp_path / "one", address, helpers).split()[-1])
        assert {"config.json", "model.safetensors", MODELING_FILE, "README.md"} <= files.keys()
        loaded = float(python_prints(AT_THE_HUB + LOAD, tmp_path / "two", address).split()[-1])
        assert abs(loaded - pushed) < 1e-4
        names = json.loads((tmp_path / "two" / "again" / "config.json").read_text())["auto_map"]
        assert (tmp_path / "two" / "again" / MODELING_FILE).read_bytes() == files[MODELING_FILE]
        assert {name.partition(".")[0] for name in names.values()} == {MODELING_FILE.removesuffix(".py")}
        ours = python_prints(AT_THE_HUB + WITH_US, tmp_path / "two", address).split()
        assert [float(each) for each in ours] == [pushed, pushed]
