"""The warning where an optimizer trains branches without their multipliers: when, once, and when not."""

import copy
import gc
import pickle
import warnings
import weakref

import peft
import pytest
import torch
from torch import nn

import nonlinear_lowrank as nlr
from model_helpers import Attention

SGD, AdamW = torch.optim.SGD, torch.optim.AdamW


def augmented(config=None):
    model = nn.Sequential(nn.Linear(16, 12), nn.GELU(), nn.Linear(12, 8))
    if config is None:
        config = nlr.NobleConfig(rank=2)
    nlr.augment(model, config, verbose=False)
    return model


def warned(model, *optimizers, steps=1):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            for optimizer in optimizers:
                optimizer.step(lambda: 0.0)
    return [str(each.message) for each in caught if each.category is nlr.LearningRateWarning]


def by_role(model, **settings):
    return {group["role"]: group for group in nlr.param_groups(model, lr=1e-3, verbose=False, **settings)}


def test_model_parameters_are_warned_of_once_with_the_fix():
    model = augmented()
    optimizer = AdamW(model.parameters(), lr=1e-3)  # decays by 0.01
    (message,) = warned(model, optimizer, steps=3)
    ratio = (8 / 2) ** 0.45
    assert message == (
        "AdamW trains 12 tensors (noble.frequency, noble.mix, noble.phase, noble.up) without their learning-rate "
        f"multipliers (x {ratio:.3g} to 5) and decays 8 tensors (noble.frequency, noble.phase), which must not be "
        "decayed; use nlr.param_groups(model, lr=...), nlr.TrainerMixin or nlr.LearningRateCallback, or silence "
        "nlr.LearningRateWarning"
    )
    assert not warned(model, SGD(model.parameters(), lr=1e-3)), "the same model again"


def test_a_scheduler_that_gives_all_groups_one_rate_is_named():
    model = augmented()
    optimizer = AdamW(nlr.param_groups(model, lr=1e-3, verbose=False))
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=10)
    (message,) = warned(model, optimizer)
    assert "a scheduler gave all groups one rate: pass it [g['lr'] for g in optimizer.param_groups]" in message
    model = augmented()
    optimizer = AdamW(nlr.param_groups(model, lr=1e-3, verbose=False))
    rates = [group["lr"] for group in optimizer.param_groups]
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=rates, total_steps=10)
    assert not warned(model, optimizer)


def test_adapters_that_nothing_calls_any_more_are_named():
    def step(patched):
        model = nn.Sequential(nn.Linear(16, 12), nn.GELU(), nn.Linear(12, 8))
        model = peft.get_peft_model(model, nlr.NoraConfig(groups=2, target_modules=["1"], modules_to_save=["2"]))
        inner = model.base_model.model
        forward = (lambda x: inner[2](inner[0](x).relu())) if patched else model
        forward(torch.randn(3, 16)).square().sum().backward()
        AdamW(nlr.param_groups(model, lr=1e-3, verbose=False)).step()

    step(patched=False)
    with pytest.warns(UserWarning, match="no NoraActivation got a gradient: the model does not call them"):
        step(patched=True)


@pytest.mark.parametrize("settings", [{"foreach": True}, {"fused": True}])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_and_kinds_of_steps_are_seen(copied, settings):
    model = copied(augmented())
    with pytest.warns(nlr.LearningRateWarning) as caught:
        AdamW(model.parameters(), **settings).step()
    assert caught[0].filename == __file__


def adapted(config, **settings):
    return peft.get_peft_model(nn.Sequential(nn.Linear(16, 12)), config(r=2, target_modules=["0"], **settings))


def frozen():
    model = augmented()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("noble" not in name)
    return model


ONES = {"up_lr_power": 0, "mix_lr_power": 0, "frequency_lr": 1, "phase_lr": 1}
CALM = {
    "plain": lambda: nn.Sequential(nn.Linear(16, 12), nn.Linear(12, 8)),
    "sine": lambda: augmented(nlr.SineLowRankConfig(rank=2, omega=100)),
    "no multipliers": lambda: augmented(nlr.NobleConfig(rank=2, **ONES)),
    "frozen": frozen,
    "sine-LoRA": lambda: adapted(nlr.SineLoraConfig, omega=100),
}
WITH_MULTIPLIERS = {
    "noble": augmented,
    "gated": lambda: augmented(nlr.NobleConfig(rank=2, fusion="gated", up_bias=True)),
    "adapter": lambda: adapted(nlr.NobleAdapterConfig),
}


