"""`moe`: the plain model with experts in place of its MLPs; what is counted, drawn, trained and evaluated."""

import json
from dataclasses import replace

import pytest
import torch

from model_helpers import FAMILIES, batch
from nlr_lab.compare import compare
from nlr_lab.compare.model_trials import forward_flops
from nlr_lab.tasks.text.language_model import LanguageModelTask
from nlr_lab.training import Arm, run_training
from nlr_lab.training.arms import apply_arm, build_model
from nlr_lab.training.trainer import RunTrainer
from nonlinear_lowrank.analysis import model_cost
from nonlinear_lowrank.hub import load_model
from training_helpers import LENGTH, FakeText, make_recipe

TEXT = FakeText()


def built(recipe, text):
    arm = Arm.parse(text)
    return apply_arm(recipe, arm, build_model(recipe, TEXT, arm))


def in_halves(weight, heads):
    """Rows of a GLM's query or key, whose neighbors turn together, in the order of Mixtral."""
    each = weight.view(heads, -1, weight.shape[1])
    return torch.cat([each[:, ::2], each[:, 1::2]], 1).view_as(weight)


@pytest.mark.parametrize("family", ["glm", "llama"])
def test_experts_that_are_the_mlp_are_the_plain_model(family, tmp_path):
    plain = (FAMILIES["llama"]() if family == "llama" else build_model(make_recipe(), TEXT)).eval()
    width = plain.config.intermediate_size
    experts = Arm.parse(f"moe:hidden={width},experts=3,active=2").apply(plain)
    for old, new in zip(plain.model.layers, experts.model.layers, strict=True):
        mlp = old.mlp.state_dict()
        both = mlp.get("gate_up_proj.weight")
        both = torch.cat([mlp["gate_proj.weight"], mlp["up_proj.weight"]]) if both is None else both
        with torch.no_grad():
            new.mlp.experts.gate_up_proj.copy_(both.expand(3, -1, -1))
            new.mlp.experts.down_proj.copy_(mlp["down_proj.weight"].expand(3, -1, -1))
            for name in ("q_proj", "k_proj") if family == "glm" else ():
                weight = getattr(new.self_attn, name).weight
                weight.copy_(in_halves(weight, weight.shape[0] // new.self_attn.head_dim))
    inputs = batch(plain)
    expected = plain(**inputs).logits
    torch.testing.assert_close(experts(**inputs).logits, expected, rtol=1e-5, atol=1e-5)
    experts.save_pretrained(tmp_path)
    again = load_model(tmp_path)
    assert type(again).__name__ == "MixtralForCausalLM"
    assert torch.equal(again(**inputs).logits, experts(**inputs).logits)


@pytest.mark.parametrize("init", ["stock", "noble", "kaiming"])
def test_draws_experts_as_the_other_linears_and_keeps_the_rest(init):
    recipe = make_recipe()
    backbone = replace(recipe.task.backbone, width=128)
    recipe = replace(recipe, task=replace(recipe.task, backbone=backbone))
    plain, moe = (built(recipe, f"{name}init={init}") for name in ("baseline:", "moe:hidden=96,"))
    before, after = plain.state_dict(), moe.state_dict()
    for layer in moe.model.layers:
        for weight in (*layer.mlp.experts.gate_up_proj, *layer.mlp.experts.down_proj):
            d_in = weight.shape[1]
            std = {"stock": 0.02, "noble": 0.5 / d_in**0.5, "kaiming": (3 * d_in) ** -0.5}[init]
            assert weight.std().item() == pytest.approx(std, rel=0.05)
        assert layer.mlp.gate.weight.std().item() == pytest.approx(0.02, rel=0.1)
    drawn = torch.cat([weight.flatten() for name, weight in after.items() if "experts" in name])
    assert len(drawn.unique()) > 0.9 * len(drawn), "no two experts are alike"
    assert {name for name in after if ".mlp." not in name} == {name for name in before if ".mlp." not in name}
    assert all(torch.equal(after[name], before[name]) for name in before if ".mlp." not in name)
    again = built(recipe, f"moe:hidden=96,init={init}").state_dict()
    assert all(torch.equal(again[name], each) for name, each in after.items())


@pytest.mark.parametrize("joined", ["", "+noble:rank=6", "+noble:rank=8,expert_down=shared"])
def test_flops_that_are_run_are_those_of_active_experts(joined):
    recipe, d, hidden = make_recipe(), 32, 24
    model = built(recipe, f"moe:hidden={hidden},experts=5,active=3{joined}")
    cost = model_cost(model, LENGTH)
    assert forward_flops(model, recipe, TEXT) == cost.flops
    if not joined:
        attention, experts = 8 * d * d + 4 * LENGTH * d, 3 * 2 * 3 * d * hidden
        assert cost.flops == 2 * (attention + 2 * 5 * d + experts) + 2 * d * TEXT.vocab_size
        assert cost.parameters - cost.active_parameters == 2 * 2 * 3 * d * hidden


class ReadyTask(LanguageModelTask):
    def prepare(self, progress=True):
        return TEXT


def test_load_balancing_loss_is_in_training_alone(tmp_path, monkeypatch):
    # With a learning rate of next to nothing the losses are those of the start.
    known = {"steps": 4, "eval_every": 4, "log_every": 4, "save_every": 4, "warmup_steps": 0}
    minimised, whole = [], RunTrainer.compute_loss

    def noted(*args, **kwargs):
        found = whole(*args, **kwargs)
        minimised.append(float((found[0] if isinstance(found, tuple) else found).detach()))
        return found

    def losses(name, aux_loss, accumulated=1, **settings):
        """Loss that is minimised in a step, that which is logged, and that of the evaluation."""
        arm = f"moe:hidden=16,experts=4,aux_loss={aux_loss}"
        recipe = make_recipe(arm, dropout=0.0, lr=1e-30, gradient_accumulation=accumulated, **known, **settings)
        recipe = replace(recipe, task=ReadyTask(text=recipe.task.text, backbone=recipe.task.backbone))
        minimised.clear()
        run_training(recipe, tmp_path / name, quiet=True)
        record = json.loads((tmp_path / name / "result.json").read_text(encoding="utf-8"))
        return sum(minimised[: 4 * accumulated]) / 4, record["train_curve"][-1][1], record["final_loss"]

    monkeypatch.setattr(RunTrainer, "compute_loss", noted)
    plain, logged, evaluated = losses("plain", 0.0)
    assert logged == pytest.approx(plain)
    train, same, same_too = losses("with", 5.0)
    assert same == pytest.approx(logged)
    assert same_too == evaluated
    assert train - plain == pytest.approx(5.0 * 2, rel=0.05)  # 2 where the load is even, as at the start nearly
    # In micro-batches it is a mean over them, not their sum.
    split, same, same_too = losses("split", 5.0, accumulated=4)
    assert same == pytest.approx(logged)
    assert same_too == pytest.approx(evaluated), "batches of the evaluation are micro-batches"
    assert split - plain == pytest.approx(5.0 * 2, rel=0.05)
    # Smoothed labels leave it as it is.
    smooth, logged, _ = losses("smooth", 0.0, label_smoothing=0.5)
    both, same, _ = losses("both", 5.0, accumulated=2, label_smoothing=0.5)
    assert same == pytest.approx(logged)
    assert both - smooth == pytest.approx(5.0 * 2, rel=0.05)


def test_compares_experts_at_the_flops_of_a_method(tmp_path):
    recipe = make_recipe(steps=4, save_every=4, eval_every=2)
    recipe = replace(recipe, task=ReadyTask(text=recipe.task.text, backbone=recipe.task.backbone))
    chosen = [
        Arm.parse(text) for text in ("baseline", "noble:rank=8", "moe:match=noble-r8", "moe:hidden=16+noble:rank=4")
    ]
    results = compare(recipe, tmp_path, arms=chosen, seeds=1, timing_rounds=0, quiet=True).results
    plain, noble, moe, both = results["arms"]
    assert plain["active_parameters"] == plain["parameters"]
    hidden = moe["settings"]["settings"]["hidden"]
    step = 2 * 2 * 3 * 2 * 32 * 8  # the next width of two experts in two layers
    assert noble["flops_per_token"] <= moe["flops_per_token"] < noble["flops_per_token"] + step
    assert moe["parameters"] - moe["active_parameters"] == 2 * 6 * 3 * 32 * hidden
    assert [arm["control"] for arm in results["arms"]] == [True, False, True, False]
    report = (tmp_path / "report.md").read_text(encoding="utf-8")
    for arm in (moe, both):
        share = f"{arm['active_parameters']:,} of {arm['parameters']:,} parameters are active for a token"
        assert f"`{arm['name']}`: {share}" in report
    assert f"`moe-2of8-as-noble-r8` has experts of width {hidden} (MLPs of 48 in the recipe's model)" in report
    model = load_model(tmp_path / "runs" / both["name"] / "lr-0.01" / "seed-1" / "model")
    assert model.config.num_local_experts == 8
