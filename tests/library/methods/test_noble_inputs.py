"""`NobleConfig(share_down="qkv")`: the same formula with one down projection, its counts, its hand-off, its refusals.

Files, fresh processes, types, training and resuming are in test_replaced.py.
"""

import copy
import threading

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import nonlinear_lowrank as nlr
from model_helpers import FAMILIES, batch
from nlr_lab.compare.models.measure import recompute
from nlr_lab.plan.inspect import inspect_model
from nlr_lab.training import Arm
from nonlinear_lowrank import NobleConfig, UserError
from nonlinear_lowrank.analysis.cost import model_cost
from nonlinear_lowrank.methods.noble import layer as noble_layer
from nonlinear_lowrank.methods.noble.reference import noble_linear_reference
from nonlinear_lowrank.methods.noble.inputs import qkv_groups

NAMES = ("q_proj", "k_proj", "v_proj")
SEPARATE = ("llama", "glm", "opt", "eurobert", "vit", "image_tokens")
VARIANTS = [{}, {"fusion": "gated"}, {"activation": "gelu", "depth": 1, "up_bias": True}, {"dropout": 0.3}]


class Attention(nn.Module):
    """What a group needs of an attention: three linears on one input."""

    def __init__(self, width=32, others=32):
        super().__init__()
        self.q_proj = nn.Linear(width, width)
        self.k_proj, self.v_proj = nn.Linear(width, others), nn.Linear(width, others, bias=False)

    def forward(self, x, memory=None):
        read = x if memory is None else memory
        return torch.cat([self.q_proj(x), self.k_proj(read), self.v_proj(read)], dim=-1)


def shared(model, **settings):
    nlr.augment(model, NobleConfig(**{"rank": 4, "share_down": "qkv", **settings}), verbose=False)
    return model


def separate_of(model, make, **settings):
    """A model of branches with a down projection each, which are equal."""
    other = make()
    nlr.augment(other, NobleConfig(**{"rank": 4, **settings}), verbose=False)
    state = model.state_dict()
    for group in qkv_groups([name for name, module in model.named_modules() if hasattr(module, "noble_up")]):
        state |= {f"{name}.noble_down": state[f"{group[0]}.noble_down"] for name in group[1:]}
    other.load_state_dict(state)
    return other


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
@pytest.mark.parametrize("others", [32, 16])
def test_it_is_the_formula_with_equal_down_projections(settings, others):
    model = shared(Attention(others=others).double(), **settings)
    other = separate_of(model, lambda: Attention(others=others).double(), **settings)
    x = torch.randn(3, 5, 32, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(3, 5, 32 + 2 * others, dtype=torch.float64)
    found = []
    for each in (model, other):
        torch.manual_seed(1)  # dropout
        y = each(x)
        found.append((y, *torch.autograd.grad(y, [x, *each.parameters()], dy)))
    torch.testing.assert_close(found[0][:2], found[1][:2])
    ours = dict(zip([name for name, _ in model.named_parameters()], found[0][2:], strict=True))
    theirs = dict(zip([name for name, _ in other.named_parameters()], found[1][2:], strict=True))
    theirs["q_proj.noble_down"] = sum(theirs.pop(f"{name}.noble_down") for name in NAMES)
    assert ours.keys() == theirs.keys()
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("family", SEPARATE)
def test_counts(family, monkeypatch):
    monkeypatch.setattr(noble_layer, "noble_linear", noble_linear_reference)
    plain, alone, model = (FAMILIES[family]().eval() for _ in range(3))
    one = nlr.augment(alone, NobleConfig(rank=4), verbose=False)
    report = nlr.augment(model, NobleConfig(rank=4, share_down="qkv"), verbose=False)
    saved = 2 * 2 * 4 * 32  # in each of two layers the down projections of k and v
    assert report.parameters_added == one.parameters_added - saved
    assert report.flops_added == one.flops_added - 2 * saved
    assert "one down projection" in str(report)
    assert sum(p.numel() for p in model.parameters()) == report.parameters_before + report.parameters_added
    cost = model_cost(model, 9)
    assert (cost.branch_parameters, cost.branch_flops) == (report.parameters_added, report.flops_added)
    assert cost.parameters - cost.branch_parameters == sum(p.numel() for p in plain.parameters())
    inputs = batch(model)
    counts = []
    for each in (alone, model):
        each.set_attn_implementation("eager")
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            each(**inputs)
        counts.append(counter.get_total_flops())
    tokens = 2 * (17 if family == "vit" else 9)
    assert counts[0] - counts[1] == 2 * saved * tokens, "what is saved is not computed either"
    roles = nlr.param_groups(model, lr=1e-3, verbose=False)
    assert sum(len(group["params"]) for group in roles) == len(list(model.parameters()))


def test_fewer_bytes_are_kept():
    alone, model = FAMILIES["glm"](), shared(FAMILIES["glm"](), rank=8)
    nlr.augment(alone, NobleConfig(rank=8), verbose=False)
    kept = [inspect_model(each, 9, 2).kept_bytes for each in (alone, model)]
    assert kept[0] - kept[1] == 2 * 2 * (2 * 9) * 8 * 4  # h of k and v, in two layers
    kept = [inspect_model(each, 9, 2, bf16=True).kept_bytes for each in (alone, model)]
    assert kept[0] - kept[1] == 2 * 2 * (2 * 9) * (8 + 32) * 2  # and their copies of x


@pytest.mark.parametrize("budget", ["20%", "25% flops"])
def test_a_budget_knows_of_it(budget):
    reports = [
        nlr.augment(Attention(256, 128), NobleConfig(share_down=share), budget=budget, verbose=False)
        for share in ("none", "qkv")
    ]
    for report in reports:
        of_flops = "flops" in budget
        before = report.flops_before if of_flops else report.parameters_before
        added = report.flops_added if of_flops else report.parameters_added
        assert 0 < added / before <= float(budget.split("%")[0]) / 100
    assert reports[1].config.rank_ratio > reports[0].config.rank_ratio, "the same budget gives higher ranks"


def test_narrow_keys_give_the_group_its_rank():
    model = shared(FAMILIES["llama"](), rank_ratio=0.25)  # queries 32 wide, keys and values 16
    attention = model.model.layers[0].self_attn
    assert {getattr(attention, name).noble_rank for name in NAMES} == {4}
    assert attention.o_proj.noble_rank == 8
    assert "noble_down" not in dict(attention.k_proj.named_parameters())
    assert "down projection shared" in repr(attention.k_proj)


def test_two_of_three_may_share():
    model = Attention()
    nlr.augment(model, NobleConfig(rank=4, share_down="qkv"), exclude="q_proj", verbose=False)
    assert [name for name, _ in model.named_parameters() if "noble_down" in name] == ["k_proj.noble_down"]


# --- the hand-off --------------------------------------------------------------------------------------------


def expected(model, x, memory=None):
    return separate_of(model, Attention)(x, memory)


def test_nothing_is_left_over_after_a_pass():
    model = shared(Attention())
    model(torch.randn(2, 32))
    assert model.q_proj.noble_shared.hand_off._held is None
    model.q_proj(torch.randn(2, 32))
    again = copy.deepcopy(model)  # tensors of a graph cannot be copied
    assert again.v_proj.noble_shared.owner is again.q_proj


def test_keys_of_another_input_get_a_product_of_their_own():
    model, x, memory = shared(Attention()), torch.randn(2, 32), torch.randn(2, 32)
    torch.testing.assert_close(model(x, memory), expected(model, x, memory))


def test_a_product_is_not_used_when_it_is_stale():
    model, x = shared(Attention()), torch.randn(2, 32)
    with torch.no_grad():
        model.q_proj(x)
        model.q_proj.noble_down.add_(torch.randn(4, 32))
        torch.testing.assert_close(model.k_proj(x), expected(model, x)[:, 32:64])
        x.add_(1)
        torch.testing.assert_close(model.v_proj(x), expected(model, x)[:, 64:])
        model.q_proj(x)
    gradient = torch.autograd.grad(model.k_proj(x).sum(), model.q_proj.noble_down)[0]
    assert gradient.abs().sum() > 0, "not the product of the pass without gradients"
    model.k_proj(x).sum().backward()  # and a second time: its graph was freed


def test_inference_mode_autocast_and_compile_agree():
    model, x = shared(Attention()), torch.randn(2, 32)
    right = model(x).detach()
    with torch.inference_mode():
        torch.testing.assert_close(model(x), right)
        torch.testing.assert_close(model(x.clone()), right)
    with torch.autocast("cpu", torch.bfloat16):
        half = model(x)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), right, rtol=0.05, atol=0.1)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    gradients = []
    for each in (model, compiled):
        y = each(x)
        torch.testing.assert_close(y, right)
        gradients.append(torch.autograd.grad(y.square().sum(), list(model.parameters())))
    torch.testing.assert_close(*gradients)


