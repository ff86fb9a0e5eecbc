"""Activations of whole models made rational: which, with what function, where the channels are, and what is skipped."""

import copy
import json

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from peft import LoraConfig, get_peft_model
from torch import nn

import model_helpers
import nonlinear_lowrank as nlr
from activation_helpers import BERT_MLP, FOUND, LAYOUTS, SKIPPED, TEXT, inputs_of, two
from nlr_lab.plan.inspect import inspect_model
from nonlinear_lowrank import RationalActivation, RationalConfig, UserError
from nonlinear_lowrank.surgery.augment import after_augment, apply_saved
from refusals import assert_refused


def rational(model):
    """The rational activations of a model by name; a place is a name."""
    modules = model.named_modules(remove_duplicate=False)
    return {name: module for name, module in modules if isinstance(module, RationalActivation)}


def augment(model, *, include=None, exclude=None, **settings):
    config = RationalConfig(**{"groups": 4, **settings})
    return nlr.augment(model, config, include=include, exclude=exclude, verbose=False)


def assert_one_group_moves(layers, run, group=2):
    """Shifting one group's coefficients moves that group's channels of that layer and no others."""
    seen = {}
    for key, layer in layers.items():
        layer.register_forward_hook(lambda _, args, y, key=key: seen.update({key: (args[0], y)}))
        with torch.no_grad():
            layer.rational_numerator[group, 1] += 5.0
    run()
    assert seen.keys() == layers.keys()
    for key, (x, y) in seen.items():
        plain = RationalActivation(layers[key].rational_config)
        moved = (y != plain(x)).movedim(layers[key].rational_config.channel_dim, 0).flatten(1).any(1)
        assert moved.tolist() == [index * 4 // len(moved) == group for index in range(len(moved))], key


@pytest.mark.parametrize("name", FOUND)
def test_every_activation_of_the_body_starts_as_its_own_function(name):
    make, names, width = FOUND[name]
    model = make().eval()
    before = sum(parameter.numel() for parameter in model.parameters())
    inputs, plain = inputs_of(model), copy.deepcopy(model)
    report = augment(model, anchor="exact")
    assert set(report.swapped) == set(rational(model)) == names
    assert report.parameters_added == len(names) * 4 * (6 + 5) == sum(p.numel() for p in model.parameters()) - before
    assert f"rational: {len(names)} activations swapped" in str(report)
    if width:
        assert {layer.rational_config.width for layer in rational(model).values()} == {width}
        assert f"4 groups of {width} channels" in str(report)
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, plain(**inputs).logits)
        assert_one_group_moves(rational(model), lambda: model(**inputs))


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_channels_are_where_the_neighbours_say(name):
    make, shape, dim = LAYOUTS[name]
    model = make().eval()
    report = augment(model)
    (layer,) = rational(model).values()
    assert (layer.rational_config.width, layer.rational_config.channel_dim) == (8, dim)
    assert "4 groups of 8 channels" in str(report)
    inputs = [torch.randn(2, 4, 16)] * 2 if shape is None else [torch.randn(shape)]
    with torch.no_grad():
        assert_one_group_moves({"act": layer}, lambda: model(*inputs))


@pytest.mark.parametrize("name", SKIPPED)
def test_poolers_heads_and_functions_are_skipped_and_named(name, capsys):
    make, skipped, functional = SKIPPED[name]
    model = make().eval()
    report = nlr.augment(model, RationalConfig(groups=4))
    assert capsys.readouterr().out == f"{report}\n"
    assert len(rational(model)) == len(report.swapped) == 2
    functions = {where or "the model": f"{why}; a function cannot be swapped" for where, why in functional.items()}
    assert report.skipped == skipped | functions
    for where, why in report.skipped.items():
        assert f"  skipped {where}: {why}" in str(report)
    model(**inputs_of(model))


def test_a_pooler_is_taken_when_it_is_asked_for():
    model = hf.BertForSequenceClassification(hf.BertConfig(**TEXT))
    report = augment(model, include=r".*pooler\.activation")
    assert list(rational(model)) == ["bert.pooler.activation"]
    assert model.bert.pooler.activation.rational_config.activation == "tanh"
    assert report.skipped == dict.fromkeys(two(BERT_MLP), "not in include")
    with pytest.raises(UserError, match=r"activation's whole name; they are .*bert\.encoder\.layer\.\*\.intermediate"):
        augment(model, exclude="poolr")


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.GELU(approximate="tanh")),
            *(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 4), nn.Mish()),
        )

    def forward(self, x):
        return self.layers(x)


def test_each_kind_is_fitted_by_itself_and_the_saved_entries_rebuild_them():
    entries = []
    after_augment.append(lambda _, entry: entries.append(json.loads(json.dumps(entry))))
    try:
        model = Mixed()
        report = augment(model)
    finally:
        after_augment.pop()
    kinds = {name: layer.rational_config.activation for name, layer in rational(model).items()}
    assert kinds == {"layers.1": "relu", "layers.3": "gelu_tanh", "layers.5": "silu"}
    assert report.skipped == {"layers.7": "no rational fit for Mish"}
    for name, kind in kinds.items():
        assert f"{name}: {kind} as degree 5/4, abs_of_sum: max error" in str(report)
    x = 2 * torch.randn(500, 8)
    for name, function in (("1", F.relu), ("3", lambda x: F.gelu(x, approximate="tanh")), ("5", F.silu)):
        assert (model.layers[int(name)](x) - function(x)).abs().max() < 0.05, name
    assert [entry["config"]["activation"] for entry in entries] == list(kinds.values())
    fresh = Mixed()
    apply_saved(fresh, entries)
    configs, again = ([layer.rational_config for layer in rational(each).values()] for each in (model, fresh))
    assert again == configs
    with torch.no_grad():
        for layer in rational(model).values():
            layer.rational_denominator.add_(0.1 * torch.randn_like(layer.rational_denominator))
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(x), model(x))


