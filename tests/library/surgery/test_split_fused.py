"""`augment(..., split_fused=True)`: a branch for each part of a fused projection."""

import copy
import re

import pytest
import torch

import nonlinear_lowrank as nlr
from family_checks import branches, enlarge_branches, outputs, realigned, same, train_a_step
from family_helpers import FAMILIES
from nonlinear_lowrank.methods.base import method_of_layer
from nonlinear_lowrank.surgery.split import SplitLinear

RANK = 4
PROJECTIONS = {
    "phi3": {"qkv_proj": ((32, 16, 16), 1), "gate_up_proj": ((48, 48), 1)},
    "glm": {"gate_up_proj": ((48, 48), 1)},
    "gpt2": {"c_attn": ((32, 32, 32), 1)},
    "openai-gpt": {"c_attn": ((32, 32, 32), 1)},
    "gpt_bigcode": {"c_attn": ((32, 16, 16), 1)},
    "gpt_neox": {"query_key_value": ((32, 32, 32), 2)},
    "persimmon": {"query_key_value": ((32, 32, 32), 2)},
    "bloom": {"query_key_value": ((32, 32, 32), 2)},
    "falcon-7b": {"query_key_value": ((32, 16, 16), 1)},
    "falcon-40b": {"query_key_value": ((32, 16, 16), 1)},
    "codegen": {"qkv_proj": ((32, 32, 32), 4)},
    "mpt": {"Wqkv": ((32, 32, 32), 1)},
    "minimax": {"qkv_proj": ((32, 32, 32), 2)},
    "granitemoehybrid": {"input_linear": ((48, 48), 1)},
    "zamba2": {"gate_up_proj": ((48, 48), 1)},
    "modernbert": {"Wqkv": ((32, 32, 32), 1), "Wi": ((48, 48), 1)},
}
"""Widths of the parts of each family's fused projections, and in how many groups they take turns."""
ONE_LAYER = {"phi3": "num_hidden_layers", "gpt2": "n_layer", "gpt_bigcode": "n_layer", "gpt_neox": "num_hidden_layers"}
ONE_LAYER |= {"persimmon": "num_hidden_layers", "bloom": "n_layer", "falcon-7b": "num_hidden_layers"}
ONE_LAYER |= {"falcon-40b": "num_hidden_layers", "codegen": "n_layer", "mpt": "n_layers", "openai-gpt": "n_layer"}
families = pytest.mark.parametrize("family", PROJECTIONS)


def _split(family, *, init="pretrained", **options):
    """The plain model, one with branches beside parts, large where there is an init, and the report."""
    plain = FAMILIES[family].build()
    model = copy.deepcopy(plain)
    report = nlr.augment(model, nlr.NobleConfig(rank=RANK, init=init), split_fused=True, verbose=False, **options)
    return plain, model, report


def _splits(model):
    return {name: each for name, each in model.named_modules() if isinstance(each, SplitLinear)}


@families
def test_each_part_has_a_branch_and_outputs_stay(family):
    plain, model, report = _split(family)
    found = {name.rpartition(".")[2]: (each.parts.widths, each.parts.groups) for name, each in _splits(model).items()}
    assert found == PROJECTIONS[family]
    assert report.details == {}
    parts = [f"{name}.{part}" for name, each in _splits(model).items() for part in each.parts.names]
    assert parts
    assert set(parts) <= set(report.swapped)
    assert "split" not in str(report)
    torch.testing.assert_close(outputs(model, inputs := FAMILIES[family].inputs(model)), outputs(plain, inputs))


@families
def test_parameters_and_flops_are_the_closed_form(family):
    plain, model, report = _split(family, include=rf".*\.({'|'.join(PROJECTIONS[family])})\..*")
    shapes = [each.noble_shape for each in branches(model).values()]
    assert len(shapes) == sum(len(each.parts.names) for each in _splits(model).values())
    products = sum(RANK * (d_in + d_out) + RANK**2 for d_in, d_out in shapes)
    assert report.parameters_added == products + 4 * RANK * len(shapes)
    assert report.flops_added == 2 * products
    assert report.parameters_before == sum(each.numel() for each in plain.parameters())
    for layer in branches(model).values():  # the paper's, by the part's own width
        lr = method_of_layer(layer).roles(layer)["noble_up"].lr
        assert lr == pytest.approx((min(layer.noble_shape) / RANK) ** 0.6)


@families
def test_every_part_trains(family):
    _, model, _ = _split(family, init="scratch")
    optimizer = torch.optim.AdamW(nlr.param_groups(model, lr=1e-3))
    train_a_step(enlarge_branches(model), optimizer, FAMILIES[family].inputs(model))


