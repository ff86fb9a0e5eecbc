"""NoRA merged, saved and loaded; NoRA++: its LoRA, plain or with a sine."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import model_helpers
from nonlinear_lowrank import NoraConfig, UserError
from nora_helpers import drawn, logits, trained
from rounding_helpers import assert_close_by_norm


def test_a_merged_model_is_a_base_for_another_adapter(tmp_path):
    """Then the rational functions are shifted that are there."""
    base = model_helpers.llama().eval().double()
    inputs = model_helpers.batch(base)
    merged = get_peft_model(base, NoraConfig(groups=4, anchor="exact", init_weights=False)).merge_and_unload()
    before = logits(merged, inputs)
    with pytest.raises(UserError, match="rational with 4 groups already, and groups=6 is no multiple"):
        get_peft_model(merged, NoraConfig(groups=6))
    model = get_peft_model(merged, NoraConfig(groups=8)).eval()
    assert torch.equal(logits(model, inputs), before)
    assert "its own coefficients (silu, abs_of_sum), 8 groups" in str(model.base_model.report())
    adapted = logits(drawn(drawn(model)), inputs)
    assert not torch.equal(adapted, before)
    again = model.merge_and_unload()
    assert_close_by_norm(logits(again, inputs), adapted)
    again.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    for name, value in again.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    assert_close_by_norm(logits(loaded, inputs), logits(again, inputs))
    assert loaded.model.layers[0].mlp.act_fn.rational_config.groups == 8


# NoRA++.


def with_lora(model):
    return [name for name, what in model.base_model.report().details.items() if what == "LoRA"]


def test_the_lora_of_nora_plus_plus_is_pefts():
    base = model_helpers.llama().eval()
    inputs = model_helpers.batch(base)
    ours = get_peft_model(
        copy.deepcopy(base), NoraConfig(groups=4, anchor="exact", lora_r=3, lora_alpha=5.0, lora_dropout=0.2)
    ).eval()
    theirs = get_peft_model(base, LoraConfig(r=3, lora_alpha=5.0, lora_dropout=0.2, init_lora_weights=False)).eval()
    linears = with_lora(ours)
    assert linears == [name for name, module in theirs.base_model.model.named_modules() if hasattr(module, "lora_A")]
    for name in linears:
        mine, other = (model.base_model.model.get_submodule(name) for model in (ours, theirs))
        bound = mine.in_features**-0.5
        assert mine.lora_A["default"].weight.abs().max() <= bound
        assert not mine.lora_B["default"].weight.any()
        mine.lora_A["default"].weight.data = other.lora_A["default"].weight.data.clone()
        mine.lora_B["default"].weight.data = other.lora_B["default"].weight.data.clone()
    expected = logits(theirs, inputs)
    torch.testing.assert_close(logits(ours, inputs), expected, atol=1e-6, rtol=1e-5)
    merged = ours.merge_and_unload()
    pefts = theirs.merge_and_unload()
    for name, value in pefts.state_dict().items():
        torch.testing.assert_close(merged.state_dict()[name], value)


def test_lora_sine_is_a_sine_of_the_weight():
    base = model_helpers.llama().eval().double()
    plain = copy.deepcopy(base)
    inputs = model_helpers.batch(base)
    options = {"lora_r": 3, "lora_sine": True, "lora_omega": 40.0, "lora_target_modules": ["q_proj", "down_proj"]}
    model = get_peft_model(base, NoraConfig(groups=4, anchor="exact", **options)).eval()
    assert torch.equal(logits(model, inputs), logits(plain, inputs))
    drawn(model)
    for name, parameter in trained(model).items():  # the activations stay as they are
        if "_b" in name:
            parameter.data.zero_()
    names = with_lora(model)
    assert len(names) == 4
    for name in names:
        layer = model.base_model.model.get_submodule(name)
        up, down = layer.lora_B["default"].weight, layer.lora_A["default"].weight
        weight = plain.get_submodule(name).weight
        weight.data = weight + torch.sin(40.0 * up @ down) / layer.in_features**0.5
    adapted = logits(model, inputs)
    assert_close_by_norm(adapted, logits(plain, inputs))
    merged = model.merge_and_unload()
    assert torch.equal(logits(merged, inputs), adapted)
    for name in names:
        torch.testing.assert_close(merged.get_submodule(name).weight, plain.get_submodule(name).weight)
