"""From scratch, linears that a model draws in a way of their own keep their draw, and the report names them."""

import re

import pytest
import torch
from torch import nn

import nonlinear_lowrank as nlr
from family_helpers import FAMILIES
from nonlinear_lowrank import NobleConfig, UserError

OWN = {
    "gpt2": r".*\.c_proj\.weight",  # scaled by the depth
    "modernbert": r".*\.Wo\.weight",
    "t5": r".*Attention\.q\.weight",  # attention without a scale
    "xlstm": r".*\.(ogate_preact|out_proj|proj_up_gate|proj_up|proj_down|q|k|v)\.weight",  # gates start at zero
    "siglip": r".*\.mlp\.fc[12]\.bias",
    "wav2vec2": r".*\.feature_projection\.projection\.(weight|bias)",
}
USUAL = ("llama", "glm", "opt", "bert", "vit", "mixtral", "convnext", "hiera")
GPT2 = {"n_layer": 8}  # its residual projections are a quarter of the others


def _drawn(name):
    """Return an augmented model from scratch, the tensors of its linears before, and the report."""
    model = FAMILIES[name].build(**(GPT2 if name == "gpt2" else {}))
    before = {key: value.clone() for key, value in model.named_parameters()}
    torch.manual_seed(3)
    return model, before, nlr.augment(model, NobleConfig(rank=4), verbose=False)


@pytest.mark.parametrize("name", OWN)
def test_tensors_with_an_init_of_their_own_keep_it_and_are_named(name, tmp_path):
    model, before, report = _drawn(name)
    own = report.config.own_init
    assert own
    assert all(re.fullmatch(OWN[name], each) for each in own)
    assert f"init: scratch, except {', '.join(own)}" in str(report)
    patterns = [re.compile(re.escape(each).replace(r"\*", r"\d+")) for each in own]
    for layer in report.swapped:
        for tensor in ("weight", "bias"):
            value, path = getattr(model.get_submodule(layer), tensor), f"{layer}.{tensor}"
            if value is not None and before[path].any():
                stays = any(pattern.fullmatch(path) for pattern in patterns)
                assert torch.equal(value, before[path]) is stays, path


@pytest.mark.parametrize("name", USUAL)
def test_models_with_one_init_have_none_of_their_own(name):
    assert _drawn(name)[2].config.own_init == ()


def test_a_model_drawn_from_a_saved_config_keeps_them_too(tmp_path):
    model, _, _ = _drawn("t5")
    model.save_pretrained(tmp_path)
    family = FAMILIES["t5"]
    config = type(model.config).from_pretrained(tmp_path)
    drawn = family.auto_class.from_config(config)
    stds = {}
    for name, value in drawn.named_parameters():
        if re.search(r"SelfAttention\.[qk]\.dense\.weight", name):
            stds.setdefault(name.split(".")[-3], []).append(value.std().item() * config.d_model**0.5)
    assert torch.tensor(stds["q"]).mean().item() == pytest.approx(config.d_kv**-0.5, rel=0.05)
    assert torch.tensor(stds["k"]).mean().item() == pytest.approx(0.5, rel=0.05)


def test_own_inits_can_be_given_and_trained_weights_have_none():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16))
    first = model[0].weight.clone()
    nlr.augment(model, NobleConfig(rank=2, own_init=("0.weight",)), verbose=False)
    assert torch.equal(model[0].weight, first)
    everything = FAMILIES["t5"].build()
    report = nlr.augment(everything, NobleConfig(rank=4, own_init=()), verbose=False)
    assert "except" not in str(report)
    with pytest.raises(UserError, match="own_init must be a tuple of names, got 'q'"):
        NobleConfig(own_init="q")


def test_zero_gates_of_any_module_stay_and_names_of_none_are_refused():
    def closed(*names):
        model = nn.ModuleDict({"first": nn.Linear(16, 16), "gate": nn.Sequential(nn.SiLU(), nn.Linear(16, 16))})
        nn.init.zeros_(model["gate"][1].weight)
        nlr.augment(model, nlr.NobleConfig(rank=4, own_init=names or None), verbose=False)
        return [name for name in ("first", "gate.1") if not model.get_submodule(name).weight.any()]

    assert closed() == closed("gate.1.weight") == closed("gate.*.weight") == ["gate.1"]
    with pytest.raises(UserError, match=r"own_init has 'gates.weight', which is not the weight or bias"):
        closed("gates.weight")
