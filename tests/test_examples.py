"""The examples run, and settings for peft's method comparison load and train."""

import json
import runpy
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from peft import PeftConfig, get_peft_model

import model_helpers
import nonlinear_lowrank as nlr

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
COMPARISON = EXAMPLES / "peft_method_comparison"
FOLDERS = sorted(path.parent for path in COMPARISON.glob("MetaMathQA/experiments/*/*/adapter_config.json"))
# Wide enough for ranks of 32, with groups of heads as in Llama 3.
LLAMA = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def settings(path):
    """A file's values; None is the same as no value, lists of modules have no order, peft's version is no setting."""
    values = {name: value for name, value in json.loads(path.read_text()).items() if value is not None}
    values.pop("peft_version", None)
    return {
        name: sorted(value) if name.endswith("target_modules") and isinstance(value, list) else value
        for name, value in values.items()
    }


def settings_in(folder):
    return {path.relative_to(folder): settings(path) for path in folder.rglob("*.json")}


def test_the_script_writes_the_committed_settings(tmp_path):
    runpy.run_path(str(COMPARISON / "settings.py"))["write"](tmp_path)
    assert settings_in(tmp_path) == settings_in(COMPARISON), "run examples/peft_method_comparison/settings.py"
    assert len(FOLDERS) == 10


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: f"{folder.parent.name}-{folder.name}")
def test_settings_load_save_equally_and_train_a_llama(folder, tmp_path):
    config = PeftConfig.from_pretrained(str(folder))
    config.save_pretrained(str(tmp_path))
    assert settings(tmp_path / "adapter_config.json") == settings(folder / "adapter_config.json")

    base = model_helpers.build("llama", **LLAMA, **model_helpers.TOKENS).bfloat16()
    model = get_peft_model(base, config)
    training = {"optimizer_kwargs": {"lr": 1e-4, "weight_decay": 0.1}}  # the comparison's defaults
    if (params := folder / "training_params.json").exists():
        changed = json.loads(params.read_text())
        # peft replaces whole fields: a changed one must hold all that the default holds.
        assert {name: {*values} for name, values in changed.items()} == {"optimizer_kwargs": {"lr", "weight_decay"}}
        training |= changed
    optimizer = torch.optim.AdamW(model.parameters(), **training["optimizer_kwargs"])
    inputs = model_helpers.batch(base)
    # NOBLE has a learning-rate table, which peft's script does not know; its tuned settings do without.
    warned = pytest.warns(nlr.LearningRateWarning) if folder.match("noble/*-default") else nullcontext()
    with warned:
        for _ in range(3):  # as the comparison does: clipped steps, and generation in between
            optimizer.zero_grad()
            model.train()(**inputs, labels=inputs["input_ids"]).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            with torch.inference_mode():
                model.eval().generate(input_ids=inputs["input_ids"], max_new_tokens=2, do_sample=False)
    trained = {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}
    assert trained
    assert [name for name, tensor in trained.items() if not tensor.grad.any() or not tensor.isfinite().all()] == []


def test_the_example_trains_saves_loads_and_merges_every_adapter(capsys):
    rows = runpy.run_path(str(EXAMPLES / "switch_adapters.py"))["main"](["--tiny", "--steps", "4"])
    printed = capsys.readouterr().out
    for name, row in rows.items():
        assert f"\n{name:10} {row['trained']:9,} " in printed
        assert row["after"] < row["before"], name
        assert row["loaded"] == 0, name
        assert row["merged"] is None if name == "NOBLE" else row["merged"] < 1e-5, name
    assert [*rows] == ["LoRA", "sine-LoRA", "sine-DoRA", "NOBLE", "NoRA", "NoRA++"]
