"""Scores of linears, and the choices made by them."""

import numpy as np
import pytest
import torch
from torch import nn

from nonlinear_lowrank import UserError
from nonlinear_lowrank.analysis.importance import layer_importance, part_of, recommended_layers, select_layers
from zoo import FAMILIES, batch


class Two(nn.Module):
    """y = b(a(x)); the loss is the mean square of y - labels."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.unused = nn.Linear(6, 5), nn.Linear(5, 4), nn.Linear(3, 3)

    def forward(self, x, labels=None):
        y = self.b(self.a(x).tanh())
        return {"y": y} if labels is None else {"y": y, "loss": (y - labels).square().mean()}


def batches(count=3):
    return [{"x": torch.randn(7, 6), "labels": torch.randn(7, 4)} for _ in range(count)]


def test_gradient_scores_are_the_formula():
    model, given = Two(), batches()
    expected = dict.fromkeys(("a", "b"), 0.0)
    for each in given:
        model.zero_grad()
        model(**each)["loss"].backward()
        for name in expected:
            layer = model.get_submodule(name)
            expected[name] += (layer.weight * layer.weight.grad).abs().mean().item() / len(given)
    model.zero_grad()
    model.b.requires_grad_(False)
    scores = layer_importance(model.train(), given)
    assert scores == pytest.approx({**expected, "unused": 0.0}, rel=1e-5)
    assert model.training
    assert not model.b.weight.requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("score", ["gradient", "activation"])
def test_modules_keep_their_modes(score):
    model = Two().train()
    model.a.eval()
    layer_importance(model, batches(), score=score)
    assert {name: module.training for name, module in model.named_modules()} == {
        "": True,
        "a": False,
        "b": True,
        "unused": True,
    }


def test_activation_scores_are_the_formula():
    model, given = Two(), batches()
    x = torch.cat([each["x"] for each in given])
    inputs = {"a": x, "b": model.a(x).tanh()}
    expected = {
        name: (model.get_submodule(name).weight.abs() * rows.square().mean(0).sqrt()).mean().item()
        for name, rows in inputs.items()
    }
    scores = layer_importance(model, [{"x": each["x"]} for each in given], score="activation")
    assert scores == pytest.approx({**expected, "unused": 0.0}, rel=1e-5)
    assert not model.a._forward_pre_hooks


@pytest.mark.parametrize("score", ["gradient", "activation"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_scored_without_its_head(family, score):
    model = FAMILIES[family]()
    inputs = batch(model)
    labels = torch.tensor([0, 1]) if family == "vit" else inputs["input_ids"]
    scores = layer_importance(model, [{**inputs, "labels": labels}], score=score)
    assert all(value > 0 for value in scores.values())
    assert not any("lm_head" in name or "classifier" in name for name in scores)
    parts = {part_of(name) for name in scores}
    assert {"query", "feed_forward"} <= parts
    chosen = recommended_layers(scores, percentile=100)
    assert {part_of(name) for name in chosen} <= {"query", "key", "feed_forward"}
    keys = [name for name in scores if part_of(name) == "key"]
    assert len([name for name in chosen if part_of(name) == "key"]) == min(1, len(keys))
    assert all(name in chosen for name in scores if part_of(name) in ("query", "feed_forward"))


def test_a_layer_whose_weights_do_nothing_scores_least():
    model = FAMILIES["llama"]()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(1e-6)
    inputs = batch(model)
    scores = layer_importance(model, [{**inputs, "labels": inputs["input_ids"]}])
    of_kind = {name: value for name, value in scores.items() if name.endswith("down_proj")}
    assert min(of_kind, key=of_kind.get) == "model.layers.1.mlp.down_proj"


def test_percentile_is_numpys():
    values = torch.rand(40).tolist()
    scores = {f"layer{index}": value for index, value in enumerate(values)}
    chosen = select_layers(scores, 70)
    assert chosen == [name for name in scores if scores[name] >= np.percentile(values, 70)]
    assert len(chosen) == 12
    assert select_layers(scores, 0) == list(scores)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("bert.encoder.layer.3.attention.self.query", "query"),
        ("bert.encoder.layer.3.attention.output.dense", "other"),
        ("bert.encoder.layer.3.intermediate.dense", "feed_forward"),
        ("bert.encoder.layer.3.output.dense", "feed_forward"),
        ("transformer.h.0.attn.c_attn", "query"),
        ("transformer.h.0.mlp.c_proj", "feed_forward"),
        ("transformer.h.0.attn.c_proj", "other"),
        ("model.layers.0.self_attn.k_proj", "key"),
        ("model.decoder.layers.0.fc2", "feed_forward"),
        ("encoder.layer.0.SelfAttention.v", "value"),
        ("deberta.encoder.layer.0.attention.self.query_proj", "query"),
        ("deberta.encoder.layer.0.attention.self.key_proj", "key"),
        ("deberta.encoder.layer.0.attention.self.value_proj", "value"),
        ("encoder.block.0.layer.1.DenseReluDense.wi", "feed_forward"),
        ("encoder.block.0.layer.1.DenseReluDense.wi_1", "feed_forward"),
        ("encoder.block.0.layer.1.DenseReluDense.wo", "feed_forward"),
        ("layers.0.attention.wo", "other"),
        ("transformer.h.0.crossattention.q_attn", "query"),
        ("down_blocks.0.attn1.to_q", "query"),
        ("down_blocks.0.attn1.to_k", "key"),
        ("down_blocks.0.attn1.to_v", "value"),
        ("encoder.layers.0.self_attn.linear_q", "query"),
        ("encoder.layers.0.self_attn.linear_v", "value"),
        ("layers.0.attention.q_linear", "query"),
        ("layers.0.attention.qkv_linear", "query"),
        ("encoder.layers.0.linear1", "feed_forward"),
        ("convnext.encoder.stages.0.layers.0.pwconv2", "feed_forward"),
    ],
)
def test_parts_by_name(name, part):
    assert part_of(name) == part


def test_wrong_input_is_named():
    model = Two()
    with pytest.raises(UserError, match="no loss; put labels"):
        layer_importance(model, [{"x": torch.randn(2, 6)}])
    with pytest.raises(UserError, match="no batches"):
        layer_importance(model, [])
    with pytest.raises(UserError, match="no batches"):
        layer_importance(model, [], score="activation")
    with pytest.raises(UserError, match="unknown score"):
        layer_importance(model, batches(), score="magic")
    with pytest.raises(UserError, match="no linears"):
        layer_importance(nn.Sequential(nn.ReLU()), [])
    with pytest.raises(UserError, match="of a is not finite"):
        layer_importance(model, [{"x": torch.full((2, 6), float("nan")), "labels": torch.zeros(2, 4)}])
    with pytest.raises(UserError, match="between 0 and 100"):
        select_layers({"a": 1.0}, 101)
    with pytest.raises(UserError, match="no scores"):
        select_layers({})
    with pytest.raises(UserError, match="choose with select_layers"):
        recommended_layers({"one": 1.0, "two": 2.0})
