"""Nonlinear queries: the formula, fused projections, head layouts, counts."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrize import register_parametrization

import nonlinear_lowrank as nlr
from attention_helpers import MIXED, cross_attending, grouped_llama, latent
from model_helpers import FAMILIES, SIZES, TOKENS, batch, build, randomised
from nonlinear_lowrank import NonlinearQKV, NonlinearQuery, NonlinearQueryConfig
from nonlinear_lowrank.analysis.cost import model_cost

QUERIES = {"llama": "q_proj", "glm": "q_proj", "gpt2": "c_attn", "opt": "q_proj", "eurobert": "q_proj", "vit": "q_proj"}


def written_out(layer, x):
    """The document's formula, in float64."""
    x, p, config = x.double(), {name: value.double() for name, value in layer.named_parameters()}, layer.query_config
    residual = x.tile(-(-layer.queries // layer.width))[..., : layer.queries]
    if config.kind == "identity":
        return residual
    if config.residual == "linear":
        residual = x @ p["query_weight"].T + p.get("query_bias", 0)
    if config.kind == "full_rank":
        return config.scale * (residual + x @ p["query_weight"].T)

    def normed(x, norm, weight, bias=0.0):
        if norm == "none":
            return x
        centred = x if norm == "rms" else x - x.mean(-1, keepdim=True)
        eps = config.rms_eps if norm == "rms" else 1e-5
        return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * p[weight] + bias

    hidden = normed(x, config.in_norm, "query_norm_weight") @ p["query_down"].T
    hidden = {
        "gelu": lambda z: z * 0.5 * (1 + torch.erf(z / 2**0.5)),
        "gelu_tanh": lambda z: z * 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (z + 0.044715 * z**3))),
        "silu": lambda z: z / (1 + torch.exp(-z)),
        "relu": lambda z: z.clamp(min=0),
        "tanh": torch.tanh,
        "linear": lambda z: z,
    }[config.activation if config.kind == "nonlinear" else "linear"](hidden)
    out = normed(hidden @ p["query_up"].T, config.out_norm, "query_out_weight", p.get("query_out_bias", 0.0))
    return config.scale * (residual + out)


@pytest.mark.parametrize("queries", [24, 16, 56])
@pytest.mark.parametrize(
    "settings",
    [
        *({"kind": kind, "scale": scale} for kind in ("nonlinear", "linear", "full_rank") for scale in (0.5, 1.0)),
        {"kind": "identity"},
        *({"activation": each} for each in ("gelu_tanh", "silu", "relu", "tanh")),
        {"out_bias": False, "rms_eps": 1e-2},
        {"in_norm": "layer", "out_norm": "rms", "rms_eps": 1e-2},
        {"in_norm": "none", "out_norm": "none"},
        {"residual": "linear"},
        {"residual": "linear", "kind": "linear", "out_norm": "none", "scale": 0.3},
    ],
)
def test_the_formula_written_out(settings, queries):
    layer = NonlinearQuery(24, queries, True, config=NonlinearQueryConfig(**settings), dtype=torch.float64)
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


def test_a_full_rank_residual_has_the_linear_querys_parameters():
    model = FAMILIES["opt"]()
    report = nlr.augment(model, NonlinearQueryConfig(kind="full_rank"), verbose=False)
    layer = model.get_submodule(report.swapped[0])
    assert [(name, tuple(value.shape)) for name, value in layer.named_parameters()] == [("query_weight", (32, 32))]
    assert (report.parameters_added, report.flops_added) == (-2 * 32, 0)  # OPT's biases


def own_rows(module, layer):
    """Rows of queries in a projection, group by group."""
    of_group = (layer.queries + layer.others) // layer.layout.groups
    share = layer.queries // layer.layout.groups
    return [group * of_group + row for group in range(layer.layout.groups) for row in range(share)]


GROUPS = {"codegen": 4, "falcon-7b": 1, "falcon-40b": 2, "gpt_bigcode-mq": 1, "phi3": 1}
"""Groups of rows; those of the others are their four heads."""


