"""Activations of real models that NoRA finds, skips by name and refuses."""

import pytest
import torch
import transformers as hf
from peft import get_peft_model
from torch import nn

import model_helpers
from activation_helpers import BERT_MLP, FOUND, IMAGES, SKIPPED, TEXT, fast_path, inputs_of, liger_like, two
from nonlinear_lowrank import NoraConfig, UserError
from nonlinear_lowrank.methods.rational.adapter import NoraActivation


@pytest.mark.parametrize("name", ["convnext", "resnet", "bert", "phi3"])
def test_merged_models_of_every_layout_are_saved_and_loaded(name, tmp_path):
    base = FOUND[name][0]().eval()
    inputs = inputs_of(base)
    model = get_peft_model(base, NoraConfig(groups=4, init_weights=False)).eval()
    with torch.no_grad():
        adapted = model(**inputs).logits
        merged = model.merge_and_unload(safe_merge=True)
        expected = merged(**inputs).logits
        torch.testing.assert_close(expected, adapted, atol=1e-5, rtol=1e-5)
        merged.save_pretrained(tmp_path)
        auto = getattr(hf, {"bert": "AutoModelForMaskedLM", "phi3": "AutoModelForCausalLM"}.get(name, IMAGES))
        assert torch.equal(auto.from_pretrained(tmp_path).eval()(**inputs).logits, expected)


@pytest.mark.parametrize("name", ["bert-head-and-pooler", "distilbert"])  # all: test_rational_augment.py
def test_poolers_and_functions_are_skipped_and_named(name, capsys):
    make, skipped, functional = SKIPPED[name]
    model = get_peft_model(make().eval(), NoraConfig(groups=4))
    said, report = capsys.readouterr().out, model.base_model.report()
    assert str(report) in said
    functions = {where or "the model": f"{why}; a function cannot be swapped" for where, why in functional.items()}
    assert (len(report.swapped), report.skipped) == (2, {**skipped, **functions})
    for where, why in report.skipped.items():
        assert f"skipped {where}: {why}" in said
    for where in skipped:
        assert not isinstance(model.base_model.model.get_submodule(where), NoraActivation)
    model(**inputs_of(model))


def test_a_pooler_is_taken_when_it_is_asked_for():
    base = hf.BertForSequenceClassification(hf.BertConfig(**TEXT))
    model = get_peft_model(base, NoraConfig(groups=4, target_modules=["pooler.activation"]))
    report = model.base_model.report()
    assert report.swapped == ["bert.pooler.activation"]
    assert "tanh as degree 5/4" in report.details["bert.pooler.activation"]
    assert set(report.skipped) == two(BERT_MLP)


def test_targets_by_name_layer_and_exclusion():
    def found(**options):
        model = get_peft_model(model_helpers.llama(), NoraConfig(groups=4, **options))
        return set(model.base_model.report().swapped)

    assert found(target_modules=["act_fn"], layers_to_transform=[1]) == {"model.layers.1.mlp.act_fn"}
    for linears in (["q_proj"], r".*q_proj", "all-linear", None):
        options = {"lora_r": 2, "lora_target_modules": linears, "layers_to_transform": [1]}
        model = get_peft_model(model_helpers.llama(), NoraConfig(groups=4, **options))
        adapted = {name.split(".layers.")[1][0] for name, _ in model.named_parameters() if "lora_" in name}
        assert adapted == {"1"}, linears
    assert found(exclude_modules=r".*layers\.0\..*") == {"model.layers.1.mlp.act_fn"}
    assert found(target_modules=r".*0\.mlp\.act_fn") == {"model.layers.0.mlp.act_fn"}


def test_groups_and_ranks_by_module():
    config = NoraConfig(r=1, groups=4, rank_pattern={r"layers\.1\..*": 3}, groups_pattern={r"layers\.0\..*": 16})
    model = get_peft_model(model_helpers.llama(), config)
    for layer, shape in ((0, (16, 5, 1)), (1, (4, 5, 3))):
        act = model.base_model.model.model.layers[layer].mlp.act_fn
        assert act.lora_numerator_a["default"].weight.shape == shape


