"""NoRA and NoRA++ as PEFT methods, beside what every method's matrix (test_adapters.py) covers."""

import copy
import json
import math
from pathlib import Path

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

import model_helpers
from family_helpers import FAMILIES
from nonlinear_lowrank import NoraConfig, UserError, param_groups
from nonlinear_lowrank.methods.rational import RationalActivation, RationalConfig
from nonlinear_lowrank.methods.rational.adapter import lora_to_nora
from nonlinear_lowrank.methods.rational.fit import fit_rational
from nonlinear_lowrank.methods.rational.op import LinearTails
from nonlinear_lowrank.methods.rational.reference import rational_anchored_reference, rational_reference
from nora_helpers import drawn, logits, trained
from rounding_helpers import assert_close_by_norm

forms = pytest.mark.parametrize("form", ["abs_of_sum", "sum_of_abs"])
# google/vit_tiny_patch16_224 with CIFAR-100's head: nora.txt, section 4.1.
VIT_TINY = ViTConfig(
    hidden_size=192, num_hidden_layers=12, num_attention_heads=3, intermediate_size=768, num_labels=100
)


def count(model):
    return sum(value.numel() for value in trained(model).values())


# Counts.


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 2112),  # r=2 and 8 groups are the defaults; nora.txt, Table 6: 2.10K
        ({"r": 1}, 1056),
        ({"r": 3}, 3168),
        ({"groups": 64}, 8 * 2112),
        ({"form": "sum_of_abs"}, 2112),
        ({"numerator_only": True}, 12 * 8 * (5 * 2 + 2)),
        ({"denominator_only": True}, 12 * 8 * (4 * 2 + 2)),
        ({"tuning": "rational"}, 12 * 8 * (6 + 5)),
        ({"tuning": "zero_init"}, 12 * 8 * (6 + 5)),
        ({"tuning": "gelu_init"}, 12 * 8 * (6 + 5)),
        ({"tuning": "rational", "form": "sum_of_abs"}, 12 * 8 * (6 + 4)),
        ({"tuning": "rational", "numerator_only": True}, 12 * 8 * 6),
        ({"tuning": "constants"}, 12 * 8 * 2),
        ({"tuning": "shared", "r": 3}, 12 * 78),  # the released code's
        ({"degrees": (3, 2)}, 12 * 8 * (3 * 2 + 2 + 2 * 2 + 2)),
        ({"lora_r": 8, "lora_target_modules": ["q_proj", "v_proj"]}, 2112 + 12 * 2 * 8 * (192 + 192)),
    ],
    ids=str,
)
def test_trainable_counts_on_vit_tiny(options, expected, capsys):
    with torch.device("meta"):
        base = ViTForImageClassification(VIT_TINY)
    model = get_peft_model(base, NoraConfig(**options))
    report, said = model.base_model.report(), capsys.readouterr().out
    assert count(model) == expected == report.parameters_added
    assert report.parameters_before == sum(each.numel() for each in model.parameters()) - expected
    assert f"NoRA{'++: 36 module' if 'lora_r' in options else ': 12 activation'}s swapped, 0 skipped" in said
    assert f" + {expected:,} (" in said
    degrees = sum(model.peft_config["default"].degrees)
    assert report.flops_added == 12 * 768 * 2 * (degrees + 1)


@pytest.mark.shared_data
def test_the_published_counts_are_the_shared_ones():
    shared = json.loads((Path(__file__).resolve().parents[4] / "shared/facts/parameter_counts.json").read_text())
    assert {name: value for name, value in shared["nora"].items() if name != "note"} == {"vit_tiny_r2_8_groups": 2112}


# The formula.


def mlp(formula=nn.GELU, dtype=torch.float64):
    return nn.Sequential(nn.Linear(6, 24), formula(), nn.Linear(24, 3)).to(dtype)


def adapted_mlp(formula=nn.GELU, dtype=torch.float64, **options):
    model = get_peft_model(mlp(formula, dtype), NoraConfig(**{"groups": 4, "init_weights": False, **options}))
    return model, model.base_model.model[1]


