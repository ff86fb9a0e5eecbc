"""QK-norm: the formula by head, on plain and changed projections, and in files."""

import copy

import pytest
import torch
from torch import nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, DeepseekV32Config, DeepseekV32ForCausalLM

import nonlinear_lowrank as nlr
from attention_helpers import big_code, cross_attending, grouped_llama, grouped_phi3
from model_helpers import FAMILIES, batch
from nonlinear_lowrank import QKNormConfig, QKNormProjection
from nonlinear_lowrank.analysis.cost import model_cost
from nonlinear_lowrank.hub import load_model

MODELS = ("llama", "glm", "gpt2", "opt", "eurobert", "vit")
UNDER = [nlr.NonlinearQueryConfig(), nlr.NobleConfig(rank=4), nlr.SineLowRankConfig(rank=4, omega=30)]


def layers_of(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, QKNormProjection)}


def normed(y, weight):
    """Over heads of the weight's width, in float64."""
    heads = y.double().unflatten(-1, (-1, weight.shape[0]))
    return (heads / (heads.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()).flatten(-2)


@pytest.mark.parametrize("family", MODELS)
def test_queries_and_keys_are_normed_by_head_and_values_are_not(family):
    model = FAMILIES[family]()
    plain = copy.deepcopy(model)
    report = nlr.augment(model, QKNormConfig(), verbose=False)
    assert report.config.head_width == 8
    assert len(report.swapped) == (2 if family == "gpt2" else 4)
    assert report.flops_added == 0
    for name, layer in layers_of(model).items():
        with torch.no_grad():
            for parameter in layer.parameters(recurse=False):
                parameter.normal_()
        x = torch.randn(2, 5, 32)
        y, before = layer(x), plain.get_submodule(name)(x)
        if family == "gpt2":
            expected = [normed(before[..., :32], layer.qk_norm_query), normed(before[..., 32:64], layer.qk_norm_key)]
            expected = torch.cat([*(each.float() for each in expected), before[..., 64:]], dim=-1)
        else:
            keys = name.endswith("k_proj")
            assert (layer.qk_norm_query is None) == keys
            expected = normed(before, layer.qk_norm_key if keys else layer.qk_norm_query).float()
        torch.testing.assert_close(y, expected)
    norms = 2 * 2 * 8
    assert report.parameters_added == norms
    assert model_cost(model, 9).branch_parameters == norms
    groups = nlr.param_groups(model, lr=1.0, weight_decay=0.1, verbose=False)
    assert [group["weight_decay"] for group in groups if group["role"] == "qk-norm"] == [0.0]
    model(**batch(model)).logits.square().mean().backward()
    assert all(p.grad.abs().sum() > 0 for layer in layers_of(model).values() for p in layer.parameters(recurse=False))


@pytest.mark.parametrize("config", UNDER, ids=lambda config: config.method)
@pytest.mark.parametrize("family", ["opt", "gpt2"])
def test_on_top_of_every_method_and_back_from_disk(config, family, tmp_path):
    model = FAMILIES[family]().eval()
    nlr.augment(model, config, verbose=False)
    inputs = batch(model)
    before = model(**inputs).logits
    nlr.augment(model, QKNormConfig(), verbose=False)
    with torch.no_grad():
        for layer in layers_of(model).values():
            for parameter in layer.parameters(recurse=False):
                parameter.uniform_(0.5, 3)
    after = model(**inputs).logits
    assert not torch.allclose(after, before)
    model.save_pretrained(tmp_path)
    again = load_model(tmp_path)
    assert torch.equal(again(**inputs).logits, after)
    fresh = type(model)(copy.deepcopy(model.config))
    assert fresh.state_dict().keys() == model.state_dict().keys()
    assert all(torch.isfinite(parameter).all() for parameter in fresh.parameters())


def test_grouped_heads_have_fewer_keys():
    model = grouped_llama(1, head_dim=16)
    nlr.augment(model, QKNormConfig(), verbose=False)
    layer = model.model.layers[0].self_attn
    assert (layer.q_proj.queries, layer.q_proj.keys, layer.k_proj.queries, layer.k_proj.keys) == (64, 0, 0, 16)
    assert model(**batch(model)).logits.isfinite().all()
    fused = grouped_phi3()
    nlr.augment(fused, QKNormConfig(), verbose=False)
    assert (fused.model.layers[0].self_attn.qkv_proj.queries, fused.model.layers[0].self_attn.qkv_proj.keys) == (32, 16)
    assert fused(**batch(fused)).logits.isfinite().all()


def test_heads_of_a_given_width_and_shared_keys():
    bare = nn.ModuleDict({"q_proj": nn.Linear(8, 8), "k_proj": nn.Linear(8, 8)})
    assert len(nlr.augment(bare, QKNormConfig(head_width=4), verbose=False).swapped) == 2
    shared = big_code(multi_query=True)
    nlr.augment(shared, QKNormConfig(), verbose=False)
    assert [(layer.queries, layer.keys) for layer in layers_of(shared).values()] == [(32, 8)]


def test_latent_attention_has_its_whole_heads_normed():
    ranks = {"q_lora_rank": None, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 48}
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**sizes, **ranks, num_hidden_layers=1, vocab_size=64))
    assert nlr.augment(model, QKNormConfig(), verbose=False).config.head_width == 12


def test_the_keys_of_an_indexer_get_no_norm():
    """They choose positions and have no gradient."""
    ranks = {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48, "vocab_size": 64}
    model = DeepseekV32ForCausalLM(DeepseekV32Config(**sizes, **ranks, num_hidden_layers=1, index_head_dim=16))
    assert any(name.endswith("indexer.wk") for name, _ in model.named_modules())
    with pytest.raises(nlr.UserError, match="not named like a target of qk-norm"):
        nlr.augment(model, QKNormConfig(), verbose=False)


@pytest.mark.parametrize("inner", [None, nlr.NobleConfig(rank=4)], ids=["plain", "noble"])
def test_cross_attention_norms_keys_and_leaves_values(inner, tmp_path):
    model = cross_attending()
    if inner is not None:
        nlr.augment(model, inner, verbose=False)
    plain = copy.deepcopy(model)
    nlr.augment(model, QKNormConfig(), verbose=False)
    name = "transformer.h.0.crossattention.c_attn"
    layer = model.get_submodule(name)
    with torch.no_grad():
        layer.qk_norm_key.normal_()
    x = torch.randn(2, 5, 32)
    y, before = layer(x), plain.get_submodule(name)(x)
    torch.testing.assert_close(y[..., :32], normed(before[..., :32], layer.qk_norm_key).float())
    assert torch.equal(y[..., 32:], before[..., 32:])
    assert layer.qk_norm_query is None
    assert model.get_submodule("transformer.h.0.crossattention.q_attn").qk_norm_query is not None
    inputs = {**batch(model), "encoder_hidden_states": torch.randn(2, 4, 32)}
    model.save_pretrained(tmp_path)
    assert torch.equal(load_model(tmp_path)(**inputs).logits, model(**inputs).logits)
