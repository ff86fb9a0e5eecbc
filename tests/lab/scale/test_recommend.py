"""Predictions by a ladder: exact laws give exact differences, in equal hours too; budgets and refusals."""

import json
import math
import re
from pathlib import Path

import pytest
import torch

import nonlinear_lowrank as nlr
from cli_helpers import refused, succeed
from nlr_lab.recipes import get_recipe
from nlr_lab.runtime.storage import read_json
from nlr_lab.scale.fits import Laws
from nlr_lab.scale.ladder import inner_parameters
from nlr_lab.scale.recommend import recommend, sentence
from nlr_lab.scale.record import EVIDENCE, evidence, laws_of
from nlr_lab.training.arms import Arm
from nonlinear_lowrank.analysis.cost import model_cost
from nonlinear_lowrank.errors import UserError
from task_helpers import byte_tokenizer, tiny_model

STUDY = Path(__file__).parents[3] / "studies" / "ladder"
LENGTH = 128
ARMS = {
    "plain": "baseline",
    "wide": "wide-mlp:match=noble,by=flops",
    "noble": "noble:rank_ratio=0.125",
    "noble-16": "noble:rank_ratio=0.0625",
    "noble-4": "noble:rank_ratio=0.25",
    "cola": "cola",
}


def build():
    return get_recipe("llm-demo").task.build_on_meta()


def loss(compute, saving=1.0):
    return 4 * (saving * compute / 1e12) ** -0.1


def settings(text, width=0):
    """An arm's settings, as the record of a rung keeps them."""
    arm = Arm.parse(text)
    own = arm.settings | ({"hidden": 3 * width} if "match" in arm.settings else {})
    kept = {"dense_init": arm.dense_init, "qk_norm": arm.qk_norm, "optimizer": arm.optimizer}
    return {"method": arm.method, "settings": own, **kept}


def rungs(saving, *, step_time=1.0, spread=1.0, noise=0.01, tokens=20.0):
    """A ladder on which each arm needs `saving[arm]` times fewer FLOPs than plain; steps are known to a factor."""
    apart = [-noise, 0, noise]
    return [
        {
            "width": width,
            "tokens": tokens,
            "n": 3,
            "reference": "plain",
            "arms": {
                name: {
                    "settings": settings(ARMS[name], width),
                    "compute": compute,
                    "losses": [loss(compute, each) + more for more in apart],
                    "step_time_ratio": {"median": 1.0 if name == "plain" else step_time}
                    | {"low": step_time / spread, "high": step_time * spread},
                }
                for name, each in {"plain": 1.0, **saving}.items()
            },
        }
        for width, compute in ((32, 1e12), (48, 4e12), (64, 2e13))
    ]


def found(ladder, **more):
    return recommend(build, ladder, sequence_length=LENGTH, **{"tokens": 20.0, **more})


@pytest.mark.parametrize("step_time", [1.0, 1.5])
def test_differences_are_those_of_the_laws_at_the_models_own_cost(step_time):
    told = found(rungs({"noble": 2.0}, step_time=step_time))
    plain = build()
    cost, size = model_cost(plain, LENGTH), inner_parameters(plain)
    assert (told.size, told.tokens) == (size, 20 * size)
    assert told.compute == 3 * 20 * size * cost.flops
    (noble,) = told.choices
    mine = told.compute * (1 + noble.flops)
    assert noble.delta.value == pytest.approx(loss(mine, 2) - loss(told.compute), abs=0.01)
    assert noble.hours.value == pytest.approx(loss(mine, 2) - loss(step_time * told.compute), abs=0.01)
    assert noble.text == "noble:rank_ratio=0.125"
    assert noble.parameters == pytest.approx(0.118, abs=0.001)


def test_hours_are_as_uncertain_as_the_steps_that_were_timed():
    widths = []
    for spread in (1.0, 1.2, 1.5):
        told = found(rungs({"noble": 2.0}, step_time=1.5, spread=spread))
        (noble,) = told.choices
        assert noble.hours.value == pytest.approx(noble.delta.value, abs=0.2)
        widths.append(noble.hours.high - noble.hours.low)
        assert "Hours are by step times measured at width 64 on the ladder's machine." in sentence(told, None)
    # A factor of 1.5 either way is 2 * 0.1 * log(1.5) of the loss, which is near 4 * (C / 1e12)^-0.1.
    level = loss(1.5 * told.compute)
    assert widths[2] ** 2 - widths[0] ** 2 == pytest.approx((2 * 0.1 * math.log(1.5) * level) ** 2, rel=0.2)
    assert widths[0] < widths[1] < widths[2]