@pytest.mark.parametrize("name", [*CALM, *WITH_MULTIPLIERS])
def test_groups_of_ours_and_what_has_no_multipliers_are_not_warned_of(name):
    make = {**CALM, **WITH_MULTIPLIERS}[name]
    model = make()
    assert not warned(model, AdamW(nlr.param_groups(model, lr=3e-4, weight_decay=0.1, verbose=False)))
    model = make()
    trained = [each for each in model.parameters() if each.requires_grad]
    assert len(warned(model, AdamW(trained))) == (name in WITH_MULTIPLIERS)


def test_muon_and_a_ratio_of_ones_own_are_not_warned_of():
    model = augmented()
    assert not warned(model, nlr.MuonAdamW(nlr.param_groups(model, lr=1e-3, muon=True, verbose=False)))
    model = augmented()
    groups = by_role(model, muon=True)
    muon = torch.optim.Muon(groups.pop("dense")["params"], lr=0.02)
    assert not warned(model, muon, AdamW(groups.values()))
    model = augmented()
    groups = by_role(model)
    for role in ("noble.frequency", "noble.phase", "noble.up", "noble.mix"):
        groups[role]["lr"] = 2e-3
    assert not warned(model, SGD(groups.values()))


def test_one_learning_rate_for_all_that_lbfgs_asks_for_is_not_warned_of():
    model = augmented()
    assert not warned(model, torch.optim.LBFGS(model.parameters()), steps=3)


def test_rates_are_compared_within_a_layer():
    model = augmented()
    groups = []
    for place, factor in ((0, 1.0), (2, 0.25)):
        groups += [group | {"lr": group["lr"] * factor} for group in by_role(model[place]).values()]
    assert not warned(model, SGD(groups))
    model = augmented()
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters(), "lr": 0.3}]
    (message,) = warned(model, SGD(groups))
    assert message.startswith("SGD trains 12 tensors"), "those of both layers"


def sharing():
    model = Attention(16)
    nlr.augment(model, nlr.NobleConfig(rank=2, share_down="qkv"), verbose=False)
    return model


@pytest.mark.parametrize("make", [augmented, sharing], ids=["own", "shared down"])
def test_a_warm_up_that_begins_at_zero_hides_nothing(make):
    for groups, expected in ((lambda model: model.parameters(), 1), (lambda model: by_role(model).values(), 0)):
        model = make()
        optimizer = AdamW(groups(model), lr=1e-3, weight_decay=0.0)
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
        assert {group["lr"] for group in optimizer.param_groups} == {0.0}
        messages = warned(model, optimizer)
        assert len(messages) == expected
        assert all(f"{12 if make is augmented else 18} tensors" in each for each in messages)


def test_decay_alone_is_warned_of():
    model = augmented()
    groups = by_role(model)
    groups["noble.phase"]["weight_decay"] = 0.1
    (message,) = warned(model, AdamW(groups.values()))
    assert message.startswith("AdamW decays 4 tensors (noble.phase), which must not be decayed; use")


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Dynamo does not know:UserWarning")
def test_compiled_steps_go_on():
    model = augmented()
    optimizer = SGD(model.parameters(), lr=torch.tensor(0.5), foreach=True)
    before = [each.detach().clone() for each in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.compile(optimizer.step, backend="eager")()
    for parameter, old in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(parameter, old - 0.5)


def test_models_and_optimizers_are_not_kept():
    model = augmented()
    optimizer = SGD(model.parameters(), lr=0.1)
    assert len(warned(model, optimizer)) == 1
    kept = [weakref.ref(model[0]), weakref.ref(optimizer)]
    del model, optimizer
    gc.collect()
    assert [each() for each in kept] == [None, None]
