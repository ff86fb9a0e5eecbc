"""Refusals of every method before it changes anything, its roles, what it goes together with, and its arms."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from transformers.distributed import DistributedConfig

import nonlinear_lowrank as nlr
from activation_helpers import fast_path, liger_like, mamba
from attention_helpers import MIXED, big_code, by_head, by_part, cross_attending, grouped_phi3
from model_helpers import ALL, FAMILIES, batch
from nlr_lab.training import Arm
from nonlinear_lowrank import NobleConfig, UserError
from refusals import assert_refused

QUERY, QK_NORM, SINE = nlr.NonlinearQueryConfig(), nlr.QKNormConfig(), nlr.SineLowRankConfig(rank=2)
SHARED, FUSED = NobleConfig(rank=4, share_down="qkv"), NobleConfig(rank=4, fuse_shared_inputs=True)


class Attention(nn.ModuleDict):
    num_heads, head_dim = 4, 8


class Twice(nn.Module):
    """Projects to something beside its queries."""

    def __init__(self):
        super().__init__()
        self.attention = Attention({"q_proj": nn.Linear(32, 64)})


class Unknown(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.attention = nn.ModuleDict({"qkv": nn.Linear(32, width)})


class Unmixed(nn.Module):
    """A fused projection of a class that nobody knows."""

    def __init__(self):
        super().__init__()
        self.attention = nn.ModuleDict({"query_key_value": nn.Linear(32, 96)})


def two_layouts():
    return nn.Sequential(by_part(), grouped_phi3(1, head_dim=16))


def rational(groups=4, **choice):
    return nlr.RationalConfig(groups=groups), choice


def hooked():
    model = FAMILIES["llama"]()
    model.model.layers[1].mlp.act_fn.register_forward_hook(lambda *_: None)
    return model


def of(*modules):
    return lambda: nn.Sequential(*modules)


def patched():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    before = model[0].forward
    model[0].forward = lambda x: 3 * before(x)
    return model


def made_for_inference():
    with torch.inference_mode():
        return nn.Sequential(nn.Linear(4, 4))


def cross_attending_sine():
    model = cross_attending()
    nlr.augment(model, nlr.SineLowRankConfig(rank=4, omega=30), verbose=False)
    return model


# (model, (config, choice), what the error says)
REFUSED = [
    (Unmixed, (QUERY, {}), r"attention.query_key_value mixes rows of q, k and v"),
    (lambda: grouped_phi3(2), (nlr.NonlinearQueryConfig(query_groups=3), {}), r"qkv_proj is 32 -> 64, .* in 3 equal"),
    (lambda: grouped_phi3(2), (nlr.NonlinearQueryConfig(query_width=64), {}), r"not queries of width 64.*exclude="),
    (FAMILIES["opt"], (nlr.NonlinearQueryConfig(query_width=32), {}), "query_width=32 is for projections that hold"),
    (Twice, (QUERY, {}), r"q_proj is twice as wide as 4 heads of 8, and Attention does not say"),
    (two_layouts, (QUERY, {}), r"attn.qkv_proj and 1.model.* hold their queries in different places.*include="),
    (Unknown, (QUERY, {}), r"attention.qkv is 32 -> 48, and ModuleDict does not say"),
    (lambda: Unknown(33), (QUERY, {"include": ".*qkv"}), r"must then be 32 -> 96"),
    (of(nn.Linear(4, 4)), (QUERY, {}), r"nothing to swap.*name the targets with include="),
    (cross_attending, (QUERY, {"include": ".*crossattention.c_attn"}), "holds keys and values only"),
    (FAMILIES["llama"], (QUERY, {"fuse_shared_inputs": True}), "has no layers to compute together"),
    (by_head, (QK_NORM, {}), "nothing to swap"),
    (FAMILIES["opt"], (nlr.QKNormConfig(head_width=5), {}), "do not split into heads of 5"),
    (lambda: nn.ModuleDict({"q_proj": nn.Linear(8, 8)}), (QK_NORM, {}), r"QKNormConfig\(head_width"),
    (by_part, (QK_NORM, {}), "mixes rows of q, k and v"),
    (lambda: big_code(False), (QK_NORM, {}), "mixes rows of q, k and v"),
    (by_head, (QK_NORM, {"include": ".*query_key_value"}), "mixes rows of q, k and v"),
    (MIXED["minimax"], (QK_NORM, {}), "qkv_proj mixes rows of q, k and v"),
    (cross_attending_sine, (QK_NORM, {}), r"crossattention.c_attn holds keys and values only"),
    (FAMILIES["gpt2"], (SHARED, {}), r"a fused one \(c_attn, qkv\) has a single down projection anyway"),
    (FAMILIES["glm"], (SHARED, {"include": r".*mlp\..*"}), "needs separate query, key and value projections"),
    (
        lambda: nn.ModuleDict({"to_q": nn.Linear(32, 32), "to_k": nn.Linear(48, 32)}),
        (SHARED, {}),
        "these read different widths: to_q 32, to_k 48",
    ),
    (FAMILIES["gpt2"], (SHARED, {"budget": "20%"}), "omit share_down"),
    (FAMILIES["gpt2"], (FUSED, {}), "needs separate query, key and value"),
    (liger_like, rational(), r"mlp\.act_fn is bypassed: the forward of LlamaMLP does not call it .*, or leave it out"),
    (fast_path, rational(), "bypassed in inference by nn.TransformerEncoderLayer's fused path; set activation_relu_or"),
    (mamba, rational(), "mixer.act is bypassed: the forward of MambaMixer"),
    (FAMILIES["llama"], rational(7), r"groups=7 do not divide the 48 channels of model\.layers\.0\.mlp"),
    (FAMILIES["glm"], rational(32), "groups=32 do not divide the 48 channels"),  # 96 are gate and value
    (ALL["convnext"], rational(48), "=48 do not divide the 64 channels of .*, or leave it out with"),
    (hooked, rational(), r"layers\.1\.mlp\.act_fn has hooks, parametrizations or"),
    (patched, (nlr.NobleConfig(rank=2), {}), "0 has hooks, parametrizations or a patched forward"),
    (made_for_inference, (nlr.NobleConfig(rank=2), {}), r"0 was made inside torch.inference_mode\(\)"),
    (of(nn.LazyLinear(4)), (nlr.NobleConfig(rank=2), {}), "lazy layers.*; run one batch through it first"),
    (lambda: nn.Linear(4, 4), (nlr.NobleConfig(rank=2), {}), "it is a linear itself; put it into a module"),
    (FAMILIES["llama"], rational(include="typo"), r"'typo' matches no activation's whole name; they are model\."),
    (FAMILIES["llama"], rational(include="mlp|x"), r"whole name; '\.\*\(mlp\|x\)\.\*' does"),
    (FAMILIES["llama"], (nlr.NobleConfig(rank=2), {"exclude": "q_proj"}), r"whole name; '\.\*q_proj' does"),
    (FAMILIES["llama"], rational(include="("), "not a regular expression"),
    (FAMILIES["llama"], rational(exclude=".*act_fn"), r"nothing to swap in this LlamaForCausalLM: .*\(in exclude\)"),
    (FAMILIES["glm"], rational(select=["model"]), "rational replaces activations, and select= is for linears"),
    (FAMILIES["glm"], rational(budget="5%"), "rational replaces activations, and budget= is for linears"),
    (of(nn.Linear(8, 8), nn.Mish()), rational(), r"nothing to swap.*: 1 \(no rational fit for Mish\)"),
    (of(nn.Linear(8, 8), nn.Mish()), rational(include="1"), "no rational fit for Mish"),
    (of(nn.Linear(8, 8)), rational(), "nothing to swap.*: it has no activation modules"),
    (of(nn.Linear(8, 8)), rational(include="a"), "matches no activation's whole name; the model has"),
    (
        of(nn.TransformerEncoderLayer(16, 4, 32)),
        rational(),
        r"0 \(TransformerEncoderLayer holds the function relu as .activation; a function cannot be swapped\)",
    ),
]


@pytest.mark.parametrize(("make", "change", "words"), REFUSED)
def test_refusals_are_one_line_and_change_nothing(make, change, words):
    model, (config, choice) = make(), change
    modules, lazy = list(model.modules()), any(map(is_lazy, model.parameters()))
    state = {} if lazy else copy.deepcopy(model.state_dict())
    assert_refused(words, nlr.augment, model, config, **choice, verbose=False)
    assert all(ours is theirs for ours, theirs in zip(model.modules(), modules, strict=True))
    assert lazy or all(torch.equal(state[key], value) for key, value in model.state_dict().items())


# config: {tensor: (role, whether it decays, whether Muon takes it)}
_BOTH, _NO_DECAY, _DECAY = (True, True), (False, False), (True, False)
ROLES = [
    (SINE, {"sine_up": ("sine.up", *_DECAY), "sine_down": ("sine.down", *_DECAY), "bias": ("vector", *_NO_DECAY)}),
    (
        QUERY,
        {
            "query_down": ("query.down", *_BOTH),
            "query_up": ("query.up", *_BOTH),
            **dict.fromkeys(("query_norm_weight", "query_out_weight", "query_out_bias"), ("query.norm", *_NO_DECAY)),
        },
    ),
    (
        nlr.NonlinearQueryConfig(residual="linear"),
        {"query_weight": ("query.weight", *_BOTH), "query_bias": ("query.norm", *_NO_DECAY)},
    ),
    (QK_NORM, dict.fromkeys(("qk_norm_query", "qk_norm_key"), ("qk-norm", *_NO_DECAY))),
    (
        nlr.RationalConfig(groups=4),
        {f"rational_{side}": (f"rational.{side}", *_NO_DECAY) for side in ("numerator", "denominator")},
    ),
    (
        NobleConfig(rank=4, fusion="gated", up_bias=True),
        {"noble_up_bias": ("noble.up_bias", *_NO_DECAY), "noble_fusion": ("noble.fusion", *_NO_DECAY)},
    ),
]


@pytest.mark.parametrize(("config", "roles"), ROLES, ids=lambda value: getattr(value, "method", ""))
def test_roles_decay_and_optimizers(config, roles):
    model = FAMILIES["opt"]()
    report = nlr.augment(model, config, verbose=False)
    groups = nlr.param_groups(model, lr=1e-3, weight_decay=0.1, muon=True, verbose=False)
    seen = set()
    for group in groups:
        for name, _ in group["params"]:
            place, _, local = name.rpartition(".")
            if place in report.swapped and local in roles:
                found = (group["role"], group["weight_decay"] > 0, group["optimizer"] == "muon")
                assert (group["lr"], found) == (1e-3, roles[local]), name
                seen.add(local)
    assert seen == set(roles)


@pytest.mark.parametrize("first", [QUERY, SINE, QK_NORM], ids=lambda config: config.method)
def test_noble_takes_what_another_method_left(first, tmp_path):
    model = FAMILIES["opt"]().eval()
    swapped = nlr.augment(model, first, include=None if first is not SINE else r".*fc[12]", verbose=False).swapped
    report = nlr.augment(model, NobleConfig(rank=4), verbose=False)
    assert len(report.swapped) == 2 * 6 - len(swapped)
    assert not set(swapped) & set(report.swapped)
    assert {report.skipped[name] for name in swapped} == {f"is {first.method} already"}
    if first is QK_NORM:
        assert report.skipped[f"{swapped[0]}.projection"].endswith("qk-norm, which comes last")
    with pytest.raises(UserError, match=f"augmented with {first.method} already"):
        nlr.augment(model, NobleConfig(rank=4), include=swapped[0].replace(".", r"\."), verbose=False)
    model.save_pretrained(tmp_path)
    inputs = batch(model)
    with torch.no_grad():
        assert torch.equal(nlr.hub.load_model(tmp_path)(**inputs).logits, model(**inputs).logits)


@pytest.mark.parametrize(("config", "splits"), [(QUERY, False), (SINE, False), (NobleConfig(rank=2), True)])
def test_tensor_parallelism_is_refused_before_anything_is_split(config, splits):
    model = FAMILIES["glm"]()
    nlr.augment(model, config, verbose=False)
    assert type(model).maybe_distribute_model(model, None, None) is model
    if splits:
        assert type(model).maybe_distribute_model(model, DistributedConfig(tp_size=2), None) is model
        return
    with pytest.raises(UserError, match=f"layers of {config.method} cannot be split by tensor parallelism"):
        type(model).maybe_distribute_model(model, DistributedConfig(tp_size=2), None)


# arm: (whether it is a control, the field of the layers' configs that it sets, its value)
ARMS = {
    "nonlinear-query:scale=1.0": (False, "kind", "nonlinear"),
    "identity-query": (True, "kind", "identity"),
    "residual-linear-query:rank=8": (True, "kind", "linear"),
    "residual-query": (True, "kind", "full_rank"),
    r"sine-lowrank:rank=2,omega=300.0,include=.*fc[12],init=kaiming_zero": (False, "init", "kaiming_zero"),
    "low-rank:rank=2,exclude=.*attn.*": (True, "activation", "identity"),
    "sigmoid-low-rank:rank=2,exclude=.*attn.*": (True, "activation", "sigmoid"),
    "relu-low-rank:rank=2,exclude=.*attn.*": (True, "activation", "relu"),
}


@pytest.mark.parametrize("text", ARMS)
def test_arms_make_their_layers(text):
    control, field, value = ARMS[text]
    arm = Arm.parse(text)
    assert (str(arm), arm.control, Arm.parse(str(arm))) == (text, control, arm)
    changed = arm.apply(FAMILIES["opt"]()).modules()
    configs = [getattr(each, "sine_config", getattr(each, "query_config", None)) for each in changed]
    found = [getattr(config, field) for config in configs if config is not None]
    assert found == [value] * (2 if field == "kind" else 4)
    if control:
        assert_refused(f"no setting '{field}'", Arm.parse, f"{text.partition(':')[0]}:{field}={value}")
