"""torch's own attention under `augment`: its projections have layers that act, its results and files stay."""

import copy
import itertools
import pickle

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers.modeling_outputs import ModelOutput

import nonlinear_lowrank as nlr
from family_checks import enlarge_branches, train_a_step, without_effect
from nonlinear_lowrank.analysis.cost import model_cost

WIDTH, HEADS, LENGTH, SOURCE, BATCH = 16, 4, 5, 7, 3
NOBLE = nlr.NobleConfig(rank=3, init="pretrained")
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "out_proj"]


class Model(nn.Module):
    def __init__(self, *, dtype=torch.float64, **settings):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, dtype=dtype, **settings)

    def forward(self, *args, **kwargs):
        return self.attention(*args, **kwargs)


def _pair(**settings):
    """Return a plain model and the same with branches that give zero, all tensors drawn."""
    plain = Model(**settings)
    for parameter in plain.parameters():
        nn.init.normal_(parameter, std=0.3)
    augmented = copy.deepcopy(plain)
    return plain, augmented, nlr.augment(augmented, NOBLE, verbose=False)


KINDS = {
    "plain": {},
    "no bias": {"bias": False},
    "batch first": {"batch_first": True},
    "other widths": {"kdim": 9, "vdim": 11},
    "other keys": {"kdim": 9, "bias": False, "batch_first": True},
    "bias of keys": {"add_bias_kv": True},
    "zero key": {"add_zero_attn": True, "batch_first": True},
    "both": {"add_bias_kv": True, "add_zero_attn": True},
}
MASKS = {"": None, "square": (LENGTH, SOURCE), "each head": (BATCH * HEADS, LENGTH, SOURCE)}


def _boolean(shape):
    """Return a mask that leaves the first key to every query."""
    mask = torch.rand(shape) > 0.6
    mask[..., 0] = False
    return mask


def _inputs(settings, *, batched=True):
    widths = (WIDTH, settings.get("kdim", WIDTH), settings.get("vdim", WIDTH))
    lengths = (LENGTH, SOURCE, SOURCE)
    xs = [torch.randn(n, BATCH, width, dtype=torch.float64) for n, width in zip(lengths, widths, strict=True)]
    if settings.get("batch_first"):
        xs = [x.transpose(0, 1).contiguous() for x in xs]
    if not batched:
        xs = [x.select(0 if settings.get("batch_first") else 1, 0) for x in xs]
    return xs


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS)
def test_results_are_torchs(settings, training):
    plain, augmented, report = _pair(**settings)
    assert report.swapped == [f"attention.{name}" for name in PROJECTIONS]
    assert report.skipped == {}
    plain.train(training)
    augmented.train(training)
    options = itertools.product(MASKS.values(), (False, True), (False, True), (False, True), (True, False))
    for shape, padded, floating, weights, average in options:
        masks = {"attn_mask": None if shape is None else _boolean(shape)}
        masks["key_padding_mask"] = _boolean((BATCH, SOURCE)) if padded else None
        if floating:
            masks = {name: None if mask is None else mask.double().mul(-1.5) for name, mask in masks.items()}
        inputs, options = _inputs(settings), {"need_weights": weights, "average_attn_weights": average}
        with torch.set_grad_enabled(training):
            expected, found = (model(*inputs, **masks, **options) for model in (plain, augmented))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS)
def test_results_without_a_batch_are_torchs(settings):
    plain, augmented, _ = _pair(**settings)
    inputs, padding = _inputs(settings, batched=False), _boolean((SOURCE,))
    for mask in (None, _boolean((LENGTH, SOURCE)), _boolean((HEADS, LENGTH, SOURCE))):
        for options in ({}, {"need_weights": False}, {"average_attn_weights": False}):
            masks = {"key_padding_mask": padding, "attn_mask": mask}
            expected, found = (model(*inputs, **masks, **options) for model in (plain, augmented))
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("weights", [False, True])
def test_causal_results_and_gradients_are_torchs(weights, padded):
    plain, augmented, _ = _pair(batch_first=True)
    x = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    options = {"attn_mask": causal, "is_causal": True, "need_weights": weights}
    options["key_padding_mask"] = _boolean((BATCH, LENGTH)) if padded else None
    grads = []
    for model in (plain, augmented):
        own = x.clone().requires_grad_()
        y = model(own, own, own, **options)[0]
        y.square().sum().backward()
        grads.append((y, own.grad))
    torch.testing.assert_close(grads[1], grads[0], rtol=0, atol=1e-11)
    ours = augmented.attention
    packed = torch.cat([getattr(ours, name).weight.grad for name in PROJECTIONS[:3]])
    torch.testing.assert_close(packed, plain.attention.in_proj_weight.grad, rtol=0, atol=1e-11)


