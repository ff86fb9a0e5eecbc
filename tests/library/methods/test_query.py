"""Nonlinear queries: the formula, fused projections, head layouts, counts, surgery, parallel plans, arms."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import OPTConfig, OPTForCausalLM

import nonlinear_lowrank as nlr
from attention_helpers import big_code, by_head, by_part, cross_attending, grouped_llama, grouped_phi3
from model_helpers import FAMILIES, batch, randomised
from nlr_lab.training import Arm
from nonlinear_lowrank import NonlinearQKV, NonlinearQuery, NonlinearQueryConfig, UserError
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


class Unknown(nn.Module):
    """Says nothing of its heads."""

    def __init__(self, width=48):
        super().__init__()
        self.attention = nn.ModuleDict({"qkv": nn.Linear(32, width)})


@pytest.mark.parametrize(
    ("build", "choice", "words"),
    [
        (lambda: grouped_llama(head_dim=16), {}, r"0.self_attn.q_proj has queries of width 64 .* model of width 32"),
        (lambda: grouped_phi3(1, head_dim=16), {}, r"has queries of width 64 .* in a model of width 32"),
        (by_head, {}, r"query_key_value mixes rows of q, k and v"),
        (by_part, {}, r"qkv_proj mixes rows of q, k and v"),
        (lambda: big_code(False), {}, r"attn.c_attn mixes rows of q, k and v"),
        (Unknown, {}, r"attention.qkv is 32 -> 48, and ModuleDict does not say"),
        (lambda: Unknown(33), {"include": ".*qkv"}, r"must then be 32 -> 96"),
        (lambda: nn.Sequential(nn.Linear(4, 4)), {}, r"nothing to swap.*name the targets with include="),
        (FAMILIES["llama"], {"include": r".*k_proj"}, r"k_proj has queries of width 16 .* in a model of width 32"),
    ],
)
def test_what_does_not_fit_is_one_clear_line_and_changes_nothing(build, choice, words):
    model = build()
    before = [type(module) for module in model.modules()]
    with pytest.raises(UserError, match=words) as caught:
        nlr.augment(model, NonlinearQueryConfig(), **choice, verbose=False)
    assert "\n" not in str(caught.value)
    assert [type(module) for module in model.modules()] == before


def test_cross_attention_has_its_query_beside_keys_and_values():
    model = cross_attending()
    report = nlr.augment(model, NonlinearQueryConfig(), verbose=False)
    assert report.swapped == ["transformer.h.0.attn.c_attn", "transformer.h.0.crossattention.q_attn"]
    assert report.skipped["transformer.h.0.crossattention.c_attn"] == "holds keys and values only"
    out = model(**batch(model), encoder_hidden_states=torch.randn(2, 4, 32)).logits
    assert out.isfinite().all()
    with pytest.raises(UserError, match="holds keys and values only"):
        nlr.augment(cross_attending(), NonlinearQueryConfig(), include=r".*crossattention.c_attn")


def test_composes_with_noble_on_the_other_projections(tmp_path):
    model = FAMILIES["opt"]().eval()
    nlr.augment(model, NonlinearQueryConfig(), verbose=False)
    report = nlr.augment(model, nlr.NobleConfig(rank=4), verbose=False)
    assert len(report.swapped) == 2 * 5
    assert not [name for name in report.swapped if name.endswith("q_proj")]
    roles = {group["role"] for group in nlr.param_groups(model, lr=1e-3, verbose=False)}
    assert {"noble.up", "query.down", "query.up", "query.norm"} <= roles
    model.save_pretrained(tmp_path)
    inputs = batch(model)
    with torch.no_grad():
        assert torch.equal(nlr.hub.load_model(tmp_path)(**inputs).logits, model(**inputs).logits)


@pytest.mark.parametrize("kind", ["nonlinear", "linear", "identity"])
def test_compiles_casts_and_autocasts(kind):
    torch.compiler.reset()
    layer = NonlinearQKV(24, 48, config=NonlinearQueryConfig(kind=kind))
    x = torch.randn(4, 24)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x))
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    low = copy.deepcopy(layer).to(torch.bfloat16)(x.bfloat16())
    assert y.dtype == low.dtype == torch.bfloat16
    for each in (y, low):
        torch.testing.assert_close(each.float(), layer(x), rtol=0.05, atol=0.05)
    assert F.mse_loss(y.float(), layer(x)) < 1e-3
    meta = NonlinearQKV(24, 48, config=NonlinearQueryConfig(kind=kind), device="meta")
    assert meta(torch.empty(2, 24, device="meta")).shape == (2, 72)
    assert meta.to_empty(device="cpu").reset_parameters() is None
    assert meta(x).isfinite().all()


def test_tensor_parallelism_is_refused_before_anything_is_split():
    from transformers.distributed import DistributedConfig

    for config, name in ((NonlinearQueryConfig(), "nonlinear-query"), (nlr.SineLowRankConfig(rank=2), "sine-lowrank")):
        model = FAMILIES["glm"]()
        nlr.augment(model, config, verbose=False)
        with pytest.raises(UserError, match=f"layers of {name} cannot be split by tensor parallelism"):
            type(model).maybe_distribute_model(model, DistributedConfig(tp_size=2), None)
        assert type(model).maybe_distribute_model(model, None, None) is model
    model = FAMILIES["glm"]()
    nlr.augment(model, nlr.NobleConfig(rank=2), verbose=False)
    assert type(model).maybe_distribute_model(model, DistributedConfig(tp_size=2), None) is model


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"rank": 0}, "rank"),
        ({"rank": 2.5}, "rank"),
        ({"kind": "cubic"}, "nonlinear, linear, identity"),
        ({"scale": 0.0}, "scale"),
        ({"init_std": float("nan")}, "init_std"),
        ({"kind": "identity", "rank": 4}, "rank=4 does nothing"),
        ({"kind": "identity", "scale": 0.3}, "scale=0.3 does nothing"),
    ],
)
def test_bad_settings_are_one_clear_line(settings, word):
    with pytest.raises(UserError, match=word):
        NonlinearQueryConfig(**settings)


def test_arms():
    for text, kind, control in (
        ("nonlinear-query:scale=1.0", "nonlinear", False),
        ("identity-query", "identity", True),
        ("residual-linear-query:rank=8", "linear", True),
    ):
        arm = Arm.parse(text)
        assert (str(arm), arm.control) == (text, control)
        changed = arm.apply(FAMILIES["opt"]())
        layers = [module for module in changed.modules() if isinstance(module, NonlinearQuery)]
        assert [layer.query_config.kind for layer in layers] == [kind] * 2
    with pytest.raises(UserError, match="no setting 'kind'"):
        Arm.parse("identity-query:kind=linear")
    with pytest.raises(UserError, match="rank=4 does nothing"):
        Arm.parse("identity-query:rank=4")
