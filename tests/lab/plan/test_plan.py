"""nlr plan against models that are built and trained for a step, torch's counter, and arithmetic by hand."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode

import nonlinear_lowrank as nlr
from cli_helpers import run, succeed
from model_helpers import FAMILIES, batch
from nlr_lab.plan.estimate import GIB, ArmCost, PlanConfig, arm_cost, lay_out, plan_arm
from nlr_lab.plan.inspect import build_on_meta
from nlr_lab.plan.presets import HARDWARE, PRESETS
from nlr_lab.training import run_training
from nlr_lab.training.checkpoints import copied_optimizer, copied_weights
from nonlinear_lowrank.analysis.cost import count_parameters
from nonlinear_lowrank.analysis.saved import saved_bytes
from nonlinear_lowrank.hub import load_model
from nonlinear_lowrank.methods.noble import layer as noble_layer
from nonlinear_lowrank.methods.noble.op import noble_linear_reference
from processes_helpers import fsdp_environment, run_processes
from training_helpers import FakeText, make_recipe

LENGTH = 24


def make(family: str, method) -> torch.nn.Module:
    model = FAMILIES[family]()
    if method is not None:
        nlr.augment(model, method, verbose=False)
    return model


def inputs_of(model, size: int) -> dict[str, torch.Tensor]:
    inputs = batch(model, size=size, length=LENGTH)
    if "input_ids" in inputs:
        inputs["labels"] = inputs["input_ids"].clone()
    return inputs


def config(**settings) -> PlanConfig:
    return PlanConfig(**{"hardware": HARDWARE["h100"], "batch_size": 64, "steps": 1000, **settings})


SMALL = {"llama": None, "glm": nlr.NobleConfig(rank=8), "gpt2": nlr.NobleConfig(rank=4)}
SMALL["vit"] = nlr.SineLowRankConfig(rank=4, omega=100)


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("family", SMALL)
def test_bytes_equal_those_of_a_step(family, bf16):
    model = make(family, SMALL[family])
    cost = arm_cost(model, family, LENGTH, bf16=bf16)
    inputs = inputs_of(model, 5)

    def forward():
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            return model(**inputs)

    kept = saved_bytes(forward, parameters=[*model.parameters(), *model.buffers()])
    output = forward()
    (output["loss"] if "loss" in output else output["logits"].sum()).backward()
    optimizer = torch.optim.AdamW(nlr.param_groups(model, 1e-3, 0.01, verbose=False))
    optimizer.step()
    state = sum(each.nbytes for values in optimizer.state.values() for each in values.values())
    assert cost.parameter_bytes == sum(each.nbytes for each in model.parameters())
    assert cost.gradient_bytes == sum(each.grad.nbytes for each in model.parameters())
    assert cost.optimizer_bytes == state
    assert cost.activations.kept(5) == pytest.approx(kept, rel=0.01)


@pytest.mark.parametrize("family", ["llama", "glm", "gpt2"])
@pytest.mark.parametrize("method", [None, nlr.NobleConfig(rank=8)], ids=["plain", "noble"])
def test_flops_equal_torchs_count_of_a_step(family, method, monkeypatch):
    # torch's counter knows no in-place addmm_ and no fused CPU attention: the plain formulas, same products.
    monkeypatch.setattr(noble_layer, "noble_linear", noble_linear_reference)
    model = make(family, method)
    cost = arm_cost(model, family, LENGTH, bf16=False)
    model.set_attn_implementation("eager")
    inputs = inputs_of(model, 3)
    with FlopCounterMode(display=False) as counter:
        model(**inputs)["loss"].backward()
    assert 3 * LENGTH * cost.training_flops == pytest.approx(counter.get_total_flops(), rel=0.01)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(**inputs)
    assert 3 * LENGTH * cost.forward_flops == counter.get_total_flops()


def test_frozen_weights_need_no_gradients():
    """LoRA's: the gradient of what goes in, and those of its own factors."""
    from peft import LoraConfig, get_peft_model

    model = FAMILIES["llama"]()
    model.set_attn_implementation("eager")
    whole = arm_cost(model, "full", LENGTH, bf16=False)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    adapted.enable_input_require_grads()  # the embedding's output is otherwise where gradients end
    cost = arm_cost(adapted.base_model.model, "lora", LENGTH, bf16=False)
    assert cost.trainable == sum(each.numel() for each in model.parameters() if each.requires_grad)
    assert cost.gradient_bytes == 4 * cost.trainable
    assert cost.optimizer_bytes < whole.optimizer_bytes / 10
    with FlopCounterMode(display=False) as counter:
        adapted(**inputs_of(model, 3))["loss"].backward()
    assert 3 * LENGTH * cost.training_flops == pytest.approx(counter.get_total_flops(), rel=0.02)