def reference(x, layer, config, factors):
    """nora.txt, equation (8), from the adapter's own factors: theta + A B, without a constant in the shift."""
    fit = next(iter(config.fits.values()))
    # The fit is taken in float32.
    theta = [torch.tensor([fit[side]] * 4, dtype=torch.float32).to(x.dtype) for side in ("numerator", "denominator")]
    shifted = []
    for each, a, b in zip(theta, factors[::2], factors[1::2], strict=True):
        shift = (a @ b[:, :, None]).squeeze(-1)
        shifted.append(each + nn.functional.pad(shift, (each.shape[1] - shift.shape[1], 0)))
    # gelu and silu: slope 0 on the left, 1 on the right
    rest = (config.form, LinearTails(-10.0, 10.0, 0.0, 1.0) if config.tails == "linear" else None)
    if config.anchor == "exact":
        return rational_anchored_reference(x, *shifted, *theta, layer.formula, *rest)
    return rational_reference(x, *shifted, *rest)


def test_an_exact_anchor_costs_a_second_function():
    (_, plain), (_, exact) = adapted_mlp(), adapted_mlp(anchor="exact")
    assert plain.flops("default") == 24 * (2 * 5 + 2 * 4 + 2)
    assert exact.flops("default") == 2 * plain.flops("default")


