"""Scores of linears, and the choices made by them."""

import numpy as np
import pytest
import torch
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration

from model_helpers import FAMILIES, batch
from nonlinear_lowrank import UserError
from nonlinear_lowrank.analysis.importance import layer_importance, part_of, recommended_layers, select_layers


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
    parts = {part_of(name) for name in scores}
    assert {"query", "feed_forward"} <= parts
    chosen = recommended_layers(scores, percentile=100)
    assert {part_of(name) for name in chosen} <= {"query", "key", "feed_forward"}
    keys = [name for name in scores if part_of(name) == "key"]
    assert len([name for name in chosen if part_of(name) == "key"]) == min(1, len(keys))
    assert all(name in chosen for name in scores if part_of(name) in ("query", "feed_forward"))


def test_layers_that_do_nothing_score_least():
    model = FAMILIES["llama"]()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(1e-6)
    inputs = batch(model)
    scores = layer_importance(model, [{**inputs, "labels": inputs["input_ids"]}])
    of_kind = {name: value for name, value in scores.items() if name.endswith("down_proj")}
    assert min(of_kind, key=of_kind.get) == "model.layers.1.mlp.down_proj"


def test_percentile_equals_numpys():
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
        ("encoder.albert_layer_groups.0.albert_layers.0.ffn", "feed_forward"),
        ("encoder.albert_layer_groups.0.albert_layers.0.ffn_output", "feed_forward"),
        ("encoder.albert_layer_groups.0.albert_layers.0.attention.dense", "other"),
        ("model.layers.0.self_attn.q_a_proj", "query"),
        ("model.layers.0.self_attn.q_b_proj", "query"),
        ("model.layers.0.self_attn.kv_b_proj", "other"),
        ("model.layers.0.shared_mlp.input_linear", "feed_forward"),
        ("model.layers.0.shared_mlp.output_linear", "feed_forward"),
        ("encoder.layers.0.ffn1.intermediate_dense", "feed_forward"),
        ("encoder.layers.0.ffn2.output_dense", "feed_forward"),
        ("transformer.layer.0.ff.layer_1", "feed_forward"),
        ("transformer.layer.0.ff.layer_2", "feed_forward"),
        ("encoder.blocks.0.0.attention.q_head", "query"),
        ("encoder.blocks.0.0.attention.k_head", "key"),
        ("encoder.stages.0.layers.0.attention.attention.projection_value", "value"),
    ],
)
def test_parts_are_told_by_name(name, part):
    assert part_of(name) == part


def test_bad_input_raises():
    model = Two()
    nan = {"x": torch.full((2, 6), float("nan")), "labels": torch.zeros(2, 4)}
    for call, message in (
        (lambda: layer_importance(model, [{"x": torch.randn(2, 6)}]), "no loss; put labels"),
        (lambda: layer_importance(model, []), "no batches"),
        (lambda: layer_importance(model, [], score="activation"), "no batches"),
        (lambda: layer_importance(model, batches(), score="magic"), "unknown score"),
        (lambda: layer_importance(nn.Sequential(nn.ReLU()), []), "no linears"),
        (lambda: layer_importance(model, [nan]), "of a is not finite"),
        (lambda: layer_importance(model, batches(1)[0]), "single batch; put it into a list"),
        (lambda: layer_importance(model, [torch.randn(2, 6)], score="activation"), "cannot be a Tensor"),
        (lambda: select_layers({"a": 1.0}, 101), "between 0 and 100"),
        (lambda: select_layers({}), "no scores"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("one", "two"), "is a query or a feed-forward by its name"),
        (("h.0.attn.wavelet", "h.0.mlp.fc1"), "is a query by its name"),
        (("h.0.attn.q_proj", "h.0.attn.k_proj"), "is a feed-forward by its name"),
    ],
)
def test_unknown_names_raise(names, words):
    with pytest.raises(
        UserError, match=words + ".*choose with select_layers, or give augment names by select="
    ) as caught:
        recommended_layers(dict(zip(names, torch.rand(len(names)).tolist(), strict=True)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("score", ["gradient", "activation"])
def test_encoder_decoders_get_their_labels(score):
    # Its decoder's inputs are made from the labels.
    config = T5Config(vocab_size=40, d_model=16, d_kv=4, d_ff=24, num_layers=1, num_heads=4, decoder_start_token_id=0)
    tokens = torch.randint(1, 40, (2, 6))
    scores = layer_importance(
        T5ForConditionalGeneration(config), [{"input_ids": tokens, "labels": tokens}], score=score
    )
    assert all(value > 0 for value in scores.values())
    assert {"query", "key", "feed_forward"} <= {part_of(name) for name in recommended_layers(scores, 0)}


@pytest.mark.parametrize("score", ["gradient", "activation"])
def test_inference_mode_changes_nothing(score):
    model, given = Two(), batches()
    model.b.requires_grad_(False)
    expected = layer_importance(model, given, score=score)
    with torch.inference_mode():
        made_inside = [{name: tensor.clone() for name, tensor in each.items()} for each in given]
        scores = layer_importance(model, made_inside, score=score)
        made = Two()
        if score == "gradient":
            with pytest.raises(UserError, match=r"made inside torch.inference_mode\(\) and has no gradients"):
                layer_importance(made, made_inside)
        else:
            layer_importance(made, made_inside, score=score)
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
    model = Calls(rows=3)
    given = [{"x": torch.randn(5, 6)}]
    plain = layer_importance(model, given, score="activation")
    torch.nn.utils.parametrizations.weight_norm(model.expert)
    with pytest.raises(UserError, match=r"the weight of expert is computed from others.*or use score='activation'"):
        layer_importance(model, given)
    assert layer_importance(model, given, score="activation") == pytest.approx(plain, rel=1e-5)