def test_bad_inputs_raise():
    _, model, _ = _pair(batch_first=True)
    x = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)
    with pytest.raises(ValueError, match="is_causal needs"):
        model(x, x, x, is_causal=True)
    with pytest.raises(ValueError, match=r"attn_mask must have the shape \(5, 5\)"):
        model(x, x, x, attn_mask=torch.zeros(1, LENGTH, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"key_padding_mask must have the shape \(3, 5\)"):
        model(x, x, x, key_padding_mask=torch.zeros(1, LENGTH, dtype=torch.bool))
    with pytest.raises(ValueError, match="no nested tensors"):
        model(*[torch.nested.as_nested_tensor([*x], layout=torch.jagged)] * 3)


@pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS)
def test_state_of_torchs_attention_loads_under_either_names(settings):
    plain, augmented, _ = _pair(**settings)
    state, before = augmented.state_dict(), plain.state_dict()
    assert state.keys() == dict(augmented.named_parameters()).keys()
    other = Model(**settings)
    nlr.augment(other, NOBLE, verbose=False)
    other.load_state_dict(state)
    inputs = _inputs(settings)
    assert torch.equal(other(*inputs)[0], augmented(*inputs)[0])
    missing = other.load_state_dict(before, strict=False).missing_keys
    assert missing
    assert all("noble_" in name for name in missing)
    for twin in (copy.deepcopy(augmented), pickle.loads(pickle.dumps(augmented))):
        assert torch.equal(twin(*inputs)[0], augmented(*inputs)[0])


class Both(nn.Module):
    """torch's encoder and decoder, under a loss."""

    def __init__(self, norm_first=False, batch_first=True):
        super().__init__()
        self.transformer = nn.Transformer(
            WIDTH, HEADS, 2, 2, 24, 0.0, batch_first=batch_first, norm_first=norm_first, dtype=torch.float64
        )

    def forward(self, x, y, **masks):
        out = self.transformer(x, y, **masks)
        return ModelOutput(loss=(out * torch.linspace(-1, 1, WIDTH)).mean(), out=out)


def _both_inputs():
    x, y = torch.randn(BATCH, LENGTH, WIDTH), torch.randn(BATCH, SOURCE, WIDTH)
    padding = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    padding[0, 3:] = True
    causal = nn.Transformer.generate_square_subsequent_mask(SOURCE).isinf()
    masks = {"src_key_padding_mask": padding, "memory_key_padding_mask": padding, "tgt_mask": causal}
    return {"x": x.double(), "y": y.double(), **masks}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_every_linear_of_torchs_transformer_acts(training, norm_first):
    plain, inputs = Both(norm_first).train(training), _both_inputs()
    model = copy.deepcopy(plain)
    report = nlr.augment(model, NOBLE, verbose=False)
    assert len(report.swapped) == 2 * (4 + 2) + 2 * (4 + 4 + 2)
    assert report.skipped == {}
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs)["out"], plain(**inputs)["out"], rtol=0, atol=1e-10)
    enlarge_branches(model)  # what starts at zero has no gradients before it
    train_a_step(model, torch.optim.AdamW(nlr.param_groups(model, lr=1e-3, verbose=False)), inputs)
    assert without_effect(model.train(training), inputs) == []


def test_only_what_is_chosen_changes():
    model = Both()
    kinds = {name: type(each) for name, each in model.named_modules()}
    with pytest.raises(nlr.UserError, match="rank 99 is too high"):
        nlr.augment(model, nlr.NobleConfig(rank=99), include=r".*q_proj", verbose=False)
    assert {name: type(each) for name, each in model.named_modules()} == kinds
    before = model.transformer.decoder.layers[0].self_attn
    names = nlr.augment(model, NOBLE, include=r".*encoder\.layers\.0\.linear1", verbose=False).swapped
    assert names == ["transformer.encoder.layers.0.linear1"]
    assert model.transformer.decoder.layers[0].self_attn is before
    encoder, inputs = model.transformer.encoder.eval(), {"src": _both_inputs()["x"]}
    with torch.no_grad():
        plain = encoder(**inputs)
        nn.init.normal_(encoder.layers[0].linear1.noble_up)
        assert not torch.equal(encoder(**inputs), plain), "a branch beside torch's attention acts in inference too"


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("score", ["gradient", "activation"])
def test_scores_choose_among_its_projections(score):
    model = Both().eval()
    kinds = [(type(each), each.training) for each in model.modules()]
    scores = nlr.analysis.layer_importance(model, [_both_inputs()], score=score)
    assert len(scores) == 2 * (4 + 2) + 2 * (4 + 4 + 2)
    assert all(scores.values())
    assert [(type(each), each.training) for each in model.modules()] == kinds
    assert model.transformer.encoder.use_nested_tensor
    chosen = nlr.analysis.select_layers(scores, percentile=70)
    assert nlr.augment(model, NOBLE, select=chosen, verbose=False).swapped == chosen