RUNS = {
    "noble": ("noble:rank=4", {}),
    "muon": ("noble:rank=4", {"optimizer": "muon"}),
    "bf16": ("sine-lowrank:rank=4,omega=100", {"bf16": True}),
}


@pytest.mark.parametrize(("arm", "settings"), RUNS.values(), ids=RUNS)
def test_copy_for_a_checkpoint_has_the_bytes_that_a_run_writes(arm, settings, tmp_path):
    recipe = make_recipe(arm, steps=2, **settings)
    run_training(recipe, tmp_path, prepared=FakeText(), quiet=True)
    step = tmp_path / "checkpoints" / "step-000002"
    written = [each for file in step.rglob("*.safetensors") for each in load_file(file).values()]
    model = load_model(step)  # with the vocabulary of the data
    cost = arm_cost(model, arm, LENGTH, muon=recipe.train.optimizer == "muon")
    plan = lay_out(cost, config(), sharding=1, micro_batch=64, recompute=False)
    assert plan.host == sum(each.nbytes for each in written)
    assert plan.host == pytest.approx((2 if "optimizer" in settings else 3) * cost.parameter_bytes, rel=0.2)


PROCESS = """
import json, os, sys
import torch
import processes_helpers
if os.environ.get("ACCELERATE_USE_FSDP"):
    processes_helpers.shard_on_cpus()
from nlr_lab.training import checkpoints, run_training
from training_helpers import FakeText, make_recipe

held = [0, 0]

def count(place, copy, tensors_of):
    def copied(*args, **kwargs):
        copies = copy(*args, **kwargs)
        own = (each.to_local() if hasattr(each, "to_local") else each for each in tensors_of(copies))
        held[place] = sum(each.nbytes for each in own)
        return copies
    return copied

checkpoints.copied_weights = count(
    0, checkpoints.copied_weights, lambda share: [each for file in share.values() for each in file.values()])
checkpoints.copied_optimizer = count(1, checkpoints.copied_optimizer, lambda part: part.tensors.values())
run_training(make_recipe("noble:rank=4", steps=2), sys.argv[1], prepared=FakeText(), quiet=True)
with open(f"{sys.argv[1]}/{os.environ['RANK']}.json", "w") as file:
    json.dump(held, file)
"""


@pytest.mark.slow
@pytest.mark.parametrize("sharding", [1, 2], ids=["ddp", "fsdp2"])
def test_copies_of_two_processes_are_those_of_a_node(sharding, tmp_path, monkeypatch):
    for name, value in (fsdp_environment("GlmDecoderLayer") if sharding == 2 else {}).items():
        monkeypatch.setenv(name, value)
    run_processes(PROCESS, tmp_path)
    held = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    cost = arm_cost(load_model(tmp_path / "checkpoints" / "step-000002"), "noble", LENGTH)
    plan = lay_out(cost, config(gpus=2), sharding=sharding, micro_batch=32, recompute=False)
    assert plan.host == sum(held[0]) + sum(held[1])
    assert held[0][1] == pytest.approx(held[1][1], rel=0.25)
    assert (held[1][0] == 0) == (sharding == 1)


def with_lora(model):
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


def with_a_frozen_block(model):
    model.model.layers[0].requires_grad_(False)
    model.model.register_buffer("mean", torch.zeros(7))
    model.model.register_buffer("scratch", torch.zeros(7), persistent=False)
    return model


@pytest.mark.parametrize("change", [with_lora, with_a_frozen_block])
def test_frozen_weights_are_not_copied(change, tmp_path):
    model = change(FAMILIES["llama"]())
    optimizer = torch.optim.AdamW(nlr.param_groups(model, 1e-3, 0.01, verbose=False))
    model(**inputs_of(model, 2))["loss"].backward()
    optimizer.step()
    weights = copied_weights(tmp_path, model, rank=0, processes=1)
    state = copied_optimizer(model, optimizer, rank=0, processes=1)
    copies = [each for tensors in (*weights.values(), state.tensors) for each in tensors.values()]
    cost = arm_cost(getattr(model, "get_base_model", lambda: model)(), "some", LENGTH, bf16=False)
    plan = lay_out(cost, config(), sharding=1, micro_batch=64, recompute=False)
    assert plan.host == sum(each.nbytes for each in copies)
    assert plan.host < 3 * cost.parameter_bytes * 0.9