def test_an_activation_that_layers_share_is_one_adapter():
    """ALBERT has one layer, which is called as often as the model is deep; here two modules hold one activation."""
    act = nn.GELU()
    base = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), act) for _ in range(2)))
    model = get_peft_model(base, NoraConfig(groups=2, init_weights=False))
    assert model.base_model.model[0][1] is model.base_model.model[1][1]
    assert isinstance(model.base_model.model[0][1], NoraActivation)
    x = torch.randn(3, 8)
    y = model(x)
    merged = model.merge_and_unload()
    assert merged[0][1] is merged[1][1]
    torch.testing.assert_close(merged(x), y)


# Refusals, before anything is changed.


@pytest.mark.parametrize(
    ("make", "options", "word"),
    [
        (liger_like, {}, r"mlp\.act_fn is bypassed: the forward of LlamaMLP does not call it \(a fused MLP\?\)"),
        (model_helpers.llama, {"groups_pattern": {r"layers\.1\..*": 9}}, r"groups=9 do not divide.*layers\.1"),
        (model_helpers.llama, {"target_modules": ["q_proj"]}, "are called act_fn; linears are for lora_target"),
        (model_helpers.llama, {"target_modules": ["act_fn", "q_proj"]}, "q_proj: is a Linear, not an activation"),
        (model_helpers.llama, {"target_modules": ["typo"]}, "'typo'.*the model's activations are called act_fn"),
        (model_helpers.llama, {"groups_pattern": {"typo": 4}}, "groups_pattern has 'typo'"),
        (model_helpers.llama, {"lora_r": 2, "lora_target_modules": ["typo"]}, "lora_target_modules=.*match no module"),
        (lambda: nn.Sequential(nn.Linear(8, 8), nn.Mish()), {"target_modules": ["1"]}, "no rational fit for Mish"),
        (lambda: nn.Sequential(nn.Linear(8, 8)), {}, "has no activation module"),
    ],
)
def test_refusals_change_nothing(make, options, word):
    base = make()
    modules = list(base.modules())
    trained = {name: value.requires_grad for name, value in base.named_parameters()}
    with pytest.raises(UserError, match=word) as caught:
        get_peft_model(base, NoraConfig(**{"groups": 4, **options}))
    assert "\n" not in str(caught.value)
    assert all(ours is theirs for ours, theirs in zip(base.modules(), modules, strict=True))
    assert {name: value.requires_grad for name, value in base.named_parameters()} == trained


def test_the_fixes_that_refusals_name_work():
    layer = fast_path()
    layer[0].activation_relu_or_gelu = 0
    model = get_peft_model(layer, NoraConfig(groups=4, init_weights=False)).eval()
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        adapted = model(x)
        with model.disable_adapter():
            assert not torch.equal(model(x), adapted)
    base = liger_like()
    base.model.layers[1].mlp.__dict__.pop("forward")
    model = get_peft_model(base, NoraConfig(groups=4, exclude_modules=r".*layers\.0\..*"))
    assert model.base_model.report().swapped == ["model.layers.1.mlp.act_fn"]


class Turned(nn.Module):
    def __init__(self, first):
        super().__init__()
        self.fc1, self.act = first, nn.GELU()

    def forward(self, x):
        return self.act(self.fc1(x).transpose(1, 2))


def test_channels_that_only_the_input_tells_are_checked_there():
    model = get_peft_model(Turned(nn.Identity()), NoraConfig(groups=4))
    assert model(torch.randn(2, 8, 3)).shape == (2, 3, 8)
    with pytest.raises(UserError, match="10 channels do not divide into 4 groups"):
        model(torch.randn(2, 10, 3))
    model = get_peft_model(Turned(nn.Linear(4, 8)), NoraConfig(groups=4))
    with pytest.raises(UserError, match=r"has 8 channels, but not in .* its input \(2, 8, 12\).*exclude_modules"):
        model(torch.randn(2, 12, 4))
