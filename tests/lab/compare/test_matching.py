"""`wide-mlp:match=ARM`: the width is the smallest that is enough, for every backbone; and what cannot be matched."""

from dataclasses import dataclass, replace

import pytest
import torch

import nonlinear_lowrank as nlr
from nlr_lab.compare import compare
from nlr_lab.compare.model_trials import resolve_matches
from nlr_lab.compare.report import render_report
from nlr_lab.recipes import get_recipe
from nlr_lab.tasks.text.language_model import LanguageModelTask
from nlr_lab.training import Arm
from nlr_lab.training.run import apply_arm, build_model
from nonlinear_lowrank.hub import load_model
from refusals import assert_refused
from training_helpers import FakeText, make_recipe

TEXT = FakeText()
DEMOS = ("gpt3-demo", "mlm-demo", "image-tokens-demo")


def arms(*texts):
    return [Arm.parse(text) for text in texts]


def parameters(recipe, arm):
    model = arm.apply(recipe.task.build_on_meta())
    return sum(parameter.numel() for parameter in model.parameters())


def flops(recipe, arm):
    model = arm.apply(recipe.task.build_on_meta())
    return nlr.analysis.model_cost(model, recipe.task.sequence_length).flops


@pytest.mark.parametrize(("by", "count"), [("parameters", parameters), ("flops", flops)])
@pytest.mark.parametrize("name", DEMOS)
def test_finds_the_smallest_width_that_is_not_below(name, by, count):
    recipe = get_recipe(name)
    more, fewer = arms("nonlinear-query+noble:rank=8,name=more", "identity-query,name=fewer")
    wanted = arms(*(f"wide-mlp:match={target},by={by}" for target in ("more", "fewer")))
    resolved = resolve_matches(recipe, [*wanted, more, fewer])
    for target, wide in zip((more, fewer), resolved, strict=False):
        hidden = wide.settings["hidden"]
        assert (wide.name.startswith(f"wide-mlp-as-{target.name}"), wide.control) == (True, True)
        assert count(recipe, Arm.parse(f"wide-mlp:hidden={hidden - 1}")) < count(recipe, target)
        assert count(recipe, target) <= count(recipe, wide)
        assert (hidden > recipe.task.backbone.hidden) == (target is more)
        assert Arm.parse(str(wide)) == wide
    assert resolve_matches(recipe, resolved) == resolved, "a width that is there already is checked, not changed"


@pytest.mark.parametrize(("by", "count"), [("parameters", parameters), ("flops", flops)])
@pytest.mark.parametrize("experts", ["", ",experts=4,active=1", ",experts=3,active=3+noble:rank=3"])
def test_finds_the_smallest_width_of_experts(experts, by, count):
    recipe = make_recipe()  # MLPs of width 48
    # Eight experts of the narrowest width hold more parameters than the plain model has in its MLPs.
    target, moe = arms("wide-mlp:hidden=150,name=target", f"moe:match=target,by={by}{experts}")
    found = resolve_matches(recipe, [target, moe])[1]
    hidden = found.settings.get("moe", found.settings)["hidden"]
    text = str(found).replace(f"match=target,by={by},", "").replace(f"match=target,by={by}", "")

    def of_width(width):
        return count(recipe, Arm.parse(text.replace(f"hidden={hidden}", f"hidden={width}")))

    assert (hidden % 8, found.control) == (0, "noble" not in experts)
    assert of_width(hidden - 8) < count(recipe, target) <= of_width(hidden)
    if by == "flops":
        assert found == resolve_matches(recipe, [target, *arms(f"moe:match=target,by=flops{experts}")])[1]


@pytest.mark.parametrize("by", ["parameters", "flops"])
@pytest.mark.parametrize(
    ("joined", "step"),
    [
        ("noble:rank=4", 1),
        ("noble:budget=9%", 1),
        ("nonlinear-query", 1),
        ("rational:groups=8", 8),
        ("rational:groups=3+noble:rank=2,select=query", 3),
    ],
)
def test_matches_a_wider_mlp_joined_with_other_methods(joined, step, by):
    recipe = make_recipe()  # MLPs of width 48
    target, wide = arms("noble:rank=12,name=target", f"wide-mlp:match=target,by={by}+{joined}")
    resolved = resolve_matches(recipe, [target, wide])
    counted = {"parameters": parameters, "flops": flops}[by]
    hidden = resolved[1].settings["wide-mlp"]["hidden"]

    def count(hidden):
        return counted(recipe, Arm.parse(f"wide-mlp:hidden={hidden}+{joined}"))

    assert hidden > 48
    assert hidden % step == 0
    assert counted(recipe, resolved[1]) == count(hidden) >= counted(recipe, target)
    assert count(hidden - step) < counted(recipe, target)
    assert resolve_matches(recipe, resolved) == resolved


