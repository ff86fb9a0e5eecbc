"""Default targets of peft's tuners in augmented models."""

import copy

import peft
import pytest
import torch

import nonlinear_lowrank as nlr
from model_helpers import FAMILIES, batch

NOBLE, QK_NORM = nlr.NobleConfig(rank=3), nlr.QKNormConfig()
SOME = {"include": r".*layers\.0\..*"}


def augmented(family, *configs, **choice):
    model = FAMILIES[family]()
    for config in configs:
        nlr.augment(model, config, **choice, verbose=False)
    return model


@pytest.mark.parametrize("adapter", [peft.LoraConfig, peft.LoHaConfig, peft.PeanutConfig, nlr.SineLoraConfig])
@pytest.mark.parametrize(
    ("family", "methods", "choice", "ends"),
    [
        ("llama", [nlr.RationalConfig(groups=4)], {}, {"q_proj", "v_proj"}),
        ("llama", [NOBLE], {}, {"q_proj.dense", "v_proj.dense"}),
        ("llama", [NOBLE, QK_NORM], {}, {"q_proj.projection.dense", "v_proj.dense"}),
        ("llama", [nlr.NonlinearQueryConfig()], {}, {"v_proj"}),
        ("gpt2", [NOBLE], {}, {"c_attn.dense"}),
        ("gpt2", [NOBLE], {"split_fused": True}, {f"c_attn.{name}_proj.dense" for name in "qkv"}),
        (
            "llama",
            [NOBLE],
            SOME,
            {f"model.layers.{layer}.self_attn.{name}" for name in ("q_proj", "v_proj") for layer in ("0", "1")},
        ),
    ],
    ids=["rational", "noble", "around noble", "without queries", "fused", "split", "some layers"],
)
def test_tuners_find_what_they_take_in_the_plain_model(adapter, family, methods, choice, ends):
    if adapter in (peft.LoHaConfig, peft.PeanutConfig) and family == "gpt2":
        pytest.skip("no Conv1D in this tuner")
    model = augmented(family, *methods, **choice)
    if choice:
        ends = {f"{end}.dense" if ".0." in end else end for end in ends}
    config = adapter(r=2, **({"fan_in_fan_out": True} if family == "gpt2" else {}))
    tuned = peft.get_peft_model(model, config)
    assert tuned.peft_config["default"].target_modules == ends
    tuned(**batch(tuned.base_model.model)).logits.sum().backward()
    trained = {name: each.grad for name, each in tuned.named_parameters() if each.requires_grad}
    assert trained
    assert all(gradient is not None and torch.isfinite(gradient).all() for gradient in trained.values())


@pytest.mark.parametrize("method", [{"output_scale": 2.0}, {"fusion": "gated"}], ids=str)
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize(("family", "names"), [("llama", ["q_proj", "up_proj"]), ("gpt2", ["c_attn"])])
def test_our_adapters_merge_behind_a_scale_or_a_gate(family, names, dora, method):
    model = augmented(family, nlr.NobleConfig(rank=3, **method)).eval()
    adapters = [nlr.SineLoraConfig(r=2, target_modules=names, use_dora=dora, init_lora_weights=False)]
    adapters += [nlr.NoraConfig(lora_r=2, lora_target_modules=names, init_weights=False)] if not dora else []
    for adapter in adapters:
        tuned = peft.get_peft_model(copy.deepcopy(model), adapter)
        inputs = batch(tuned.base_model.model)
        expected = tuned(**inputs).logits
        assert not torch.allclose(expected, model(**inputs).logits, atol=1e-3)
        tuned.merge_adapter(safe_merge=True)
        torch.testing.assert_close(tuned(**inputs).logits, expected)


def test_where_nothing_is_left_peft_asks_for_targets():
    model = augmented("llama", nlr.SineLowRankConfig(rank=2, omega=30))
    with pytest.raises(ValueError, match="specify `target_modules`"):
        peft.get_peft_model(model, peft.LoraConfig())


def test_named_targets_and_plain_models_stay():
    named = peft.get_peft_model(augmented("llama", NOBLE), peft.LoraConfig(target_modules=["k_proj.dense"]))
    assert named.peft_config["default"].target_modules == {"k_proj.dense"}
    plain = peft.get_peft_model(FAMILIES["llama"](), peft.LoraConfig())
    assert plain.peft_config["default"].target_modules == {"q_proj", "v_proj"}


@pytest.mark.parametrize("adapter", [peft.LoraConfig, peft.PeanutConfig])
@pytest.mark.parametrize("choice", [{}, SOME], ids=["all layers", "some layers"])
def test_names_are_those_of_the_plain_model(adapter, choice):
    def adapted(*methods):
        model = peft.get_peft_model(augmented("llama", *methods, **choice), adapter(r=2, target_modules=["q_proj"]))
        return {name.removesuffix(".dense") for name in model.base_model.targeted_module_names}

    assert adapted(NOBLE) == adapted() == {f"model.layers.{layer}.self_attn.q_proj" for layer in (0, 1)}
    with pytest.raises(nlr.UserError, match=r"0\.self_attn\.q_proj holds no plain linear .* leave it out"):
        adapted(nlr.NonlinearQueryConfig())


def _targeted(model, config):
    """Each adapted layer by its plain name, with what the tuner made of the config's other fields there."""
    tuned = peft.get_peft_model(model, config)
    found = {}
    for name in tuned.base_model.targeted_module_names:
        layer = tuned.base_model.model.get_submodule(name)
        own = (layer.is_feedforward,) if isinstance(config, peft.IA3Config) else (layer.r, layer.scaling)
        found[name.removesuffix(".dense")] = own
    return found


@pytest.mark.parametrize("choice", [{}, SOME], ids=["all layers", "some layers"])
@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": "all-linear", "exclude_modules": ["q_proj", "down_proj"]},
        {"target_modules": ["q_proj", "v_proj"], "exclude_modules": r".*layers\.1\..*q_proj"},
        {"target_modules": r".*self_attn\.[qk]_proj", "exclude_modules": ["model.layers.0.self_attn.q_proj"]},
        {"rank_pattern": {"q_proj": 3}, "alpha_pattern": {r"layers\.1\..*v_proj": 5, "q_proj": 7}},
        {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [1]},
    ],
    ids=str,
)
@pytest.mark.parametrize("adapter", [peft.LoraConfig, nlr.SineLoraConfig])
def test_whatever_names_a_layer_counts_for_the_linear_inside(adapter, settings, choice):
    def targeted(*methods):
        return _targeted(augmented("llama", *methods, **choice), adapter(r=2, **copy.deepcopy(settings)))

    assert targeted(NOBLE) == targeted() != {}


@pytest.mark.parametrize(
    "settings", [{}, {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}]
)
def test_ia3_scales_the_inputs_of_a_feed_forward(settings):
    found = [_targeted(augmented("llama", *methods), peft.IA3Config(**settings)) for methods in ([NOBLE], [])]
    assert found[0] == found[1]
    assert {own for name, own in found[0].items() if "down_proj" in name} == {(True,)}


def test_names_are_filled_in_once(tmp_path):
    given = {"exclude_modules": r".*\.0\..*", "rank_pattern": {"q_proj": 3}}
    tuned = peft.get_peft_model(augmented("llama", NOBLE), peft.LoraConfig(r=2, target_modules="all-linear", **given))
    tuned.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(augmented("llama", NOBLE), tmp_path)
    for field in given:
        assert getattr(again.peft_config["default"], field) == getattr(tuned.peft_config["default"], field)
    assert set(again.state_dict()) == set(tuned.state_dict())
