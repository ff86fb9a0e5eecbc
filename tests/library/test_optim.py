"""Parameter groups: the multiplier table, every parameter once, Muon split, state through files."""

import copy
import warnings
from functools import partial

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.utils import parametrizations, prune

import nonlinear_lowrank as nlr
from model_helpers import FAMILIES, batch
from nonlinear_lowrank import NobleConfig
from nonlinear_lowrank.optim import parameter_roles
from refusals import assert_refused

KINDS = {
    "muon": partial(torch.optim.Muon, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
    "adamw": partial(torch.optim.AdamW, betas=(0.9, 0.98)),
}


def by_name(groups):
    return {name: group for group in groups for name, _ in group["params"]}


@pytest.mark.parametrize("augmented", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_is_claimed_once(family, augmented):
    model = FAMILIES[family]()
    if augmented:
        nlr.augment(model, NobleConfig(rank=4), verbose=False)
    groups = nlr.param_groups(model, lr=1e-3, weight_decay=0.1, verbose=False)
    claimed = [name for group in groups for name, _ in group["params"]]
    assert sorted(claimed) == sorted(name for name, _ in model.named_parameters())
    found = by_name(groups)
    for name, parameter in model.named_parameters():
        assert any(parameter is p for n, p in found[name]["params"] if n == name)
        assert found[name]["weight_decay"] == (0.0 if parameter.ndim < 2 else 0.1), name


def test_multipliers_are_the_papers_table():
    model = nn.Sequential(nn.Linear(96, 48), nn.LayerNorm(48))
    nlr.augment(model, NobleConfig(rank=8), verbose=False)
    groups = by_name(nlr.param_groups(model, lr=2e-3, weight_decay=0.01, verbose=False))
    ratio = 48 / 8
    multipliers = dict.fromkeys(("0.dense.weight", "0.dense.bias", "0.noble_down", "1.weight", "1.bias"), 1)
    multipliers |= {"0.noble_up": ratio**0.6, "0.noble_mix1": ratio**0.45}
    multipliers |= {"0.noble_frequency1": 3, "0.noble_frequency2": 3, "0.noble_phase1": 5, "0.noble_phase2": 5}
    assert groups.keys() == multipliers.keys()
    for name, multiplier in multipliers.items():
        assert groups[name]["lr"] == pytest.approx(2e-3 * multiplier), name
        decays = name in ("0.dense.weight", "0.noble_down", "0.noble_up", "0.noble_mix1")
        assert groups[name]["weight_decay"] == (0.01 if decays else 0.0), name


def test_pruned_and_parametrized_branches_keep_their_roles():
    def model():
        made = nn.Sequential(nn.Linear(16, 16))
        nlr.augment(made, NobleConfig(rank=4), verbose=False)
        return made

    plain = parameter_roles(model())["0.noble_up"]
    pruned, normed, old = model(), model(), model()
    prune.l1_unstructured(pruned[0], "noble_up", 0.5)
    parametrizations.weight_norm(normed[0], "noble_up")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.nn.utils.weight_norm(old[0], "noble_up")
    for changed, names in (
        (pruned, ["0.noble_up_orig"]),
        (normed, ["0.parametrizations.noble_up.original0", "0.parametrizations.noble_up.original1"]),
        (old, ["0.noble_up_g", "0.noble_up_v"]),
    ):
        roles = parameter_roles(changed)
        assert [roles[name] for name in names] == [plain] * len(names)


def test_a_fresh_list_each_time_and_names_reach_the_optimizer(capsys):
    model = nn.Sequential(nn.Linear(16, 12), nn.Linear(12, 12).requires_grad_(False))
    nlr.augment(model, NobleConfig(rank=2), include="0", verbose=False)
    first = nlr.param_groups(model, lr=1e-3)
    printed = capsys.readouterr().out
    assert "noble.up" in printed
    assert "(x 5)  decay 0" in printed  # of the phases
    first[0].pop("params")
    optimizer = torch.optim.AdamW(nlr.param_groups(model, lr=1e-3, verbose=False))
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    assert sorted(names) == sorted(name for name, value in model.named_parameters() if value.requires_grad)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"lr": 0.0}, "lr"),
        ({"lr": float("nan")}, "lr"),
        ({"lr": "3e-4"}, "lr"),
        ({"lr": 1, "weight_decay": -1}, "decay"),
        ({}, "no trainable"),
    ],
)
def test_bad_arguments(arguments, word):
    model = nn.Linear(3, 3).requires_grad_("lr" in arguments)
    assert_refused(word, nlr.param_groups, model, **{"lr": 1, **arguments})
    assert_refused("takes the model, not its parameters", nlr.param_groups, model.parameters(), lr=1e-3)


def test_muon_gets_dense_matrices_only():
    model = FAMILIES["glm"]()
    nlr.augment(model, NobleConfig(rank=4), verbose=False)
    groups = by_name(nlr.param_groups(model, lr=1e-3, muon=True, verbose=False))
    matrices = {name for name, parameter in model.named_parameters() if parameter.ndim == 2}
    dense = {name for name in matrices if name.startswith("model.layers") and "noble" not in name}
    assert {name for name, group in groups.items() if group["optimizer"] == "muon"} == dense