def test_one_function_may_be_asked_for_everywhere():
    model, x = Mixed(), torch.randn(300, 8)
    assert "in place of relu" in str(augment(model, activation="gelu"))
    assert (model.layers[1](x) - F.gelu(x)).abs().max() < 0.01


def test_places_that_share_a_module_do_not_share_coefficients():
    act = nn.GELU()
    model = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), act, nn.Linear(8, 16), act) for _ in range(2))
    report = augment(model)
    assert report.swapped == ["0.1", "0.3", "1.1", "1.3"]
    assert len({id(layer) for layer in rational(model).values()}) == 4
    assert [layer.rational_config.width for layer in rational(model).values()] == [8, 16, 8, 16]
    assert sum(parameter.numel() for layer in rational(model).values() for parameter in layer.parameters()) == 4 * 44
    assert model[0][1] is not act


def test_shared_activations_of_a_transformers_model_are_saved_and_loaded(tmp_path):
    model = model_helpers.llama().eval()
    model.model.layers[1].mlp.act_fn = model.model.layers[0].mlp.act_fn
    augment(model)
    with torch.no_grad():
        for layer in rational(model).values():
            layer.rational_numerator.add_(0.1 * torch.randn_like(layer.rational_numerator))
    one, two_ = rational(model).values()
    assert not torch.equal(one.rational_numerator, two_.rational_numerator)
    model.save_pretrained(tmp_path)
    inputs = model_helpers.batch(model)
    with torch.no_grad():
        loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        assert torch.equal(loaded(**inputs).logits, model(**inputs).logits)


def test_a_second_name_that_is_not_called_stays():
    class Aliased(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.activation = nn.Linear(4, 8), nn.GELU()
            self.act = self.activation

        def forward(self, x):
            return self.act(self.linear(x))

    model = Aliased()
    report = augment(model)
    assert report.swapped == ["act"]
    assert report.skipped == {"activation": "another name of act, by which it is not called"}
    model(torch.randn(3, 4)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("family", ["glm", "gpt2", "vit"])
@pytest.mark.parametrize("other", [nlr.NobleConfig(rank=2), nlr.SineLowRankConfig(rank=2, omega=30)])
def test_it_goes_with_methods_of_linears_in_either_order(family, other, tmp_path):
    swapped = []
    for order in ((other, RationalConfig(groups=4)), (RationalConfig(groups=4), other)):
        model = model_helpers.FAMILIES[family]().eval()
        reports = [nlr.augment(model, config, verbose=False) for config in order]
        swapped.append({report.method: report.swapped for report in reports})
        assert not {*reports[0].swapped} & {*reports[1].swapped, *reports[1].skipped}
    assert swapped[0] == swapped[1]
    assert [entry["method"] for entry in model.config.nonlinear_lowrank] == ["rational", other.method]
    inputs = model_helpers.batch(model)
    model.save_pretrained(tmp_path)
    auto = hf.AutoModelForImageClassification if family == "vit" else hf.AutoModelForCausalLM
    with torch.no_grad():
        assert torch.equal(auto.from_pretrained(tmp_path)(**inputs).logits, model(**inputs).logits)


def test_only_branches_can_be_disabled():
    model = model_helpers.glm().eval()
    augment(model)
    assert_refused("no branches to disable", nlr.branches_disabled(model).__enter__)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        before = model(**(inputs := model_helpers.batch(model))).logits
        nlr.augment(model, nlr.NobleConfig(rank=2, init="pretrained"), verbose=False)
        for name, parameter in model.named_parameters():
            if name.endswith("noble_up"):
                parameter.normal_()
        assert not torch.equal(model(**inputs).logits, before)
        with nlr.branches_disabled(model):
            assert torch.equal(model(**inputs).logits, before), "coefficients count as ever"


def test_lora_and_nora_go_on_top_of_it_and_not_it_on_them():
    model = model_helpers.llama()
    augment(model)
    for config in (LoraConfig(r=2, target_modules=["q_proj"]), nlr.NoraConfig(r=1, groups=8, init_weights=False)):
        tuned = get_peft_model(copy.deepcopy(model), config)
        tuned(**model_helpers.batch(model)).logits.sum().backward()
        assert_refused(r"has adapters; augment the model before they go on.*NoraConfig", augment, tuned)


@pytest.mark.parametrize("family", model_helpers.ALL)
def test_costs_are_counted_and_no_more_is_saved_than_by_the_plain_model(family):
    plain, model = model_helpers.ALL[family](), model_helpers.ALL[family]()
    report = augment(model)
    before, after = (inspect_model(each, 9, 2) for each in (plain, model))
    assert after.branch_parameters == report.parameters_added
    assert (after.flops, after.branch_flops) == (before.flops, 0)
    assert after.notes == before.notes
    if family != "opt":  # relu keeps its output, which the next linear keeps anyway
        assert after.kept_bytes <= before.kept_bytes
    rows = {row.name for row in after.rows if row.kind == "RationalActivation"}
    assert rows == set(report.swapped)


def test_the_coefficients_are_where_the_model_is():
    with torch.device("meta"):
        model = model_helpers.opt()
    augment(model)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_second_time_is_refused():
    model = model_helpers.glm()
    augment(model, include=r".*layers\.0\..*")
    augment(model, include=r".*layers\.1\..*", groups=8)
    assert [layer.rational_config.groups for layer in rational(model).values()] == [4, 8]
    assert_refused("is rational already; start from the plain model", augment, model)