def test_muon_state_is_one_moment_a_matrix():
    model = make("glm", nlr.NobleConfig(rank=8))
    optimizer = nlr.MuonAdamW(nlr.param_groups(model, 1e-3, 0.01, muon=True, verbose=False))
    model(**inputs_of(model, 2))["loss"].backward()
    optimizer.step()
    tensors = [each for values in optimizer.state.values() for each in values.values() if torch.is_tensor(each)]
    cost = arm_cost(model, "muon", LENGTH, muon=True)
    assert cost.optimizer_bytes == sum(each.nbytes for each in tensors)


def test_recomputed_activations_equal_those_of_a_step():
    model = make("llama", nlr.NobleConfig(rank=8))
    cost = arm_cost(model, "noble", LENGTH, bf16=False)
    model.activation_checkpointing_enable({"use_reentrant": False})
    inputs = inputs_of(model, 6)
    kept = saved_bytes(lambda: model(**inputs), parameters=[*model.parameters(), *model.buffers()])
    largest = max(fixed + 6 * each for fixed, each in cost.activations.blocks)
    assert cost.activations.kept(6, recompute=True) - largest == pytest.approx(kept, rel=0.15)


@pytest.fixture(scope="module")
def seven() -> ArmCost:
    """A 7B model, cut to two blocks and then grown again: what is kept is a line in the number of blocks."""
    from transformers import LlamaConfig

    small = LlamaConfig(hidden_size=1024, intermediate_size=2752, num_hidden_layers=2, vocab_size=8000)
    return arm_cost(build_on_meta(small), "small", 512)


def test_ddp_agrees_with_counts_by_hand(seven):
    plan = lay_out(seven, config(gpus=8), sharding=1, micro_batch=4, recompute=False)
    parameters = seven.parameters
    assert plan.memory["parameters"] == plan.memory["gradients"] == 4 * parameters
    assert plan.memory["optimizer"] == pytest.approx(8 * parameters, rel=1e-4)
    linears = parameters - 8000 * 1024 - (2 * 2 + 1) * 1024  # less embedding and norms
    assert plan.memory["copies and buffers"] == 2 * linears + 4 * parameters
    fixed, by_sequence = seven.activations.loss
    assert plan.memory["runtime and loss"] == GIB + fixed + 4 * by_sequence
    # Gradients are zeroed, written and read; the state is read and written.
    touched = 3 * seven.gradient_bytes + 2 * seven.optimizer_bytes
    assert plan.optimizer_seconds == pytest.approx(touched / config().hardware.bandwidth)
    assert plan.host == 4 * parameters + seven.optimizer_bytes  # of whose state every process holds a share
    beside = lay_out(seven, config(gpus=16), sharding=1, micro_batch=4, recompute=False).host
    assert beside == 4 * parameters + seven.optimizer_bytes / 2  # the other half is on the second node
    assert plan.moved == pytest.approx(2 * 7 / 8 * 4 * parameters)
    assert plan.communication_seconds == pytest.approx(plan.moved / 450e9)
    assert plan.accumulation == 2
    assert plan.compute_seconds == pytest.approx(3 * seven.forward_flops * 512 * 8 / (0.4 * 989e12))
    expected = max(plan.compute_seconds, plan.communication_seconds) + plan.optimizer_seconds
    assert plan.step_seconds == expected
    assert plan.hours == pytest.approx(expected * 1000 / 3600)


def test_fsdp_agrees_with_counts_by_hand(seven):
    plan = lay_out(seven, config(gpus=16, batch_size=64), sharding=4, micro_batch=2, recompute=True)
    assert plan.memory["parameters"] == seven.parameters
    gathered, summed = 2 * 3 * 3 / 4 * 2 * seven.parameters, 2 * 3 / 4 * seven.parameters
    assert plan.moved == pytest.approx(gathered + summed)
    # Four copies over two nodes: a ring goes through two GPUs of each node, and has two of its adapters.
    assert plan.communication_seconds == pytest.approx(gathered / 450e9 + summed / 100e9)
    # Two of four copies are in a node: so is half of the weights, once, and the optimizer's state twice.
    assert plan.host == 4 * seven.parameters / 2 + 2 * seven.optimizer_bytes
    kept = lay_out(seven, config(gpus=16), sharding=4, micro_batch=2, recompute=False)
    assert plan.memory["activations"] < kept.memory["activations"]
    assert plan.compute_seconds == pytest.approx(4 / 3 * kept.compute_seconds)