def test_shifts_are_not_rounded_by_autocast():
    _, layer = adapted_mlp(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = layer.coefficients(["default"])
    assert all(map(torch.equal, found, layer.coefficients(["default"])))


FACTORS = [f"lora_{side}_{factor}" for side in ("numerator", "denominator") for factor in "ab"]


def factors_of(layer, dtype=None):
    found = [getattr(layer, name)["default"].weight.detach() for name in FACTORS]
    return [each.to(dtype or each.dtype).requires_grad_() for each in found]


@forms
@pytest.mark.parametrize("tails", ["linear", "rational"])
@pytest.mark.parametrize("anchor", ["none", "exact"])
@pytest.mark.parametrize("formula", [nn.GELU, nn.SiLU])
def test_values_and_gradients_are_the_papers_in_float64(form, tails, anchor, formula):
    model, layer = adapted_mlp(formula, form=form, tails=tails, anchor=anchor)
    config = model.double().peft_config["default"]
    x = (6 * torch.randn(50, 24, dtype=torch.float64)).requires_grad_()  # some beyond the range of the fit
    assert (x.abs() > 10).any()
    dy = torch.randn(50, 24, dtype=torch.float64)
    factors = factors_of(layer, torch.float64)
    expected = reference(x, layer, config, factors)
    found = layer(x)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    ours = torch.autograd.grad(found, [x, *(getattr(layer, name)["default"].weight for name in FACTORS)], dy)
    theirs = torch.autograd.grad(expected, [x, *factors], dy)
    for our, their in zip(ours, theirs, strict=True):
        assert_close_by_norm(our, their)


def test_a_16_bit_model_keeps_the_coefficients_in_float32():
    model, layer = adapted_mlp(dtype=torch.float32, tuning="rational", anchor="exact", init_weights=True)
    before = {name: value.clone() for name, value in trained(model).items()}
    model.to(torch.bfloat16)
    for name, value in trained(model).items():
        assert value.dtype == torch.float32
        assert torch.equal(value, before[name])
    x = torch.randn(30, 24, dtype=torch.bfloat16)
    assert torch.equal(layer(x), nn.GELU()(x))


def test_a_16_bit_model_has_16_bit_adapters_where_they_are_asked_for():
    model = model_helpers.llama().to(torch.bfloat16)
    adapted = get_peft_model(model, NoraConfig(groups=4), autocast_adapter_dtype=False)
    assert {value.dtype for value in trained(adapted).values()} == {torch.bfloat16}
    assert adapted(torch.tensor([[1, 2, 3]])).logits.dtype == torch.bfloat16


# Starts, and what is trained: Tables 4 and 5.

TUNINGS = {
    # tuning: {tensor: shape} with r=2, 4 groups, degrees (5, 4)
    "low_rank": {
        "numerator_a": (4, 5, 2), "numerator_b": (4, 2), "denominator_a": (4, 4, 2), "denominator_b": (4, 2),
    },
    "shared": {
        "numerator_a": (2, 6), "numerator_b": (4, 2), "denominator_a": (2, 4), "denominator_b": (4, 2),
    },
    "rational": {"numerator": (4, 6), "denominator": (4, 5)},
    "zero_init": {"numerator": (4, 6), "denominator": (4, 5)},
    "gelu_init": {"numerator": (4, 6), "denominator": (4, 5)},
    "constants": {"numerator": (4, 1), "denominator": (4, 1)},
}  # fmt: skip
tunings = pytest.mark.parametrize("tuning", TUNINGS)
SIDES = {
    "both": ({}, {"numerator", "denominator"}),
    "numerator": ({"numerator_only": True}, {"numerator"}),
    "denominator": ({"denominator_only": True}, {"denominator"}),
}
sides = pytest.mark.parametrize("side", SIDES)


@tunings
@sides
def test_what_each_tuning_trains_and_where_it_starts(tuning, side):
    options, tuned = SIDES[side]
    model, layer = adapted_mlp(nn.SiLU, torch.float32, tuning=tuning, init_weights=True, **options)
    expected = {name: shape for name, shape in TUNINGS[tuning].items() if name.split("_")[0] in tuned}
    assert {
        name.split("lora_")[1].removesuffix(".default.weight"): tuple(value.shape)
        for name, value in trained(model).items()
    } == expected
    x = 4 * torch.randn(50, 24)
    plain = RationalActivation(RationalConfig(activation="silu", groups=4))
    if tuning == "gelu_init":
        other = RationalActivation(RationalConfig(activation="gelu", groups=4))
        for name in tuned:
            getattr(plain, f"rational_{name}").data = getattr(other, f"rational_{name}").data
        torch.testing.assert_close(layer(x), plain(x))
        assert not torch.equal(layer(x), nn.SiLU()(x))
    else:
        assert torch.equal(layer(x), plain(x))
        assert (layer(x) - nn.SiLU()(x)).abs().max() <= 2.5e-3  # the fit's error, and a little beyond its range

    # What moves when it is trained: every coefficient that the table names, and no other.
    start = [each.detach().clone() for each in (plain.rational_numerator, plain.rational_denominator)]
    drawn(model)
    if tuning in ("low_rank", "shared"):
        drawn(model)  # B was zero
    merged = model.merge_and_unload()[1]
    assert isinstance(merged, RationalActivation)
    for name, before in zip(("numerator", "denominator"), start, strict=True):
        moved = ((getattr(merged, f"rational_{name}") - before).abs() != 0).all(0).tolist()
        if name not in tuned:
            assert torch.equal(getattr(merged, f"rational_{name}"), before)
        elif tuning == "low_rank" or (tuning, name) == ("shared", "denominator"):
            assert moved == [False, *[True] * (len(moved) - 1)]
        elif tuning == "constants":
            assert moved == [True, *[False] * (len(moved) - 1)]
        else:
            assert all(moved)


def test_all_of_kats_denominator_is_shifted():
    """It has no constant: b1 to b4 are all there is."""
    model, _ = adapted_mlp(dtype=torch.float32, form="sum_of_abs")
    fit = model.peft_config["default"].fits["gelu"]
    merged = model.merge_and_unload()[1]
    moved = merged.rational_denominator - torch.tensor(fit["denominator"])
    assert moved.shape == (4, 4)
    assert (moved != 0).all()


@forms
@pytest.mark.parametrize(("alpha", "scale"), [(None, 2.0), (6.0, 3.0)])
def test_the_released_shift_shares_a_between_groups(form, alpha, scale):
    model, layer = adapted_mlp(dtype=torch.float32, tuning="shared", form=form, shift_alpha=alpha)
    expected = []
    for name, theta in zip(("numerator", "denominator"), layer.theta("default"), strict=True):
        a, b = (getattr(layer, f"lora_{name}_{factor}")["default"].weight for factor in "ab")
        shift = scale * b @ a
        expected.append(theta + nn.functional.pad(shift, (theta.shape[1] - shift.shape[1], 0)))
    merged = model.merge_and_unload()[1]
    torch.testing.assert_close(merged.rational_numerator, expected[0])
    torch.testing.assert_close(merged.rational_denominator, expected[1])


@tunings
def test_learning_rate_roles_and_decay(tuning):
    model, _ = adapted_mlp(dtype=torch.float32, tuning=tuning)
    groups = param_groups(model, lr=1e-3, weight_decay=0.1, verbose=False)
    assert {group["lr"] for group in groups} == {1e-3}
    assert {name for group in groups for name, _ in group["params"]} == trained(model).keys()
    # Coefficients that are trained themselves would decay towards a function that is nothing.
    assert {group["weight_decay"] for group in groups} == {0.0 if tuning in ("rational", "gelu_init") else 0.1}


def without_dropout(model):
    for module in model.modules():
        for name in ("p", "dropout", "attention_dropout", "activation_dropout", "layerdrop"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "vit", "glm"])