@pytest.mark.parametrize("family", MIXED)
def test_queries_are_found_among_fused_rows(family, tmp_path):
    """Two models that differ in their queries alone: Q(x) = x, and a linear query that is the identity."""
    plain = MIXED[family]().eval()
    ours = copy.deepcopy(plain)
    report = nlr.augment(ours, NonlinearQueryConfig(kind="identity"), verbose=False)
    inputs = batch(plain)
    with torch.no_grad():
        for name in report.swapped:
            module, layer = plain.get_submodule(name), ours.get_submodule(name)
            assert layer.layout.groups == GROUPS.get(family, 4)
            rows = own_rows(module, layer)
            others = sorted(set(range(module.weight.shape[0])) - set(rows))
            assert torch.equal(layer.weight, module.weight[others])
            module.weight[rows] = torch.eye(32).repeat(2, 1)[: layer.queries]
            if module.bias is not None:
                module.bias[rows] = 0
        expected = plain(**inputs).logits
        torch.testing.assert_close(ours(**inputs).logits, expected)
        nonlinear = copy.deepcopy(plain)
        nlr.augment(nonlinear, NonlinearQueryConfig(), verbose=False)
        assert not torch.allclose(nonlinear(**inputs).logits, expected, atol=1e-5)
        randomised(nonlinear).save_pretrained(tmp_path)
        assert torch.equal(nlr.hub.load_model(tmp_path)(**inputs).logits, nonlinear(**inputs).logits)


@pytest.mark.parametrize(
    ("make", "name", "shape"),
    [
        (lambda: grouped_llama(head_dim=16), "self_attn.q_proj", (32, 64)),
        (lambda: grouped_llama(head_dim=4), "self_attn.q_proj", (32, 16)),
        (lambda: latent(None), "self_attn.q_proj", (32, 4 * 12)),
        (lambda: latent(16), "self_attn.q_b_proj", (16, 4 * 12)),
    ],
    ids=["wide", "narrow", "latent keys", "latent queries"],
)
def test_queries_of_other_widths_cost_no_more(make, name, shape, tmp_path):
    model = make().eval()
    report = nlr.augment(model, NonlinearQueryConfig(), verbose=False)
    layers = [model.get_submodule(each) for each in report.swapped]
    assert all(each.endswith(name) for each in report.swapped)
    assert [layer.linear_shape for layer in layers] == [shape] * 2
    d, q = shape
    matrices = layers[0].query_down.numel() + layers[0].query_up.numel()
    assert d * q - d - q < matrices <= d * q
    assert report.parameters_added == 2 * (matrices - d * q + d + 2 * q)
    assert report.flops_added == 2 * 2 * (matrices - d * q)
    randomised(model).save_pretrained(tmp_path)
    inputs = batch(model)
    with torch.no_grad():
        assert torch.equal(nlr.hub.load_model(tmp_path)(**inputs).logits, model(**inputs).logits)


def test_keys_and_values_by_name():
    model = grouped_llama(2)
    report = nlr.augment(model, NonlinearQueryConfig(), include=r".*\.[qkv]_proj", verbose=False)
    shapes = [model.get_submodule(name).linear_shape for name in report.swapped]
    assert shapes == [(32, 32), (32, 16), (32, 16)] * 2
    model(**batch(model)).logits.sum().backward()
    assert all(value.grad.any() for name in report.swapped for value in model.get_submodule(name).parameters())


def test_the_place_of_queries_can_be_given():
    model = nn.ModuleDict({"qkv": nn.Linear(32, 48)})
    nlr.augment(model, NonlinearQueryConfig(query_width=16, query_groups=2), verbose=False)
    assert model["qkv"].layout == (16, 32, 2)


