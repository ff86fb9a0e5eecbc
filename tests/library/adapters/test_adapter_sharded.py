"""Adapters under fully_shard, on two gloo processes: trained, saved whole, loaded again sharded and not."""

import re

import pytest
import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

import nonlinear_lowrank as nlr
from adapter_helpers import FAMILIES, ROWS, batch
from processes_helpers import run_processes

pytestmark = pytest.mark.slow

CASES = [(row, dtype) for row in ROWS if row.family == "llama" for dtype in (torch.float32, torch.bfloat16)]

PROCESS = """
import sys, warnings
from pathlib import Path
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
torch.set_num_threads(1)
root = Path(sys.argv[1])
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
import nonlinear_lowrank as nlr
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
import test_adapter_sharded as here

def sharded(folder, adapter, trainable):
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    model = PeftModel.from_pretrained(base, adapter, is_trainable=trainable)
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model

for folder in sorted(path for path in root.iterdir() if path.is_dir()):
    inputs = load_file(folder / "inputs.safetensors")
    model = sharded(folder, folder / "adapter", True)
    here.train(model, inputs)
    if "noble" not in folder.name:
        try:
            model.merge_adapter()
        except nlr.UserError as error:
            assert "sharded" in str(error), error
        else:
            raise AssertionError("merged shards")
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole = get_model_state_dict(model, options=options)
    model.save_pretrained(folder / "trained", state_dict=whole, is_main_process=rank == 0)
    torch.distributed.barrier()
    again = sharded(folder, folder / "trained", False).eval()
    with torch.no_grad():
        logits = again(**inputs).logits
    if rank == 0:
        save_file({"logits": logits}, folder / "logits.safetensors")
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


def train(model, inputs):
    """Three steps; the same in every process, so that averaged gradients are each one's own."""
    model.train()
    optimizer = torch.optim.AdamW(nlr.param_groups(model, lr=1e-2, verbose=False))
    torch.manual_seed(0)  # dropout
    for _ in range(3):
        optimizer.zero_grad()
        model(**inputs, labels=inputs["input_ids"]).loss.backward()
        optimizer.step()


def test_training_sharded_saves_and_loads_as_one_process_does(tmp_path):
    models = {}
    for row, dtype in CASES:
        folder = tmp_path / f"{row.name}-{dtype}".replace("torch.", "")
        row.base().to(dtype).save_pretrained(folder / "base")
        base = FAMILIES[row.family].auto.from_pretrained(folder / "base")
        inputs = batch(base)
        save_file(inputs, folder / "inputs.safetensors")
        model = get_peft_model(base, row.config())
        model.save_pretrained(folder / "adapter")
        models[folder] = model, inputs
    run_processes(PROCESS, tmp_path, timeout=900)
    for folder, (model, inputs) in models.items():
        train(model, inputs)
        saved = load_file(folder / "trained" / "adapter_model.safetensors")
        trained = {name: value for name, value in saved.items() if ".nlr_" in name or ".lora_" in name}
        tolerance = {"atol": 1e-4, "rtol": 1e-3} if "float32" in folder.name else {"atol": 3e-2, "rtol": 0.1}
        ours = {name: value for name, value in model.named_parameters() if value.requires_grad}
        assert len(trained) == len(ours)
        for name, value in ours.items():
            torch.testing.assert_close(trained[re.sub(r"\.default(?=\.|$)", "", name)], value.detach(), **tolerance)
        base = model.unload()
        again = PeftModel.from_pretrained(base, folder / "trained").eval()
        with torch.no_grad():
            expected = again(**inputs).logits
        torch.testing.assert_close(load_file(folder / "logits.safetensors")["logits"], expected, **tolerance)