def test_costs_are_those_of_the_linears():
    plain, augmented, report = _pair(batch_first=True)
    x = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)
    branch = 3 * 2 * WIDTH + 9
    assert report.parameters_before == sum(each.numel() for each in plain.parameters())
    assert report.reached_parameters == report.body_parameters == report.parameters_before
    assert report.flops_before == 2 * 4 * WIDTH * WIDTH
    assert report.flops_added == 2 * 4 * branch
    costs = [model_cost(model, LENGTH).flops for model in (plain, augmented)]
    assert costs[1] - costs[0] == report.flops_added
    with FlopCounterMode(display=False) as counter, nlr.branches_disabled(augmented):
        augmented(x, x, x)
    assert counter.get_total_flops() == BATCH * LENGTH * costs[0]


@pytest.mark.parametrize(
    "config",
    [
        nlr.NobleConfig(rank=3, share_down="qkv"),
        nlr.NobleConfig(rank=3, fuse_shared_inputs=True),
        nlr.SineLowRankConfig(rank=3),
        nlr.NonlinearQueryConfig(),
    ],
    ids=lambda config: f"{config.method}{'-shared' * (getattr(config, 'share_down', '') == 'qkv')}",
)
def test_other_methods_and_settings_take_its_projections(config):
    model = Model(dtype=torch.float32, batch_first=True)
    swapped = nlr.augment(model, config, verbose=False).swapped
    assert swapped == [f"attention.{name}" for name in PROJECTIONS[: 1 if "query" in config.method else 4]]
    x = torch.randn(BATCH, LENGTH, WIDTH)
    model(x, x, x)[0].square().sum().backward()
    assert all(each.grad is not None for each in model.parameters())
    other = Model(dtype=torch.float32, batch_first=True)
    nlr.augment(other, config, verbose=False)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(x, x, x)[0], model(x, x, x)[0])


def test_inference_joins_its_products():
    _, model, _ = _pair(batch_first=True)
    enlarge_branches(model.eval())
    x = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        expected = model(x, x, x)
        nlr.optimize_for_inference(model)
        torch.testing.assert_close(model(x, x, x), expected, rtol=0, atol=1e-12)


class Reading(Model):
    def forward(self, x):
        return self.attention(x, x, x)[0] @ self.attention.in_proj_weight[:WIDTH]


def _hooked():
    model = Model()
    model.attention.register_forward_hook(lambda *_: None)
    return model


def _tied():
    model = nn.ModuleList([Model(), Model()])
    model[0].attention.in_proj_weight = model[1].attention.in_proj_weight
    return model


@pytest.mark.parametrize(
    ("make", "why"),
    [(Reading, "takes its in_proj_weight"), (_hooked, "has hooks"), (_tied, "shares tensors with another module")],
)
def test_what_cannot_be_unfused_is_skipped_by_name(make, why):
    model = nn.ModuleDict({"linear": nn.Linear(WIDTH, WIDTH), "other": make()})
    report = nlr.augment(model, NOBLE, verbose=False)
    assert report.swapped == ["linear"]
    found = {name: reason for name, reason in report.skipped.items() if not name.endswith("out_proj")}
    assert found
    assert all(name.endswith("attention") and why in reason for name, reason in found.items())


@pytest.mark.parametrize(
    "config",
    [NOBLE, nlr.SineLowRankConfig(rank=2, omega=30), nlr.NonlinearQueryConfig(), nlr.QKNormConfig()],
    ids=lambda each: each.method,
)
@pytest.mark.parametrize("first", [True, False])
def test_an_encoder_evaluates_what_it_trains(config, first):
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, dropout=0.0, batch_first=True, norm_first=first)
    model, x = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(BATCH, LENGTH, WIDTH)
    nlr.augment(model, config, verbose=False)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x), model.train()(x))