def test_gradient_checkpointing_gives_the_same_gradients():
    model = shared(FAMILIES["glm"]()).train()
    inputs = batch(model)
    found = []
    for again in (False, True):
        if again:
            recompute(model)
        model.zero_grad()
        model(**inputs, labels=inputs["input_ids"]).loss.backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    torch.testing.assert_close(*found)


def test_threads_do_not_take_each_others_products():
    model = shared(Attention())
    inputs = [torch.randn(2, 32) for _ in range(4)]
    right = [model(x).detach() for x in inputs]
    wrong = []

    def run(index):
        with torch.no_grad():
            for _ in range(200):
                if not torch.equal(model(inputs[index]), right[index]):
                    wrong.append(index)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# --- refusals ------------------------------------------------------------------------------------------------


class Cross(nn.Module):
    def __init__(self):
        super().__init__()
        self.to_q, self.to_k = nn.Linear(32, 32), nn.Linear(48, 32)


@pytest.mark.parametrize(
    ("make", "choice", "words"),
    [
        (FAMILIES["gpt2"], {}, r"a fused one \(c_attn, qkv\) has a single down projection anyway"),
        (FAMILIES["glm"], {"include": r".*mlp\..*"}, "needs separate query, key and value projections"),
        (Cross, {}, "these read different widths: to_q 32, to_k 48"),
        (FAMILIES["gpt2"], {"budget": "20%"}, "leave share_down out"),
    ],
    ids=["fused", "absent", "cross-attention", "budget"],
)
def test_what_cannot_share_is_refused_and_nothing_changes(make, choice, words):
    model = make()
    before = str(model)
    with pytest.raises(UserError, match=words) as caught:
        nlr.augment(model, NobleConfig(rank=4, share_down="qkv"), verbose=False, **choice)
    assert "\n" not in str(caught.value)
    assert str(model) == before


def test_other_wrong_inputs():
    with pytest.raises(UserError, match="unknown share_down 'q'; choose one of none, qkv"):
        NobleConfig(share_down="q")
    with pytest.raises(UserError, match="start the processes with torchrun"):
        shared(Attention()).q_proj._replicate_for_data_parallel()


def test_an_arm_says_it():
    arm = Arm.parse("noble:rank=4,share_down=qkv")
    assert str(arm) == "noble:rank=4,share_down=qkv"
    assert arm.name == "noble-r4-share_down-qkv"
    model = arm.apply(FAMILIES["opt"]())
    assert [name for name, _ in model.named_parameters() if name.endswith("k_proj.noble_down")] == []