@pytest.mark.parametrize("hidden", [7, 33])
def test_matches_where_a_rank_falls_with_the_width(hidden):
    recipe = make_recipe()  # of width 32, below which an MLP's width is what a rank is a share of
    joined = "noble:rank_ratio=0.5"
    target, wide = arms(f"wide-mlp:hidden={hidden}+{joined},name=target", f"wide-mlp:match=target+{joined}")
    assert resolve_matches(recipe, [target, wide])[1].settings["wide-mlp"]["hidden"] == hidden
    small = [*arms("low-rank:rank=1,name=target"), wide]
    assert_refused("cannot match target: even with MLPs of width 1 it has", resolve_matches, recipe, small)


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (("noble:rank=4", "wide-mlp:match=noble-r8"), "unknown arm 'noble-r8'; choose from noble-r4"),
        (("noble:rank=4", "wide-mlp:match=noble-r4,name=a", "wide-mlp:match=a"), "which is matched itself"),
        (("baseline", "wide-mlp:match=me,name=me"), "which is matched itself"),
        (("low-rank:rank=1", "wide-mlp:match=low-rank-r1"), "even with MLPs of width 1"),
        (("sine-lowrank:rank=2,omega=50", "wide-mlp:match=sine-lowrank-r2-w50,by=flops"), "match its parameters"),
        (("noble:rank=4", "wide-mlp:match=noble-r4,hidden=9"), "sets hidden=9, but"),
        (("identity-query", "wide-mlp:match=identity-query+noble:rank=31"), "even with MLPs of width 1"),
        (("noble:rank=4", "wide-mlp:match=noble-r4+noble:rank=32"), "rank 32 is too high"),
        (("noble:rank=4", "wide-mlp:match=noble-r4+rational:groups=7"), "groups=7 do not divide the 48 channels"),
        (("training_helpers:no_module", "wide-mlp:match=training_helpers.no_module"), "gave back NoneType"),
    ],
)
def test_refuses_what_cannot_be_matched_in_one_line(tmp_path, texts, words):
    assert_refused(words, compare, make_recipe(), tmp_path / "out", arms=arms(*texts), quiet=True)
    assert not list(tmp_path.iterdir())


def test_matches_a_function_that_knows_of_no_method():
    mine, wide = arms("training_helpers:plain_module,name=mine", "wide-mlp:match=mine,by=flops")
    assert resolve_matches(make_recipe(), [mine, wide])[1].settings["hidden"] == make_recipe().task.backbone.hidden


@pytest.mark.parametrize(("init", "of_arm"), [("stock", True), ("noble", True), ("kaiming", False)])
def test_draws_the_wider_mlp_as_the_other_linears(init, of_arm):
    recipe = make_recipe()
    backbone = replace(recipe.task.backbone, width=128, hidden=96, dense_init="stock" if of_arm else init)
    recipe = replace(recipe, task=replace(recipe.task, backbone=backbone))
    arm = Arm.parse(f"wide-mlp:hidden=256{f',init={init}' if of_arm else ''}")
    plain = build_model(recipe, TEXT, arm)
    before = {name: parameter.clone() for name, parameter in plain.named_parameters()}
    wide = apply_arm(recipe, arm, plain)
    for layer in wide.model.layers:
        for linear in (layer.mlp.gate_up_proj, layer.mlp.down_proj, layer.self_attn.o_proj):
            d_in = linear.in_features
            std = {"stock": 0.02, "noble": 0.5 / d_in**0.5, "kaiming": (3 * d_in) ** -0.5}[init]
            assert linear.weight.std().item() == pytest.approx(std, rel=0.05)
    same = [name for name, parameter in wide.named_parameters() if parameter.shape == before[name].shape]
    assert all(torch.equal(wide.get_parameter(name), before[name]) for name in same)
    assert len(before) - len(same) == 4


@dataclass(frozen=True)
class ReadyTask(LanguageModelTask):
    def prepare(self, progress=True):
        return TEXT


def test_compares_matched_arms(tmp_path):
    recipe = make_recipe(steps=4, save_every=4, eval_every=2)
    recipe = replace(recipe, task=ReadyTask(text=recipe.task.text, backbone=recipe.task.backbone))
    chosen = arms("baseline", "noble:rank=4", "wide-mlp:match=noble-r4,init=noble")
    options = {"arms": chosen, "seeds": 2, "timing_rounds": 0, "quiet": True}
    results = compare(recipe, tmp_path / "out", **options).results
    found = {arm["name"]: arm for arm in results["arms"]}
    wide = found["wide-mlp-as-noble-r4-init-noble"]
    assert wide["parameters"] >= found["noble-r4"]["parameters"] > wide["parameters"] - 2 * 3 * 32
    assert (wide["control"], results["n"]) == (True, 2)
    hidden = wide["settings"]["settings"]["hidden"]
    report = render_report(results)
    assert f"`{wide['name']}` has MLPs of width {hidden} (MLPs of 48 in the recipe's model)" in report
    assert f"{wide['parameters']:,} for {found['noble-r4']['parameters']:,}" in report
    assert "Against the strongest control" in report
    assert "No control has as many parameters" not in report
    model = load_model(tmp_path / "out" / "runs" / wide["name"] / "lr-0.01" / "seed-1" / "model")
    assert model.config.intermediate_size == hidden
    other = arms("baseline:optimizer=muon,name=baseline", "noble:rank=4")
    options |= {"arms": other, "resume": True}
    assert_refused("optimizer of arm 'baseline' was None", compare, recipe, tmp_path / "out", **options)
