"""NOBLE layers that read one input: `share_down="qkv"` and `fuse_shared_inputs`, alone equal to the plain layers.

Files, fresh processes, types, training and resuming with a shared projection are in test_replaced.py.
"""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

import nonlinear_lowrank as nlr
from model_helpers import FAMILIES, Attention, batch, llama
from nonlinear_lowrank import NobleConfig, UserError
from nonlinear_lowrank.analysis.cost import model_cost
from nonlinear_lowrank.methods.base import method_of_config
from nonlinear_lowrank.methods.names import qkv_groups
from nonlinear_lowrank.methods.noble import layer as noble_layer
from nonlinear_lowrank.methods.noble.op import noble_linear_reference

SHARED, FUSED = {"share_down": "qkv"}, {"fuse_shared_inputs": True}
ways = pytest.mark.parametrize("options", [SHARED, FUSED, SHARED | FUSED], ids=["shared", "fused", "both"])


def with_branches(make, options, **settings):
    settings = {"rank": 4, "up_scale": 1.0, **settings}
    model, alone = make(), make()
    nlr.augment(model, NobleConfig(**settings, **options), verbose=False)
    nlr.augment(alone, NobleConfig(**settings), verbose=False)
    state = model.state_dict()
    if "share_down" in options:
        for group in qkv_groups([name for name, module in model.named_modules() if hasattr(module, "noble_up")]):
            state |= {f"{name}.noble_down": state[f"{group[0]}.noble_down"] for name in group[1:]}
    alone.load_state_dict(state)
    return model, alone


def gradients(model):
    """Return gradients by name; a shared down projection's are added up."""
    found = {name: each.grad for name, each in model.named_parameters()}
    for name in [name for name in found if name.endswith(("k_proj.noble_down", "v_proj.noble_down"))]:
        found[name.replace("k_proj", "q_proj").replace("v_proj", "q_proj")] += found.pop(name)
    return found


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({}, SHARED),
        ({"fusion": "gated"}, SHARED),
        ({"activation": "gelu", "depth": 1, "up_bias": True}, SHARED),
        ({"dropout": 0.3}, SHARED),
        ({}, FUSED),
        ({"depth": 3, "up_bias": True, "output_scale": 1.5}, FUSED),
        ({"bottleneck_bias": True}, FUSED),
        ({"activation": "silu", "depth": 1}, SHARED | FUSED),
    ],
    ids=str,
)
@pytest.mark.parametrize("others", [32, 16])
def test_outputs_and_gradients_are_those_of_layers_alone(settings, options, others):
    bias = "fuse_shared_inputs" in options  # only layers that all have a bias, or none, are fused
    model, alone = with_branches(lambda: Attention(others=others, bias=bias).double(), options, **settings)
    x, dy = torch.randn(3, 5, 32, dtype=torch.float64), torch.randn(3, 5, 32 + 2 * others, dtype=torch.float64)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outputs = []
    for each, read in zip((model, alone), inputs, strict=True):
        torch.manual_seed(1)  # dropout
        outputs.append(each(read))
        outputs[-1].backward(dy)
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(*(each.grad for each in inputs))
    torch.testing.assert_close(gradients(model), gradients(alone))


@ways
def test_losses_and_gradients_of_a_model_are_the_same(options):
    model, alone = (each.double() for each in with_branches(llama, options))
    inputs = batch(model)
    losses = [each(**inputs, labels=inputs["input_ids"]).loss for each in (model, alone)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses, rtol=1e-6, atol=1e-8)  # norms are float32
    torch.testing.assert_close(gradients(model), gradients(alone), rtol=1e-4, atol=1e-7)
    if "fuse_shared_inputs" in options:
        groups = [each.noble_group for each in model.modules() if isinstance(each, nlr.NobleLinear)]
        sizes = sorted(len(group.layers) for group in groups if group is not None)
        assert sizes == sorted([3, 3, 3, 2, 2] * len(model.model.layers))
        assert "computed with its neighbours" in repr(model)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
def test_models_train_with_gradient_checkpointing():
    model, _ = with_branches(FAMILIES["glm"], SHARED | FUSED)
    other, inputs, found = copy.deepcopy(model), batch(model), []
    other.gradient_checkpointing_enable({"use_reentrant": False})
    for each in (model, other.train()):
        each(**inputs, labels=inputs["input_ids"]).loss.backward()
        found.append({name: parameter.grad for name, parameter in each.named_parameters()})
    torch.testing.assert_close(*found)


def test_saved_models_stay_grouped(tmp_path):
    model, _ = with_branches(llama, FUSED)
    inputs = batch(model)
    model.eval().save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert again.model.layers[0].self_attn.q_proj.noble_group is not None
    ids = inputs["input_ids"][:1]
    with torch.no_grad():
        expected = model(**inputs).logits
        assert torch.equal(again(**inputs).logits, expected)
        generated = [each.generate(ids, max_new_tokens=4, do_sample=False) for each in (again, model)]
        assert torch.equal(*generated)
        nlr.optimize_for_inference(again)
        torch.testing.assert_close(again(**inputs).logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "vit", "image_tokens"])
def test_shared_down_saves_its_parameters_and_flops(family, monkeypatch):
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
    counts = []
    for each in (alone, model):
        each.set_attn_implementation("eager")
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            each(**batch(model))
        counts.append(counter.get_total_flops())
    assert counts[0] - counts[1] == 2 * saved * 2 * (17 if family == "vit" else 9)  # not computed either
    groups = nlr.param_groups(model, lr=1e-3, verbose=False)
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))