@pytest.mark.parametrize(("family", "head"), [("llama", "lm_head"), ("vit", "classifier")])
def test_muon_leaves_a_head_that_peft_trains_to_adamw(family, head):
    tuned = get_peft_model(FAMILIES[family](), LoraConfig(r=2, target_modules="all-linear", modules_to_save=[head]))
    groups = by_name(nlr.param_groups(tuned, lr=1e-3, muon=True, verbose=False))
    heads = {name: group["optimizer"] for name, group in groups.items() if "modules_to_save" in name}
    assert heads
    assert {*heads.values()} == {"adamw"}
    assert {group["optimizer"] for name, group in groups.items() if "lora_A" in name} == {"muon"}


def test_muon_adamw_learns_equals_its_parts_and_survives_a_state_dict():
    model = FAMILIES["glm"]()
    nlr.augment(model, NobleConfig(rank=4), verbose=False)
    inputs = batch(model, size=4)
    twin = copy.deepcopy(model)

    def train(model, optimizers, steps):
        losses = []
        for _ in range(steps):
            losses.append(model(**inputs, labels=inputs["input_ids"]).loss)
            model.zero_grad()
            losses[-1].backward()
            for optimizer in optimizers:
                optimizer.step()
        return losses

    optimizer = nlr.MuonAdamW(nlr.param_groups(model, lr=3e-3, weight_decay=0.1, muon=True, verbose=False))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    losses = train(model, [optimizer], 5)
    assert losses[-1] < losses[0]
    scheduler.step()
    inner = {group["lr"] for inner in optimizer._inner for group in inner.param_groups}
    assert {group["lr"] for group in optimizer.param_groups} == inner
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"]

    groups = nlr.param_groups(twin, lr=3e-3, weight_decay=0.1, muon=True, verbose=False)
    split = {kind: [group for group in groups if group["optimizer"] == kind] for kind in KINDS}
    own = ("params", "lr", "weight_decay")
    parts = [KINDS[kind]([{key: group[key] for key in own} for group in split[kind]]) for kind in KINDS]
    train(twin, parts, 5)
    for ours, reference in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, reference)

    resumed = copy.deepcopy(model)
    again = nlr.MuonAdamW(nlr.param_groups(resumed, lr=9.0, muon=True, verbose=False))
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, [optimizer], 2)
    train(resumed, [again], 2)
    for ours, reference in zip(resumed.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, reference)


def muon_and_adamw():
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
    return model, nlr.MuonAdamW(nlr.param_groups(model, lr=0.1, muon=True, verbose=False))


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_a_group_that_is_added_is_trained(kind):
    _, optimizer = muon_and_adamw()
    late, alone = (nn.Parameter(value) for value in torch.randn(3, 4).expand(2, 3, 4).clone())
    optimizer.add_param_group({"params": [("late", late)], "optimizer": kind, "lr": 0.2})
    reference = KINDS[kind]([alone], lr=0.2, weight_decay=0.0)
    for _ in range(3):
        late.grad = torch.randn(3, 4)
        alone.grad = late.grad.clone()
        optimizer.step()
        reference.step()
    torch.testing.assert_close(late, alone)
    assert optimizer.state_dict()["param_groups"][-1]["lr"] == 0.2


def test_a_group_that_cannot_be_added_changes_nothing():
    assert_refused("muon=True", nlr.MuonAdamW, nn.Linear(3, 3).parameters())
    for shape, fix in ((2,), "use torch.optim.AdamW"), ((2, 2), "use torch.optim.Muon"):
        group = {"params": [nn.Parameter(torch.ones(shape))], "optimizer": "adamw" if len(shape) == 1 else "muon"}
        assert_refused(fix, nlr.MuonAdamW, [group])
    _, optimizer = muon_and_adamw()
    before = len(optimizer.param_groups)
    vector = [("late", nn.Parameter(torch.ones(3)))]
    for group, message in (
        ({"params": vector}, "must have optimizer 'muon' or 'adamw', got None"),
        ({"params": vector, "optimizer": "muon"}, "Muon is for matrices"),
    ):
        assert_refused(message, optimizer.add_param_group, group)
        assert len(optimizer.param_groups) == before


def test_a_copy_of_muon_adamw_goes_on_by_itself():
    model, optimizer = muon_and_adamw()
    inputs = torch.randn(8, 6)

    def step(model, optimizer):
        optimizer.zero_grad()
        model(inputs).square().sum().backward()
        optimizer.step()

    step(model, optimizer)
    twin, copied = copy.deepcopy((model, optimizer))
    step(model, optimizer)
    assert not any(torch.equal(*pair) for pair in zip(model.parameters(), twin.parameters(), strict=True))
    step(twin, copied)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), twin.parameters(), strict=True))


def test_a_closure_computes_the_loss_and_its_gradients():
    model, optimizer = muon_and_adamw()
    inputs = torch.randn(8, 6)

    def closure():
        optimizer.zero_grad()
        loss = model(inputs).square().sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure) for _ in range(3)]
    assert losses[-1] < losses[0]


def test_groups_that_say_nothing_have_the_optimizers_rate_and_decay():
    linear = nn.Linear(6, 5)
    groups = [{"params": [linear.weight], "optimizer": "muon"}, {"params": [linear.bias], "optimizer": "adamw"}]
    optimizer = nlr.MuonAdamW(groups, lr=0.2, weight_decay=0.1)
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(0.2, 0.1)] * 2