@pytest.mark.parametrize("family", [*QUERIES, "gpt_neox", "falcon-40b"])
@pytest.mark.parametrize("out_norm", ["layer", "none"])
def test_a_linear_residual_starts_at_the_models_own_query(family, out_norm):
    """To the bit, since the scale is a power of two; f starts at zero, and trains."""
    plain = randomised((FAMILIES | MIXED)[family]().eval())
    inputs = batch(plain)
    config = NonlinearQueryConfig(residual="linear", out_norm=out_norm)
    for dtype in (torch.float32, torch.bfloat16):
        plain.to(dtype)
        ours = copy.deepcopy(plain)
        report = nlr.augment(ours, config, verbose=False)
        given = {key: value.to(dtype) if value.is_floating_point() else value for key, value in inputs.items()}
        with torch.no_grad():
            torch.testing.assert_close(ours(**given).logits, plain(**given).logits, rtol=0, atol=0)
    layer = ours.get_submodule(report.swapped[0])
    ours(**given).logits.sum().backward()
    assert (layer.query_up if out_norm == "none" else layer.query_out_weight).grad.any()
    layer.reset_parameters()  # the second draw is a whole one
    assert layer.query_weight.float().std().item() == pytest.approx(0.04, rel=0.1)


def test_a_linear_residual_at_other_scales_starts_within_rounding():
    plain = randomised(FAMILIES["opt"]().eval())
    ours = copy.deepcopy(plain)
    nlr.augment(ours, NonlinearQueryConfig(residual="linear", scale=0.3), verbose=False)
    inputs = batch(plain)
    with torch.no_grad():
        torch.testing.assert_close(ours(**inputs).logits, plain(**inputs).logits)


@pytest.mark.parametrize("normed", [False, True])
def test_a_linear_query_is_redundant_without_norms(normed):
    """W_Q goes into its neighbours and Q(x) = x: the same outputs (nonlinear_queries.md, "Algebraic Redundancy").

    The whole stream is then in another basis, which norms do not commute with.
    """
    sizes = {**SIZES, **TOKENS, "num_hidden_layers": 1, "ffn_dim": 48, "word_embed_proj_dim": 32, "enable_bias": False}
    plain = build("opt", **sizes, tie_word_embeddings=False, max_position_embeddings=64).double().eval()
    randomised(plain)
    block = plain.model.decoder.layers[0]
    if not normed:
        block.self_attn_layer_norm = block.final_layer_norm = plain.model.decoder.final_layer_norm = nn.Identity()
    ours = copy.deepcopy(plain)
    with pytest.warns(UserWarning, match="new, random weights") if normed else nullcontext():  # norms tell of training
        nlr.augment(ours, NonlinearQueryConfig(kind="identity"), verbose=False)
    decoder, block = ours.model.decoder, ours.model.decoder.layers[0]
    with torch.no_grad():
        theta = plain.model.decoder.layers[0].self_attn.q_proj.weight.T
        assert torch.linalg.cond(theta) < 1e4
        for module in (decoder.embed_tokens, decoder.embed_positions):  # into the new basis
            module.weight.copy_(module.weight @ theta)
        for module in (block.self_attn.out_proj, block.fc2):
            module.weight.copy_(theta.T @ module.weight)
        for module in (block.self_attn.k_proj, block.self_attn.v_proj, block.fc1, ours.lm_head):  # out of it
            module.weight.copy_(torch.linalg.solve(theta, module.weight.T).T)
        inputs = batch(plain)
        expected, found = plain(**inputs).logits, ours(**inputs).logits
    assert torch.allclose(found, expected, rtol=1e-9, atol=1e-9) != normed


def test_cross_attention_has_its_query_beside_keys_and_values():
    model = cross_attending()
    report = nlr.augment(model, NonlinearQueryConfig(), verbose=False)
    assert report.swapped == ["transformer.h.0.attn.c_attn", "transformer.h.0.crossattention.q_attn"]
    assert report.skipped["transformer.h.0.crossattention.c_attn"] == "holds keys and values only"
    out = model(**batch(model), encoder_hidden_states=torch.randn(2, 4, 32)).logits
    assert out.isfinite().all()


@pytest.mark.parametrize("name", ["query_bias", "query_out_bias", "query_norm_weight"])
def test_reads_parameters_that_are_computed(name):
    settings = {"residual": "linear"} if name == "query_bias" else {"in_norm": "layer", "out_norm": "layer"}
    layer = NonlinearQuery(8, config=NonlinearQueryConfig(**settings), bias=True)
    with torch.no_grad():
        for each in layer.parameters():
            each.normal_()
    x = torch.randn(3, 8)
    expected = layer(x)
    register_parametrization(layer, name, nn.Identity())
    torch.testing.assert_close(layer(x), expected)
