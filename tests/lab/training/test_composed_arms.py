"""Arms of several methods, with a budget, or with Muon: their short forms, what they build, and whole runs."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model

from adapter_helpers import PEFT_WARNINGS
from model_helpers import FAMILIES, batch
from nlr_lab.tasks.text.language_model import OptBackbone, OptLanguageModelTask
from nlr_lab.training import Arm, run_training
from nlr_lab.training.arms import optimizer_groups
from nlr_lab.training.checkpoints import tensor_names
from nonlinear_lowrank import NonlinearQuery, QKNormProjection, UserError
from nonlinear_lowrank.analysis import part_of
from nonlinear_lowrank.hub import load_model
from nonlinear_lowrank.methods.base import method_of_layer
from training_helpers import FakeText, cut_back, make_recipe

TEXT = FakeText()
BOTH = "nonlinear-query+noble:rank=4"


@pytest.mark.parametrize("text", [BOTH, "noble:rank=4+nonlinear-query"])
@pytest.mark.parametrize("family", FAMILIES)
def test_queries_are_nonlinear_and_every_other_linear_has_a_branch(family, text):
    alone = Arm.parse("noble:rank=4").apply(FAMILIES[family]())
    branched = {name for name, module in alone.named_modules() if method_of_layer(module) is not None}
    both = Arm.parse(text).apply(FAMILIES[family]())
    kinds = {name: found.name for name, module in both.named_modules() if (found := method_of_layer(module))}
    assert kinds.keys() == branched
    for name, kind in kinds.items():
        assert kind == ("nonlinear-query" if part_of(name) == "query" else "noble"), name
    logits = both(**batch(both)).logits
    logits.square().mean().backward()
    assert all(parameter.grad.isfinite().all() for parameter in both.parameters() if parameter.grad is not None)


@pytest.mark.parametrize("text", ["noble:rank=4+rational:groups=4", f"rational:groups=4+{BOTH}"])
@pytest.mark.parametrize("family", FAMILIES)
def test_rational_activations_go_with_methods_of_linears(family, text):
    alone, both = (Arm.parse(each).apply(FAMILIES[family]()) for each in ("rational:groups=4", text))
    kinds = {name: found.name for name, module in both.named_modules() if (found := method_of_layer(module))}
    activations = {name for name, kind in kinds.items() if kind == "rational"}
    assert activations == {name for name, module in alone.named_modules() if method_of_layer(module) is not None}
    assert set(kinds.values()) == set(both_methods(text))
    both(**batch(both)).logits.square().mean().backward()
    assert all(parameter.grad.isfinite().all() for parameter in both.parameters() if parameter.grad is not None)


def both_methods(text):
    return {part.partition(":")[0] for part in text.split("+")}


def test_wider_mlp_comes_first_and_norms_come_last():
    model = Arm.parse("noble:rank=4+qk-norm+wide-mlp:ratio=2").apply(FAMILIES["opt"]())
    layer = model.model.decoder.layers[0]
    assert (layer.fc1.out_features, layer.fc1.noble_rank) == (64, 4)
    assert isinstance(layer.self_attn.k_proj, QKNormProjection)
    assert layer.self_attn.k_proj.projection.noble_rank == 4
    assert model(**batch(model)).logits.isfinite().all()


def test_budget_is_kept_and_only_the_selected_parts_have_branches():
    plain = sum(parameter.numel() for parameter in FAMILIES["glm"]().parameters())
    whole = Arm.parse("noble:budget=40%").apply(FAMILIES["glm"]())
    some = Arm.parse("noble:budget=40%,select=query/feed_forward").apply(FAMILIES["glm"]())
    ranks = []
    for model in (whole, some):
        added = sum(parameter.numel() for parameter in model.parameters()) - plain
        assert 0 < added <= 0.4 * plain
        ranks.append(model.model.layers[0].self_attn.q_proj.noble_rank)
    assert ranks[1] > ranks[0], "fewer linears may be wider"
    swapped = {part_of(name) for name, module in some.named_modules() if method_of_layer(module) is not None}
    assert swapped == {"query", "feed_forward"}
    with pytest.raises(UserError, match="cannot be met"):
        Arm.parse("noble:budget=0.01%").apply(FAMILIES["glm"]())
    with pytest.raises(UserError, match="no plain linear of this GPT2LMHeadModel is key"):
        Arm.parse("noble:rank=2,select=key").apply(FAMILIES["gpt2"]())


# --- whole runs -----------------------------------------------------------------------------------------------


def opt_recipe(arm):
    task = OptLanguageModelTask(
        text=make_recipe().task.text, backbone=OptBackbone(layers=2, width=32, heads=2, hidden=48, dropout=0.1)
    )
    return replace(make_recipe(arm, save_every=4), task=task)


def train(recipe, out, resume=False):
    return run_training(recipe, out, prepared=TEXT, resume=resume, quiet=True)


RUNS = (
    *(f"{BOTH},qk_norm=true", f"{BOTH},optimizer=muon", "noble:budget=30%", "baseline:optimizer=muon"),
    "noble:rank=4+rational:groups=4",
)


@pytest.mark.parametrize("arm", RUNS)
def test_resuming_gives_the_same_bits(tmp_path, arm):
    recipe = opt_recipe(arm)
    recipe = replace(recipe, train=replace(recipe.train, save_every=4, keep_checkpoints=9))
    done = train(recipe, tmp_path / "out")
    again = train(recipe, cut_back(tmp_path / "out", tmp_path / "again", 4), resume=True)
    weights = [(tmp_path / run / "model" / "model.safetensors").read_bytes() for run in ("out", "again")]
    assert weights[0] == weights[1]
    assert replace(again, seconds=0.0) == replace(done, seconds=0.0)
    with pytest.raises(UserError, match=r"^arm\."):
        train(replace(recipe, arm=Arm.parse("nonlinear-query+noble:rank=5")), tmp_path / "out", resume=True)


LOAD = """
import sys
import torch
import nonlinear_lowrank
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
known = load_file(sys.argv[2])
print(torch.equal(model(input_ids=known["tokens"]).logits, known["logits"]))
"""


def test_trained_composition_loads_in_a_fresh_process(tmp_path):
    from safetensors.torch import save_file

    train(opt_recipe(f"{BOTH},qk_norm=true"), tmp_path / "out")
    model = load_model(tmp_path / "out" / "model").eval()
    assert sum(isinstance(module, NonlinearQuery) for module in model.modules()) == 2
    tokens = torch.randint(0, TEXT.vocab_size, (2, 16))
    save_file({"tokens": tokens, "logits": model(input_ids=tokens).logits.detach()}, tmp_path / "known.safetensors")
    command = [sys.executable, "-c", LOAD, str(tmp_path / "out" / "model"), str(tmp_path / "known.safetensors")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "True", done.stderr


# --- Muon -----------------------------------------------------------------------------------------------------


def test_arm_has_its_own_optimizer(tmp_path):
    train(make_recipe(f"{BOTH},optimizer=muon"), tmp_path / "muon")
    train(make_recipe("noble:rank=4,optimizer=adamw", optimizer="muon"), tmp_path / "adamw")
    state = tensor_names(tmp_path / "muon" / "checkpoints" / "step-000012" / "optimizer")
    by_muon = {name.partition("/")[2] for name in state if name.startswith("momentum_buffer/")}
    ends = {name.partition("self_attn.")[2] or name.partition("mlp.")[2] for name in by_muon}
    assert ends == {
        *("q_proj.query_down", "q_proj.query_up"),
        *(f"{name}.dense.weight" for name in ("k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj")),
    }
    state = tensor_names(tmp_path / "adamw" / "checkpoints" / "step-000012" / "optimizer")
    assert not [name for name in state if name.startswith("momentum_buffer/")]
    recipe = json.loads((tmp_path / "muon" / "recipe.json").read_text())["recipe"]
    assert (recipe["arm"]["optimizer"], recipe["train"]["optimizer"]) == ("muon", "adamw")


@pytest.mark.filterwarnings(*PEFT_WARNINGS)
def test_adapters_are_not_muons():
    model = get_peft_model(FAMILIES["llama"](), LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(UserError, match="trains an adapter"):
        optimizer_groups(model, make_recipe(), Arm.parse("lora:r=2,optimizer=muon"), 1e-3)
    frozen = FAMILIES["llama"]().requires_grad_(False)
    frozen.lm_head.requires_grad_(True)
    with pytest.raises(UserError, match="trains no dense matrices"):
        optimizer_groups(frozen, make_recipe(), Arm.parse("baseline:optimizer=muon"), 1e-3)