@families
def test_saved_and_loaded(family, tmp_path):
    _, model, _ = _split(family, init="scratch")
    enlarge_branches(model).save_pretrained(tmp_path)
    loaded = FAMILIES[family].auto_class.from_pretrained(tmp_path)
    assert {name: each.parts for name, each in _splits(loaded).items()} == {
        name: each.parts for name, each in _splits(model).items()
    }
    inputs = FAMILIES[family].inputs(model)
    assert same(outputs(realigned(loaded), inputs), outputs(realigned(model), inputs))
    assert not (tmp_path / "modeling_nonlinear_lowrank.py").exists()
    assert getattr(loaded.config, "auto_map", None) is None


# transformers draws no weights in openai-gpt anew, and those of a FalconLinear unlike an nn.Linear's.
@pytest.mark.parametrize("family", [each for each in PROJECTIONS if not each.startswith(("falcon", "openai"))])
def test_drawn_anew_are_plain_parts_as_the_plain_model_draws_them(family):
    plain, model, _ = _split(family, exclude=r".*\.(k_proj|up_proj)")
    found = []
    for each in (plain, model):
        torch.manual_seed(3)
        found.append(type(each).from_pretrained(None, config=each.config, state_dict={}))
    expected, fresh = found[0].state_dict(), found[1]
    assert all(each.isfinite().all() for each in fresh.parameters())
    for name, each in _splits(fresh).items():
        for part, rows in zip(each.parts.names, each.rows("weight", expected[f"{name}.weight"]), strict=True):
            assert torch.equal(each.get_submodule(part).weight, rows), part


@families
def test_a_plain_checkpoint_loads(family):
    plain, model, _ = _split(family)
    with torch.no_grad():
        for each in model.parameters():
            each.zero_()
    missing, extra = model.load_state_dict(plain.state_dict(), strict=False)
    assert extra == []
    assert all(".noble_" in name for name in missing)
    torch.testing.assert_close(outputs(model, inputs := FAMILIES[family].inputs(model)), outputs(plain, inputs))


@pytest.mark.parametrize("together", [False, True], ids=["apart", "together"])
@pytest.mark.parametrize("fused", ["phi3", "glm"])
def test_results_are_those_of_separate_linears(fused, together):
    """Phi-3 is Llama with fused projections, and so is GLM but for its rotary embedding."""
    _, model, _ = _split(fused, fuse_shared_inputs=together)
    model = enlarge_branches(model).double()
    if fused == "glm":
        mlp = next(each for name, each in model.named_modules() if name.endswith("mlp"))
        gate_up, x = mlp.gate_up_proj, torch.randn(3, 32, dtype=torch.float64)
        expected = mlp.down_proj(gate_up.up_proj(x) * mlp.activation_fn(gate_up.gate_proj(x)))
        torch.testing.assert_close(mlp(x), expected, rtol=0, atol=1e-12)
        return
    separate = FAMILIES["llama"].build(rms_norm_eps=model.config.rms_norm_eps)
    nlr.augment(separate, nlr.NobleConfig(rank=RANK), verbose=False)
    separate.double()
    tensors = model.state_dict()
    renamed = {re.sub(r"(qkv|gate_up)_proj\.", "", name): each for name, each in tensors.items()}
    # Both classes keep the dense part's tensors under names of their own in memory.
    separate.load_state_dict(renamed)
    inputs = FAMILIES["llama"].inputs(model)
    torch.testing.assert_close(outputs(model, inputs), outputs(separate, inputs), rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", ONE_LAYER)
def test_parts_are_what_their_names_say(family):
    """A query acts on its own position, keys and values on later ones too, and values alone linearly."""
    model = FAMILIES[family].build(**{ONE_LAYER[family]: 1})
    nlr.augment(model, nlr.NobleConfig(rank=RANK), split_fused=True, verbose=False)
    model.double()
    split = next(each for each in _splits(model).values() if "q_proj" in each.parts.names)
    inputs = {"input_ids": FAMILIES[family].inputs(model)["input_ids"]}
    before = outputs(model, inputs)[0]

    def changed(name, change):
        """Positions at which the output is another when a part's output is."""
        handle = split.get_submodule(name).register_forward_hook(lambda module, args, output: change(output.clone()))
        after = outputs(model, inputs)[0]
        handle.remove()
        return (after - before).abs().amax((0, 2)) > 1e-9

    def at_five(output):
        output[:, 5] += torch.linspace(-2, 2, output.shape[-1], dtype=output.dtype)
        return output

    places = torch.arange(before.shape[1])
    assert torch.equal(changed("q_proj", at_five), places == 5)
    assert torch.equal(changed("k_proj", at_five), places >= 5)
    assert torch.equal(changed("v_proj", at_five), places >= 5)
    # The first position sees itself alone: only its value counts.
    assert not changed("k_proj", lambda y: 3 * y)[0]
    assert changed("v_proj", lambda y: 3 * y)[0]
