"""`augment(budget=...)` and `augment(select=...)`: how many and how wide the branches are."""

import pytest
from torch import nn
from transformers.pytorch_utils import Conv1D

import nonlinear_lowrank as nlr
from model_helpers import FAMILIES, batch
from nonlinear_lowrank import NobleConfig, UserError
from nonlinear_lowrank.analysis.importance import layer_importance, select_layers

VARIANTS = [
    NobleConfig(),
    NobleConfig(activation="gelu", depth=1),
    NobleConfig(activation="silu", depth=1, fusion="gated", up_bias=True),
]


def wide():
    return nn.Sequential(nn.Linear(96, 200), nn.Linear(200, 64), nn.Linear(64, 48))


@pytest.mark.parametrize("budget", ["5%", "12.5 % parameters", "20% of flops", "9% FLOPs"])
@pytest.mark.parametrize("config", VARIANTS, ids=lambda config: f"{config.activation}-{config.fusion}")
def test_the_budget_is_kept_and_used_up(config, budget):
    report = nlr.augment(wide(), config, budget=budget, verbose=False)
    share = float(budget.split("%")[0]) / 100
    of_flops = "flops" in budget.lower()

    def used(found):
        before = found.flops_before if of_flops else found.parameters_before
        return (found.flops_added if of_flops else found.parameters_added) / before

    assert 0 < used(report) <= share
    ratio = report.config.rank_ratio
    ranks = [int(min(shape) * ratio) for shape in ((96, 200), (200, 64), (64, 48))]
    next_ratio = min((rank + 1 + 1e-6) / width for rank, width in zip(ranks, (96, 64, 48), strict=True))
    more = nlr.augment(wide(), NobleConfig(**{**vars(report.config), "rank_ratio": next_ratio}), verbose=False)
    assert used(more) > share, "one step more is too much"


class Tied(nn.Module):
    """Two linears of one weight, or two Conv1Ds, and a third of its own."""

    def __init__(self, conv=False):
        super().__init__()
        self.a, self.b, self.body = (Conv1D(48, 48) if conv else nn.Linear(48, 48) for _ in range(3))
        self.b.weight = self.a.weight


@pytest.mark.parametrize("conv", [False, True], ids=["linear", "conv1d"])
@pytest.mark.parametrize("init", ["scratch", "pretrained"])
def test_the_budget_holds_where_linears_share_a_weight(init, conv):
    model = Tied(conv)
    report = nlr.augment(model, NobleConfig(init=init), budget="20%", verbose=False)
    assert model.a.weight is model.b.weight
    added = sum(parameter.numel() for parameter in model.parameters()) - report.parameters_before
    assert 0 < added == report.parameters_added <= 0.2 * report.parameters_before


def test_a_budget_is_saved_with_the_model(tmp_path):
    model = FAMILIES["llama"]()
    report = nlr.augment(model, NobleConfig(), budget="30%", verbose=False)
    model.save_pretrained(tmp_path)
    again = nlr.hub.load_model(tmp_path)
    assert sum(p.numel() for p in again.parameters()) == report.parameters_before + report.parameters_added


def test_the_chosen_layers_and_only_they_are_swapped():
    model = FAMILIES["llama"]()
    inputs = batch(model)
    chosen = select_layers(layer_importance(model, [{**inputs, "labels": inputs["input_ids"]}]), 70)
    report = nlr.augment(model, NobleConfig(rank=2), select=chosen, verbose=False)
    assert sorted(report.swapped) == sorted(chosen)
    assert "not in select" in report.skipped.values()


@pytest.mark.parametrize(
    ("config", "settings", "words"),
    [
        (NobleConfig(), {"budget": "0.1%"}, "rank 1 in 3 linears adds"),
        (NobleConfig(), {"budget": "0%"}, "cannot read the budget"),
        (NobleConfig(), {"budget": "much"}, "write '5%'"),
        (NobleConfig(), {"budget": 0.05}, "write '5%'"),
        (nlr.SineLowRankConfig(rank=4), {"budget": "5%"}, "give the rank itself"),
        (NobleConfig(rank=4), {"select": ["0", "9"]}, "'9', which is no linear"),
        (NobleConfig(rank=4), {"select": "0"}, "pass patterns as include="),
        (NobleConfig(rank=4), {"select": []}, "not in select"),
    ],
)
def test_wrong_input_changes_nothing(config, settings, words):
    model = wide()
    before = str(model)
    with pytest.raises(UserError, match=words) as caught:
        nlr.augment(model, config, verbose=False, **settings)
    assert "\n" not in str(caught.value)
    assert str(model) == before
