"""Nonlinear queries: the formula, fused projections, head layouts, counts."""

import copy

import pytest
import torch
from torch import nn
from transformers import OPTConfig, OPTForCausalLM

import nonlinear_lowrank as nlr
from attention_helpers import big_code, cross_attending, grouped_llama, grouped_phi3
from model_helpers import FAMILIES, batch, randomised
from nonlinear_lowrank import NonlinearQKV, NonlinearQuery, NonlinearQueryConfig
from nonlinear_lowrank.analysis.cost import model_cost

QUERIES = {"llama": "q_proj", "glm": "q_proj", "gpt2": "c_attn", "opt": "q_proj", "eurobert": "q_proj", "vit": "q_proj"}


def written_out(layer, x):
    """The document's formula, in float64."""
    x, p = x.double(), {name: parameter.double() for name, parameter in layer.named_parameters()}
    if layer.query_config.kind == "identity":
        return x
    normed = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * p["query_norm_weight"]
    hidden = normed @ p["query_down"].T
    if layer.query_config.kind == "nonlinear":
        hidden = hidden * 0.5 * (1 + torch.erf(hidden / 2**0.5))
    mapped = hidden @ p["query_up"].T
    centred = mapped - mapped.mean(-1, keepdim=True)
    normal = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return layer.query_config.scale * (x + normal * p["query_out_weight"] + p["query_out_bias"])


@pytest.mark.parametrize(
    ("kind", "scale"), [*((kind, scale) for kind in ("nonlinear", "linear") for scale in (0.5, 1.0)), ("identity", 0.5)]
)
def test_the_formula_written_out(kind, scale):
    layer = NonlinearQuery(24, config=NonlinearQueryConfig(kind=kind, scale=scale), dtype=torch.float64)
    randomised(layer, 0.5)
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    torch.testing.assert_close(layer(x), written_out(layer, x))


def test_it_starts_as_the_table_says():
    layer = NonlinearQuery(600, config=NonlinearQueryConfig())
    assert [tuple(p.shape) for p in layer.parameters()] == [(600,), (300, 600), (600, 300), (600,), (600,)]
    for matrix in (layer.query_down, layer.query_up):
        assert matrix.std().item() == pytest.approx(0.02, rel=0.03)
    for norm, value in ((layer.query_norm_weight, 1), (layer.query_out_weight, 1), (layer.query_out_bias, 0)):
        assert torch.equal(norm, torch.full((600,), float(value)))
    assert NonlinearQuery(600, config=NonlinearQueryConfig(init_std=0.5)).query_up.std() > 0.4


@pytest.mark.parametrize("kind", ["nonlinear", "linear", "identity"])
@pytest.mark.parametrize("bias", [True, False])
def test_a_fused_projection_keeps_keys_and_values(kind, bias):
    model = nn.ModuleDict({"qkv": nn.Linear(24, 72, bias=bias)})
    plain = copy.deepcopy(model["qkv"])
    nlr.augment(model, NonlinearQueryConfig(kind=kind), verbose=False)
    layer = model["qkv"]
    assert isinstance(layer, NonlinearQKV)
    x = torch.randn(3, 24)
    y, before = layer(x), plain(x)
    torch.testing.assert_close(y[:, 24:], before[:, 24:])
    torch.testing.assert_close(y[:, :24], written_out(layer, x).float())
    layer.reset_parameters()  # the second draw is a whole one
    assert not torch.equal(layer(x)[:, 24:], y[:, 24:])
    assert layer(x).isfinite().all()


@pytest.mark.parametrize("family", QUERIES)
def test_the_query_takes_the_projections_place_in_every_family(family):
    """Two models that differ in their queries alone: one with Q(x) = x, one whose linear query is the identity."""
    torch.manual_seed(3)
    plain = FAMILIES[family]().eval()
    ours = copy.deepcopy(plain)
    report = nlr.augment(ours, NonlinearQueryConfig(kind="identity"), verbose=False)
    assert len(report.swapped) == 2
    assert all(name.endswith(QUERIES[family]) for name in report.swapped)
    with torch.no_grad():
        for name in report.swapped:
            module = plain.get_submodule(name)
            rows = module.weight.t() if family == "gpt2" else module.weight
            rows[:32] = torch.eye(32)
            if module.bias is not None:
                module.bias[:32] = 0
        inputs = batch(plain)
        torch.testing.assert_close(ours(**inputs).logits, plain(**inputs).logits)
        other = copy.deepcopy(plain)
        nlr.augment(other, NonlinearQueryConfig(), verbose=False)
        assert not torch.allclose(other(**inputs).logits, plain(**inputs).logits, atol=1e-5)


@pytest.mark.parametrize("family", QUERIES)
def test_parameters_and_flops_stay_but_for_norms(family):
    model = FAMILIES[family]()
    biased = family in ("gpt2", "opt", "vit")
    report = nlr.augment(model, NonlinearQueryConfig(), verbose=False)
    assert report.parameters_added == 2 * (3 * 32 - (32 if biased else 0))
    assert report.flops_added == 0
    cost = model_cost(model, 9)
    assert cost.branch_parameters == report.parameters_added
    identity = nlr.augment(FAMILIES[family](), NonlinearQueryConfig(kind="identity"), verbose=False)
    assert identity.flops_added == -2 * 2 * 32 * 32
    assert identity.parameters_added == -2 * (32 * 32 + (32 if biased else 0))


def test_published_counts_of_gpt3_small():
    """shared/facts/parameter_counts.json, nonlinear_query."""
    config = OPTConfig(
        vocab_size=50257, enable_bias=False, activation_function="gelu", dropout=0.0, max_position_embeddings=1024
    )

    def outside_embeddings(model):
        return sum(p.numel() for name, p in model.named_parameters() if "embed" not in name)

    with torch.device("meta"):
        model = OPTForCausalLM(config)
    assert outside_embeddings(model) == 84_973_056
    nlr.augment(model, NonlinearQueryConfig(), verbose=False)
    assert outside_embeddings(model) == 85_000_704
    assert all(parameter.is_meta for parameter in model.parameters())


def test_grouped_and_multi_query_attention():
    for heads in (1, 2):
        model = grouped_llama(heads)
        assert len(nlr.augment(model, NonlinearQueryConfig(), verbose=False).swapped) == 2
        assert model(**batch(model)).logits.isfinite().all()
    fused = grouped_phi3()
    plain = copy.deepcopy(fused)
    nlr.augment(fused, NonlinearQueryConfig(), verbose=False)
    layer = fused.model.layers[0].self_attn.qkv_proj
    assert isinstance(layer, NonlinearQKV)
    assert torch.equal(layer.weight, plain.model.layers[0].self_attn.qkv_proj.weight[32:])
    assert fused(**batch(fused)).logits.isfinite().all()
    shared = big_code(True)
    assert nlr.augment(shared, NonlinearQueryConfig(), verbose=False).swapped == ["transformer.h.0.attn.c_attn"]
    assert shared(**batch(shared)).logits.isfinite().all()


def test_cross_attention_has_its_query_beside_keys_and_values():
    model = cross_attending()
    report = nlr.augment(model, NonlinearQueryConfig(), verbose=False)
    assert report.swapped == ["transformer.h.0.attn.c_attn", "transformer.h.0.crossattention.q_attn"]
    assert report.skipped["transformer.h.0.crossattention.c_attn"] == "holds keys and values only"
    out = model(**batch(model), encoder_hidden_states=torch.randn(2, 4, 32)).logits
    assert out.isfinite().all()
