"""`cola` and `sltrain`: what is counted, drawn, computed and trained."""

from dataclasses import replace

import pytest
import torch

from model_helpers import batch
from nlr_lab.compare.model_trials import forward_flops
from nlr_lab.training import Arm
from nlr_lab.training.arms import apply_arm, build_model, optimizer_groups
from nonlinear_lowrank.analysis.cost import model_cost
from refusals import assert_refused
from training_helpers import FakeText, make_recipe

TEXT = FakeText()
ARMS = ("cola", "sltrain")


def built(text, seed=0):
    recipe, arm = make_recipe(seed=seed), Arm.parse(text)
    return apply_arm(recipe, arm, build_model(recipe, TEXT, arm))


def linears(model):
    return {name: each for name, each in model.model.named_modules() if type(each) is torch.nn.Linear}


@pytest.mark.parametrize("arm", ARMS)
def test_every_linear_of_the_blocks_is_replaced_and_counted(arm):
    plain = built("baseline")
    counts = 0
    for each in linears(plain).values():
        d_out, d_in = each.weight.shape
        counts += min(d_out, d_in) // 4 * (d_out + d_in)
        counts += round(0.03 * d_out * d_in) if arm == "sltrain" else 0
    model = built(arm)
    sizes = {name: sum(each.numel() for each in one.parameters()) for name, one in (("new", model), ("old", plain))}
    assert sizes["new"] - counts == sizes["old"] - sum(each.weight.numel() for each in linears(plain).values())
    assert torch.equal(model.lm_head.weight, plain.lm_head.weight)
    assert torch.equal(model.model.embed_tokens.weight, plain.model.embed_tokens.weight)


@pytest.mark.parametrize("arm", ARMS)
def test_every_tensor_is_trained_and_drawn_from_the_seed(arm):
    model, again, other = built(arm), built(arm), built(arm, seed=1)
    for name, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])
    assert any(not torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())
    model(**batch(model)).logits.square().mean().backward()
    # SLTrain's up factor starts at zero, so its down factor has a gradient from the second step on.
    still = {name for name, each in model.named_parameters() if not each.grad.abs().sum() > 0}
    assert {name.rpartition(".")[2] for name in still} == ({"factor_A"} if arm == "sltrain" else set())
    groups = optimizer_groups(model, make_recipe(), Arm.parse(arm), 1e-3)
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))


def test_cola_is_two_products_around_a_silu():
    layer = built("cola").model.layers[0].mlp.down_proj
    x = torch.randn(3, layer[0].in_features)
    expected = torch.nn.functional.silu(x @ layer[0].weight.T) @ layer[2].weight.T
    torch.testing.assert_close(layer(x), expected)
    wide = built("cola:rank_ratio=0.9").model.layers[0].mlp.gate_up_proj
    product = wide[2].weight @ wide[0].weight
    assert product.var().item() == pytest.approx(1 / sum(product.shape), rel=0.3)


def test_sltrain_is_a_dense_linear_of_its_two_parts():
    layer = built("sltrain:density=0.2,scale=0.5").model.layers[0].self_attn.o_proj
    torch.nn.init.normal_(layer.factor_B)
    layer.requires_grad_(False)
    x = torch.randn(3, layer.factor_A.shape[1])
    weight = 0.5 * layer.factor_B @ layer.factor_A
    weight.view(-1)[layer.places] += layer.values
    torch.testing.assert_close(layer(x), x @ weight.T)
    assert len(set(layer.places.tolist())) == round(0.2 * weight.numel())


def test_cola_costs_fewer_flops():
    recipe = make_recipe()
    costs = [forward_flops(built(text), recipe, TEXT) for text in ("cola", "baseline", "sltrain")]
    assert costs == sorted(costs)
    larger = replace(recipe, train=replace(recipe.train, batch_size=64 * recipe.train.batch_size))
    cola, _, sltrain = (forward_flops(built(text), larger, TEXT) for text in ("cola", "baseline", "sltrain"))
    assert cola == costs[0], "nothing is formed"
    assert 0 < (sltrain - costs[1]) * 60 < costs[2] - costs[1], "its weight is formed once a batch"


def test_refuses_models_without_plain_linears():
    assert_refused("takes plain linears", Arm.parse("cola").apply, built("sltrain"))


def test_the_modules_alone_tell_what_sltrain_costs():
    plain, other = (model_cost(built(text), 16) for text in ("baseline", "sltrain"))
    assert other.flops == plain.flops
    assert other.parameters < plain.parameters
