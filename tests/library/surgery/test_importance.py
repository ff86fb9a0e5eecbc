"""Scores of linears, and the choices made by them."""

import pytest
import torch
from torch import nn

from model_helpers import FAMILIES, batch
from nonlinear_lowrank import UserError
from nonlinear_lowrank.analysis.importance import layer_importance, part_of, recommended_layers, select_layers
from refusals import assert_refused


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


def test_gradient_scores_follow_the_formula():
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
    model.train().a.eval()
    scores = layer_importance(model, given)
    assert scores == pytest.approx({**expected, "unused": 0.0}, rel=1e-5)
    assert [module.training for module in model.modules()] == [True, False, True, True]
    assert not model.b.weight.requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())


def test_activation_scores_follow_the_formula():
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
def test_families_are_scored_without_their_head(family, score):
    model = FAMILIES[family]()
    inputs = batch(model)
    labels = torch.tensor([0, 1]) if family == "vit" else inputs["input_ids"]
    scores = layer_importance(model, [{**inputs, "labels": labels}], score=score)
    assert all(value > 0 for value in scores.values())
    assert not any("lm_head" in name or "classifier" in name for name in scores)
    assert {"query", "feed_forward"} <= {part_of(name) for name in scores}
    best_key = max((name for name in scores if part_of(name) == "key"), key=scores.get, default=None)
    wanted = [name for name in scores if part_of(name) in ("query", "feed_forward") or name == best_key]
    assert recommended_layers(scores, percentile=100) == wanted


PARTS = {
    "query": "attention.self.query attn.c_attn attention.self.query_proj crossattention.q_attn attn1.to_q "
    "self_attn.linear_q attention.q_linear attention.qkv_linear self_attn.q_a_proj self_attn.q_b_proj attention.q_head",
    "key": "self_attn.k_proj attention.self.key_proj attn1.to_k attention.k_head",
    "value": "SelfAttention.v attention.self.value_proj attn1.to_v self_attn.linear_v attention.projection_value",
    "feed_forward": "intermediate.dense 3.output.dense mlp.c_proj layers.0.fc2 DenseReluDense.wi DenseReluDense.wi_1 "
    "DenseReluDense.wo layers.0.linear1 layers.0.pwconv2 albert_layers.0.ffn albert_layers.0.ffn_output "
    "shared_mlp.input_linear shared_mlp.output_linear ffn1.intermediate_dense ffn2.output_dense ff.layer_1 ff.layer_2",
    "other": "attention.output.dense attn.c_proj layers.0.attention.wo attention.dense self_attn.kv_b_proj",
}


def test_parts_are_told_by_name():
    for part, names in PARTS.items():
        assert {name for name in names.split() if part_of(f"model.layers.3.{name}") != part} == set()


def test_selecting_takes_the_highest_scores():
    scores = {f"layer{index}": value for index, value in enumerate(torch.rand(40).tolist())}
    chosen = select_layers(scores, 70)
    assert len(chosen) == 12
    assert min(scores[name] for name in chosen) > max(scores[name] for name in scores.keys() - set(chosen))
    assert select_layers(scores, 0) == list(scores)


def test_bad_input_raises():
    model = Two()
    nan = {"x": torch.full((2, 6), float("nan")), "labels": torch.zeros(2, 4)}
    for call, message in (
        (lambda: layer_importance(model, [{"x": torch.randn(2, 6)}]), "no loss; put labels"),
        (lambda: layer_importance(model, []), "no batches"),
        (lambda: layer_importance(model, batches(), score="magic"), "unknown score"),
        (lambda: layer_importance(nn.Sequential(nn.ReLU()), []), "no linears"),
        (lambda: layer_importance(model, [nan]), "of a is not finite"),
        (lambda: layer_importance(model, batches(1)[0]), "single batch; put it into a list"),
        (lambda: layer_importance(model, [torch.randn(2, 6)], score="activation"), "got a Tensor"),
        (lambda: select_layers({"a": 1.0}, 101), "between 0 and 100"),
        (lambda: select_layers({}), "no scores"),
        (lambda: recommended_layers({"one": 1.0}), "named like a query or a feed-forward.*with select_layers"),
        (lambda: recommended_layers({"h.0.attn.q_proj": 1.0}), "named like a feed-forward"),
    ):
        assert_refused(message, call)


@pytest.mark.parametrize("score", ["gradient", "activation"])
def test_inference_mode_changes_nothing(score):
    model, given = Two(), batches()
    model.b.requires_grad_(False)
    expected = layer_importance(model, given, score=score)
    with torch.inference_mode():
        made_inside = [{name: tensor.clone() for name, tensor in each.items()} for each in given]
        scores = layer_importance(model, made_inside, score=score)
        if score == "gradient":
            with pytest.raises(UserError, match=r"made inside torch.inference_mode\(\) and has no gradients"):
                layer_importance(Two(), made_inside)
    assert scores == expected


class Calls(nn.Module):
    """y = a(x), with the linear called by its argument's name; an idle expert gets the first `rows` rows only."""

    def __init__(self, rows):
        super().__init__()
        self.a, self.expert, self.rows = nn.Linear(6, 6), nn.Linear(6, 6), rows

    def forward(self, x):
        return {"loss": self.a(input=x).square().mean() + self.expert(x[: self.rows]).square().sum()}


@pytest.mark.parametrize("score", ["gradient", "activation"])
def test_calls_by_keyword_and_on_no_rows_are_scored(score):
    model, x = Calls(rows=0), torch.randn(5, 6)
    scores = layer_importance(model, [{"x": x}], score=score)
    assert scores["expert"] == 0.0
    assert scores["a"] > 0
    if score == "activation":
        expected = (model.a.weight.abs() * x.square().mean(0).sqrt()).mean().item()
        assert scores["a"] == pytest.approx(expected, rel=1e-5)


def test_computed_weights_have_no_gradient_score():
    model, given = Calls(rows=3), [{"x": torch.randn(5, 6)}]
    plain = layer_importance(model, given, score="activation")
    torch.nn.utils.parametrizations.weight_norm(model.expert)
    with pytest.raises(UserError, match=r"the weight of expert is computed from others.*or use score='activation'"):
        layer_importance(model, given)
    assert layer_importance(model, given, score="activation") == pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize("score", ["gradient", "activation"])
def test_dropout_plays_no_part(score):
    model, given = Two(), batches()
    model.b = nn.Sequential(nn.Dropout(0.5), model.b)
    expected = layer_importance(model.eval(), given, score=score)
    assert layer_importance(model.train(), given, score=score) == expected