@pytest.mark.parametrize(("bf16", "width"), [(True, 2), (False, 4)])
def test_fsdp_over_all_gpus_gathers_and_sums_over_the_nodes_adapters(bf16, width):
    from transformers import LlamaConfig

    small = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, vocab_size=800)
    cost = arm_cost(build_on_meta(small), "small", 32, bf16=bf16)
    plan = lay_out(cost, config(gpus=16, bf16=bf16), sharding=16, micro_batch=4, recompute=False)
    # Two blocks are gathered, and one's gradients are whole.
    assert plan.memory["copies and buffers"] == width * (cost.outside_parameters + 3 * cost.block_parameters)
    assert plan.moved == pytest.approx(15 / 16 * width * 3 * cost.parameters)
    assert plan.communication_seconds == pytest.approx(plan.moved / min(450e9, 8 * 50e9))


def test_smallest_fitting_sharding_is_chosen(seven):
    whole = lay_out(seven, config(gpus=8), sharding=1, micro_batch=1, recompute=False).total
    found = plan_arm(seven, config(gpus=8, memory=whole / GIB * 1.0001))
    assert (found.sharding, found.micro_batch, found.recompute, found.fits) == (1, 1, False, True)
    found = plan_arm(seven, config(gpus=8, memory=whole / GIB * 0.999))
    assert found.sharding == 2
    assert found.fits
    larger = lay_out(seven, config(gpus=8), sharding=2, micro_batch=2 * found.micro_batch, recompute=False)
    assert found.micro_batch == 8 or larger.total > whole * 0.999
    none = plan_arm(seven, config(gpus=8, memory=1.01))
    assert not none.fits
    assert (none.sharding, none.micro_batch, none.recompute) == (8, 1, True)
    assert plan_arm(seven, config(gpus=8, recompute=True)).recompute


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        *(("124m", 124_439_808), ("350m", 354_823_168), ("1.3b", 1_345_423_360)),
        *(("7b", 6_738_415_616), ("13b", 13_015_864_320), ("70b", 68_976_648_192)),
    ],
)
def test_presets_have_the_published_sizes(name, parameters):
    assert count_parameters(build_on_meta(PRESETS[name].config())) == parameters


@pytest.mark.parametrize("given", [{}, {"batch_size": 64, "sequence_length": 512}], ids=str)
def test_sizes_are_planned_for_twenty_tokens_a_parameter(capsys, given):
    words = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", value)]
    found = json.loads(run(capsys, "plan", "124m", "--arms", "baseline", "--json", *words)[1])
    tokens = found["batch_size"] * found["arms"][0]["tokens"]
    assert found["steps"] * tokens == pytest.approx(20 * 124_439_808, rel=0.01)


def test_recipes_are_planned_arm_by_arm(capsys):
    options = ("plan", "llm-demo", "--gpus", 2, "--memory", 24, "--hardware", "RTX 4090", "--sequence-length", 32)
    code, out, err = run(capsys, *options, "--arms", "noble:rank=16")
    assert (code, err) == (0, "")
    assert "2 x rtx4090, 24 GiB each" in out
    assert re.search(r"^noble-r16 fits: DDP, 4 at once \(--gradient-accumulation 1\)$", out, re.MULTILINE)
    assert "assumed: 40% of 83 TFLOP/s (float32)" in out
    plan = json.loads(succeed(capsys, *options, "--json", "--arms", "baseline", "noble:rank=16"))
    assert [arm["name"] for arm in plan["arms"]] == ["baseline", "noble-r16"]
    plain, noble = plan["arms"]
    assert noble["parameters"] - noble["branch_parameters"] == plain["parameters"]
    assert plain["training_flops"] == 3 * plain["forward_flops"]
    assert plan["memory_bytes"] == 24 * GIB
    assert noble["layout"]["step_seconds"] > plain["layout"]["step_seconds"]


@pytest.mark.parametrize("model", ["llm-demo", "7b"])
def test_matched_arms_are_planned_with_their_active_parameters(capsys, model):
    arms = ("--arms", "baseline", "noble:rank=16", "moe:match=noble-r16")
    plan = json.loads(succeed(capsys, "plan", model, "--sequence-length", 32, "--json", *arms))
    plain, noble, moe = plan["arms"]
    assert plain["active_parameters"] == plain["parameters"]
    assert noble["forward_flops"] <= moe["forward_flops"] < 1.02 * noble["forward_flops"]
    assert moe["active_parameters"] < 1.02 * noble["parameters"] < moe["parameters"] / 1.5


def test_arms_that_do_not_fit_are_named(capsys):
    out = succeed(capsys, "plan", "124m", "--memory", 0.1, "--arms", "baseline", "--sequence-length", 64)
    assert re.search(r"^baseline does not fit: .* GiB a GPU of 0", out, re.MULTILINE)