@pytest.mark.parametrize("budget", ["20%", "25% flops"])
def test_budget_gives_higher_ranks_where_down_is_shared(budget):
    configs = (NobleConfig(share_down=share) for share in ("none", "qkv"))
    reports = [nlr.augment(Attention(256, 128), each, budget=budget, verbose=False) for each in configs]
    for report in reports:
        of_flops = "flops" in budget
        before = report.flops_before if of_flops else report.parameters_before
        added = report.flops_added if of_flops else report.parameters_added
        assert 0 < added / before <= float(budget.split("%")[0]) / 100
    assert reports[1].config.rank_ratio > reports[0].config.rank_ratio


@pytest.mark.parametrize("share", ["none", "qkv"])
def test_budget_counts_what_is_added(share):
    config, model = NobleConfig(rank_ratio=0.1, share_down=share), Attention(256, 128)
    linears = {name: each for name, each in model.named_modules() if isinstance(each, nn.Linear)}
    expected = method_of_config(config).added(linears, config)
    report = nlr.augment(model, config, verbose=False)
    assert (report.parameters_added, report.flops_added) == expected


def test_narrow_keys_give_the_group_its_rank_and_two_of_three_may_share():
    model = FAMILIES["llama"]()
    nlr.augment(model, NobleConfig(rank_ratio=0.25, share_down="qkv"), verbose=False)
    attention = model.model.layers[0].self_attn  # queries 32 wide, keys and values 16
    assert {each.noble_rank for each in (attention.q_proj, attention.k_proj, attention.v_proj)} == {4}
    assert attention.o_proj.noble_rank == 8
    assert "noble_down" not in dict(attention.k_proj.named_parameters())
    assert "down projection shared" in repr(attention.k_proj)
    two = Attention()
    nlr.augment(two, NobleConfig(rank=4, share_down="qkv"), exclude="q_proj", verbose=False)
    assert [name for name, _ in two.named_parameters() if "noble_down" in name] == ["k_proj.noble_down"]


@ways
def test_nothing_is_held_after_a_pass(options):
    model, _ = with_branches(Attention, options)
    layer = model.q_proj
    hand_offs = [each for each in (layer.noble_shared, layer.noble_group) if each is not None]
    model(torch.randn(2, 32))
    assert all(each._held is None for each in hand_offs)
    layer(torch.randn(2, 32))
    again = copy.deepcopy(model)  # tensors of a graph cannot be copied
    if "share_down" in options:
        assert again.v_proj.noble_shared.owner is again.q_proj


@ways
def test_layers_given_other_tensors_compute_their_own(options):
    model, alone = with_branches(Attention, options)
    x, z = torch.randn(2, 2, 32).unbind()
    for given in ((x, x), (x, z), (z, x), (z, z)):
        torch.testing.assert_close(model(*given), alone(*given))


@ways
def test_stale_results_are_not_handed_out(options):
    model, alone = with_branches(Attention, options)
    x = torch.randn(2, 32)
    with torch.no_grad():
        model.q_proj(x)
        x.add_(1)
        torch.testing.assert_close(model.v_proj(x), alone.v_proj(x))
        model.q_proj(x)
    parameter = model.q_proj.noble_down if options == SHARED else model.k_proj.weight
    gradient = torch.autograd.grad(model.k_proj(x).sum(), parameter)
    assert gradient[0].abs().sum() > 0  # not the result of the pass without gradients
    model.k_proj(x).sum().backward()  # and a second time: its graph was freed
    if options == SHARED:
        with torch.no_grad():
            model.q_proj(x)
            model.q_proj.noble_down.mul_(2)
            alone.k_proj.noble_down.mul_(2)
            torch.testing.assert_close(model.k_proj(x), alone.k_proj(x))


@ways
def test_inference_mode_computes_the_same(options):
    model, _ = with_branches(Attention, options)
    x = torch.randn(2, 32)
    right = model(x).detach()
    with torch.inference_mode():
        torch.testing.assert_close(model(x), right)
        torch.testing.assert_close(model(x.clone()), right)


def test_threads_do_not_take_each_others_results():
    model, _ = with_branches(Attention, SHARED)
    inputs = [torch.randn(2, 32) for _ in range(4)]
    right = [model(x).detach() for x in inputs]

    @torch.no_grad()
    def run(index):
        return all(torch.equal(model(inputs[index]), right[index]) for _ in range(200))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, range(4)))


def test_data_parallel_copies_are_refused():
    with pytest.raises(UserError, match="start the processes with torchrun"):
        with_branches(Attention, SHARED)[0].q_proj._replicate_for_data_parallel()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@ways
def test_a_cross_attention_holds_nothing_of_a_pass_before(options, compiled):
    model, alone = with_branches(Attention, options)
    run = torch.compile(model, backend="eager") if compiled else model
    x, y = torch.randn(2, 3, 32), torch.randn(2, 3, 32)
    with torch.no_grad():
        run(x, y)
        for each in (model, alone):
            each.q_proj.noble_up.mul_(3.0)
            each.q_proj.weight.mul_(0.5)
        torch.testing.assert_close(run(y, x), alone(y, x))
    groups = {getattr(each, "noble_group", None) or getattr(each, "noble_shared", None) for each in model.modules()}
    assert all(group._held is None for group in groups - {None})