def test_an_exact_anchor_starts_bit_equal_in_training_and_evaluation(family, dtype):
    base = model_helpers.FAMILIES[family]().to(dtype)
    without_dropout(base)
    inputs = {
        name: value.to(dtype) if value.is_floating_point() else value
        for name, value in model_helpers.batch(base).items()
    }
    modes = (True, False)
    before = {mode: logits(base.train(mode), inputs) for mode in modes}
    for options in ({}, {"tuning": "rational"}, {"tuning": "constants"}, {"form": "sum_of_abs", "tails": "rational"}):
        model = get_peft_model(copy.deepcopy(base), NoraConfig(groups=4, anchor="exact", **options))
        for mode in modes:
            assert torch.equal(logits(model.train(mode), inputs), before[mode])
        drawn(drawn(model))
        assert not torch.equal(logits(model, inputs), before[False])
    plain = get_peft_model(copy.deepcopy(base), NoraConfig(groups=4)).eval()
    assert not torch.equal(logits(plain, inputs), before[False])


@pytest.mark.parametrize("family", ["t5", "opt", "bart", "swin", "siglip", "wav2vec2", "wav2vec2-bert"])
def test_families_start_equal_disable_and_checkpoint(family):
    base = FAMILIES[family].build()
    inputs = FAMILIES[family].inputs(base)
    with torch.no_grad():
        before = base(**inputs).logits
        model = get_peft_model(copy.deepcopy(base), NoraConfig(groups=4, anchor="exact")).eval()
        assert torch.equal(model(**inputs).logits, before)
        drawn(drawn(model))
        assert not torch.equal(model(**inputs).logits, before)
        with model.disable_adapter():
            assert torch.equal(model(**inputs).logits, before)
    found = []
    without_dropout(model.train())
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.zero_grad()
        model(**inputs).logits.square().mean().backward()
        found.append({name: value.grad.clone() for name, value in trained(model).items()})
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, msg=name)


# Files, and adapters beside each other.


def test_an_adapter_carries_its_fit(tmp_path, monkeypatch):
    """A later version's fits must not change a trained adapter."""
    base = model_helpers.llama().eval()
    inputs = model_helpers.batch(base)
    model = get_peft_model(copy.deepcopy(base), NoraConfig(groups=4, init_weights=False)).eval()
    expected = logits(model, inputs)
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    fit = fit_rational("silu")
    assert saved["fits"] == {
        "silu": {"numerator": list(fit.numerator), "denominator": list(fit.denominator), "error": fit.error}
    }

    def other(*args, **kwargs):
        raise AssertionError("fitted anew")

    monkeypatch.setattr(RationalConfig, "fit", other)
    again = PeftModel.from_pretrained(base, tmp_path).eval()
    assert torch.equal(logits(again, inputs), expected)
    for numerator in (saved["fits"]["silu"]["numerator"][1:], [math.nan] * 6, ["a"] * 6):
        saved["fits"]["silu"]["numerator"] = numerator
        (tmp_path / "adapter_config.json").write_text(json.dumps(saved))
        with pytest.raises(UserError, match=r"fits\['silu'\] is not a fit of degrees \(5, 4\)"):
            peft.PeftConfig.from_pretrained(tmp_path)


def test_lora_becomes_nora_plus_plus_where_it_stands():
    base = model_helpers.llama().eval()
    inputs = model_helpers.batch(base)
    whole = {"modules_to_save": ["norm"], "trainable_token_indices": [1, 2]}
    config = LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "down_proj"], **whole)
    model = drawn(get_peft_model(base, config)).eval()
    expected, factors = logits(model, inputs), trained(model)
    tuned = lora_to_nora(model, groups=4, r=1).eval()
    torch.testing.assert_close(logits(tuned, inputs), expected)
    for name, value in factors.items():
        assert torch.equal(tuned.state_dict()[name], value), name
    assert not torch.equal(logits(drawn(drawn(tuned)), inputs), expected)