def test_an_arm_is_timed_at_its_largest_rung_that_was():
    ladder = rungs({"noble": 2.0, "cola": 1.5, "wide": 1.2}, step_time=1.5)
    ladder[0]["arms"]["cola"]["step_time_ratio"] = {"median": 1.1, "low": 1.0, "high": 1.2}
    for rung in ladder:
        rung["arms"]["wide"]["step_time_ratio"] = None
        if rung["width"] > 32:
            rung["arms"]["cola"]["step_time_ratio"] = None
    told = found(ladder)
    by_arm = {each.arm: each for each in told.choices}
    assert (by_arm["cola"].step_time, by_arm["cola"].timed_width) == (1.1, 32)
    assert (by_arm["noble"].step_time, by_arm["noble"].timed_width) == (1.5, 64)
    assert by_arm["cola"].hours.value < by_arm["cola"].delta.value + 0.1
    assert (by_arm["wide"].step_time, by_arm["wide"].hours) == (None, None)
    text = sentence(told, None)
    assert "step times measured at widths 32, 64 on" in text
    assert "Hours unknown for: wide (" in text


def test_an_arm_whose_code_a_strangers_ladder_names_is_not_called(tmp_path):
    ladder = rungs({"noble": 2.0})
    for rung in ladder:
        arm = rung["arms"]["noble"]
        setup = f"open({str(tmp_path / 'ran')!r}, 'w')"
        called = {"method": "timeit:timeit", "settings": {"setup": setup, "number": 0}}
        rung["arms"]["other"] = arm | {"settings": arm["settings"] | called}
    told = found(ladder)
    assert told.skipped == ("other: calls timeit:timeit, code that the ladder only names",)
    assert [each.arm for each in told.choices] == ["noble"]
    assert not (tmp_path / "ran").exists()


def test_the_shipped_recommendation_is_not_that_of_a_seed():
    ladder, highs = read_json(EVIDENCE)["rungs"], []
    told = found(ladder)
    best = told.best
    laws = laws_of([rung for rung in ladder if rung["tokens"] == 20], best.arm, "plain")
    for seed in range(1, 9):
        other = Laws(laws.compute, laws.losses, seed)
        longer = told.compute * best.step_time
        highs.append(other.predict(best.arm, told.compute * (1 + best.flops), ("plain", longer)).high)
    assert max(highs) < 0


def test_arms_of_fewer_rungs_or_that_diverged_are_not_recommended():
    ladder = rungs({"noble": 1.5, "cola": 4.0, "noble-4": 4.0})
    del ladder[2]["arms"]["cola"]
    ladder[1]["arms"]["noble-4"]["losses"][0] = None
    told = found(ladder)
    lacks = {each.arm: (each.widths, each.lacks) for each in told.choices}
    whole, first, ends = (32, 48, 64), (32, 48), (32, 64)
    assert lacks == {"noble": (whole, ""), "cola": (first, "not run at 64"), "noble-4": (ends, "diverged at 48")}
    assert all(each.gains for each in told.choices)
    assert told.best.arm == "noble"
    assert "(widths 32, 48, 64, 3 seeds each); the best of 1 that were run up to width 64" in sentence(told, None)


def test_what_gains_in_steps_and_loses_in_hours_is_not_recommended():
    fast, slow = (found(rungs({"noble": 2.0}, step_time=each)) for each in (1.0, 4.0))
    assert fast.best.arm == "noble"
    assert "noble:rank_ratio=0.125: -" in sentence(fast, None)
    assert slow.best is None
    assert slow.choices[0].delta.high < 0 < slow.choices[0].hours.low
    assert sentence(slow, None).startswith("Train it plain")


def test_the_lowest_loss_within_the_budget_is_recommended():
    ladder = rungs({"noble": 4.0, "cola": 2.0})
    assert found(ladder).best.arm == "noble"
    told = found(ladder, budget="5% flops")
    assert told.best.arm == "cola"
    assert [each.fits for each in told.choices] == [False, True]
    assert f"rank_ratio={told.rank_ratio:.3g}" in sentence(told, "5% flops")


def test_the_highest_measured_rank_within_the_budget_is_named():
    ladder = rungs({"noble-4": 3.0, "noble": 2.0, "noble-16": 1.5})
    told = found(ladder, budget="8%")
    assert [each.fits for each in told.choices] == [False, False, True]
    assert (told.best.arm, told.highest.arm, told.rank_ratio) == ("noble-16", "noble-16", None)
    assert "that was measured: noble:rank_ratio=0.0625." in sentence(told, "8%")
    assert found(ladder, budget="15%").highest.arm == "noble"
    assert found(ladder).highest is None
    assert found(ladder, budget="2%").rank_ratio < 0.0625


def test_a_matched_control_costs_what_its_arm_does():
    told = found(rungs({"wide": 1.0, "noble": 2.0}))
    noble, wide = told.choices
    assert (wide.arm, wide.flops) == ("wide", noble.flops)
    assert wide.parameters == pytest.approx(noble.parameters, rel=0.05)