def test_trained_biases_of_lora_become_those_of_nora(tmp_path):
    base = model_helpers.gpt2()
    again, inputs = copy.deepcopy(base), model_helpers.batch(base)
    config = LoraConfig(r=3, target_modules=["c_fc"], bias="all", init_lora_weights=False, fan_in_fan_out=True)
    model = get_peft_model(base, config).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            value += 0.1 * name.endswith("bias")
    expected = logits(model, inputs)
    lora_to_nora(model, groups=4).save_pretrained(tmp_path)
    torch.testing.assert_close(logits(PeftModel.from_pretrained(again, tmp_path).eval(), inputs), expected)


def test_lora_stays_where_nora_does_not_fit():
    base = model_helpers.llama().eval()
    inputs = model_helpers.batch(base)
    config = LoraConfig(r=3, target_modules=["q_proj", "down_proj"], modules_to_save=["norm"])
    model = drawn(get_peft_model(base, config)).eval()
    expected, before = logits(model, inputs), {name: value.clone() for name, value in trained(model).items()}
    with pytest.raises(UserError, match="groups=7"):
        lora_to_nora(model, groups=7)
    assert torch.equal(logits(model.eval(), inputs), expected)
    assert trained(model).keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in trained(model).items())
    model.merge_adapter()
    with pytest.raises(UserError, match="a merged adapter is not"):
        lora_to_nora(model, groups=4)
    model.unmerge_adapter()
    model.add_adapter("other", LoraConfig(r=2, target_modules=["v_proj"]))
    with pytest.raises(UserError, match="other would be lost"):
        lora_to_nora(model, groups=4)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"rank_pattern": {"k_proj": 2}}, "rank_pattern"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"init_lora_weights": "OLoRA"}, "init_lora_weights"),
        (None, "NLR_NORA"),
    ],
)
def test_only_plain_lora_becomes_nora_plus_plus(options, word):
    config = (
        NoraConfig(groups=4) if options is None else LoraConfig(r=2, target_modules=["q_proj", "k_proj"], **options)
    )
    with pytest.raises(UserError, match=word):
        lora_to_nora(get_peft_model(model_helpers.llama(), config))


def test_the_report_says_how_good_the_fits_are(capsys):
    model = get_peft_model(model_helpers.vit(), NoraConfig(groups=4, fit_range=3.0))
    said = capsys.readouterr().out
    assert said.strip() == str(model.base_model.report())
    error = fit_rational("gelu", fit_range=3.0).error
    assert error <= 2e-3
    assert f"gelu as degree 5/4, abs_of_sum: max error {error:.1e} on [-3, 3], linear tails, anchor none" in said
    assert "4 groups of 48 channels" in said
    with pytest.raises(UserError, match="there is no adapter 'other'; choose from default"):
        model.base_model.report("other")


def test_the_report_tells_layers_apart(capsys):
    base = type(model_helpers.llama())(
        model_helpers.llama().config.from_dict({**model_helpers.llama().config.to_dict(), "num_hidden_layers": 6})
    )
    get_peft_model(base, NoraConfig(groups=4, layers_to_transform=[0, 1, 2, 4], groups_pattern={r"layers\.1\..*": 8}))
    said = capsys.readouterr().out
    assert "swapped model.layers.0,2,4.mlp.act_fn x 3: silu as" in said
    assert "swapped model.layers.1.mlp.act_fn: silu as" in said
    assert "skipped model.layers.3,5.mlp.act_fn x 2: not asked for" in said
    capsys.readouterr()
    get_peft_model(model_helpers.vit(), NoraConfig(groups=4))
    assert "swapped vit.layers.0-1.mlp.activation_fn x 2: gelu" in capsys.readouterr().out


def test_adapters_of_different_functions_cannot_be_active_together():
    model, layer = adapted_mlp(dtype=torch.float32)
    model.add_adapter("kat", NoraConfig(groups=4, form="sum_of_abs"))
    model.add_adapter("twin", NoraConfig(groups=6, init_weights=False))
    x = torch.randn(5, 24)
    model.base_model.set_adapter(["default", "kat"])
    with pytest.raises(UserError, match="shift different rational functions"):
        layer(x)
    model.base_model.set_adapter(["default", "twin"])  # 4 and 6 groups: 12 of their own
    both = layer(x)
    merged = model.merge_and_unload()[1]
    assert merged.rational_numerator.shape == (12, 6)
    torch.testing.assert_close(merged(x), both)