def test_arms_are_those_of_the_record_whatever_their_names():
    ladder = rungs({"noble": 2.0, "wide": 1.5})
    for rung in ladder:
        rung["arms"]["noble"]["settings"] = settings("noble:rank_ratio=0.0625,activation=tanh,depth=1")
        rung["arms"]["wide"]["settings"] = settings("wide-mlp:match=noble", rung["width"])
        rung["arms"]["mine"] = rung["arms"]["noble"] | {"settings": settings("noble:rank=4")}
    told = found(ladder)
    by_arm = {each.arm: each for each in told.choices}
    assert by_arm["noble"].text == "noble:rank_ratio=0.0625,activation=tanh,depth=1"
    assert by_arm["mine"].text == "noble:rank=4"
    for name, each in by_arm.items():
        if name != "wide":
            cost = model_cost(Arm.parse(each.text).apply(build()), LENGTH)
            assert each.flops == cost.flops / model_cost(build(), LENGTH).flops - 1
    assert by_arm["wide"].parameters == by_arm["noble"].parameters
    assert by_arm["wide"].flops == pytest.approx(by_arm["noble"].flops, rel=0.1)


def test_arms_whose_settings_differ_between_rungs_are_skipped():
    ladder = rungs({"noble": 2.0})
    ladder[0]["arms"]["noble"]["settings"] = settings("noble:rank=4")
    told = found(ladder)
    assert told.skipped == ("noble: its settings differ between the rungs",)
    assert sentence(told, None).startswith("No arm of the ladder can be predicted")


def test_a_ladder_beside_another_model_than_the_plain_one_is_refused():
    ladder = rungs({"noble": 2.0})
    for rung in ladder:
        rung["reference"] = "noble"
    with pytest.raises(UserError, match=r"compares with noble:rank_ratio=0\.125, and not with a plain model"):
        found(ladder)


def test_far_sizes_and_arms_that_cannot_be_built_are_said():
    near = found(rungs({"noble": 2.0}))
    assert near.times < 10
    assert near.best.arm == "noble"
    ladder = rungs({"wide": 1.5, "cola": 2.0})
    told = recommend(get_recipe("llm-base").task.build_on_meta, ladder, sequence_length=1024, tokens=20.0)
    assert told.skipped == ("wide: noble, which it matches, is not in the ladder",)
    assert told.best is None
    assert told.choices[0].gains
    assert sentence(told, None).startswith("No recommendation: the model takes ")


def test_a_ladder_that_was_not_climbed_there_is_refused():
    with pytest.raises(UserError, match=r"no two widths at 5 tokens .* among 20, or climb"):
        found(rungs({"noble": 2.0}), tokens=5.0)
    with pytest.raises(UserError, match="at 20 tokens a parameter; climb there"):
        found(rungs({"noble": 2.0})[:1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: model.model, "a ladder is of causal language models, not of a"),
        (lambda model: nlr.augment(model, nlr.NobleConfig(rank=4), verbose=False) and model, "augmented already"),
    ],
)
def test_models_of_another_kind_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        recommend(lambda: change(build()), rungs({"noble": 2.0}), sequence_length=LENGTH, tokens=20.0)


def test_the_packaged_ladder_is_the_studys():
    assert read_json(EVIDENCE) == evidence(read_json(STUDY / "results.json"))


def test_command_of_a_recipe(capsys):
    out = succeed(capsys, "recommend", "llm-demo", "--budget", "5%")
    assert "791,680 parameters outside embeddings" in out
    assert "above the budget" in out
    assert len(re.findall(r" \d\.\d\d \(\d+\) ", out)) == 8, "a step time and its width for each arm"
    assert "Hours unknown" not in out
    assert out.count("not run at 128\n") == 5
    told = json.loads(succeed(capsys, "recommend", "llm-demo", "--json"))
    arms = {"stock", "wide", "noble", "muon", "noble-muon", "query", "cola", "sltrain"}
    assert {each["arm"] for each in told["choices"]} == arms


def test_command_of_a_trained_model_and_a_ladder_of_ones_own(capsys, tmp_path):
    tokenizer = byte_tokenizer()
    tiny_model(tokenizer, dtype=torch.float32).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "text").write_text("A text of some length. " * 100)
    (tmp_path / "ladder.json").write_text(json.dumps({"rungs": rungs({"noble": 2.0})}))
    arguments = ["--ladder", tmp_path / "ladder.json", "--source", tmp_path / "text"]
    out = succeed(capsys, "recommend", tmp_path / "model", *arguments, "--sequence-length", 16)
    assert "noble:rank_ratio=0.125" in out
    assert "linears score highest" in out
    older = rungs({"noble": 2.0})
    del older[1]["arms"]["noble"]["settings"]
    for damaged in (older, [{"width": 8}], ["w"], [older[0] | {"arms": ["plain"]}]):
        (tmp_path / "ladder.json").write_text(json.dumps({"rungs": damaged}))
        error = refused(capsys, "recommend", "llm-demo", "--ladder", tmp_path / "ladder.json")
        assert "ladder.json is not the record of a ladder, or an earlier version wrote it; run nlr scale" in error
