"""GPT-3's language model and its recipes: counts of the document, init, JSON, the wider MLP, a whole run."""

import math

import pytest
import torch

from model_helpers import FAMILIES, batch
from nlr_lab.tasks.text.data import TextData
from nlr_lab.tasks.text.language_model import OptBackbone, OptLanguageModelTask
from nlr_lab.training import Arm, Recipe, TrainConfig, run_training
from nonlinear_lowrank import NonlinearQuery, UserError
from nonlinear_lowrank.hub import load_model
from training_helpers import FakeText

SIZES = {"layers": 2, "width": 64, "heads": 4, "hidden": 256}


def task(**sizes):
    text = TextData(source="stdlib", vocab_size=300, sequence_length=32)
    return OptLanguageModelTask(text=text, backbone=OptBackbone(**{**SIZES, **sizes}))


@pytest.mark.parametrize("family", ["opt", "vit", "glm", "llama", "eurobert"])
def test_wider_mlp_is_a_plain_model_of_that_width(family, tmp_path):
    model = FAMILIES[family]().eval()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    changed = Arm.parse("wide-mlp:ratio=2.5").apply(model)
    assert type(changed) is type(FAMILIES[family]())
    inputs = batch(changed)
    logits = changed(**inputs).logits
    changed.save_pretrained(tmp_path)
    again = load_model(tmp_path)
    assert torch.equal(again(**inputs).logits, logits)
    wide = [(name, parameter) for name, parameter in changed.named_parameters() if 80 in parameter.shape]
    fused = [name for name, parameter in changed.named_parameters() if 160 in parameter.shape]
    assert wide
    assert bool(fused) == (family == "glm")
    for name, parameter in changed.named_parameters():
        if parameter.shape == before[name].shape:
            assert torch.equal(parameter, before[name])
        elif parameter.ndim == 2:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.1)


def test_wider_mlp_refuses_other_settings():
    for text, words in (
        ("wide-mlp", "wide-mlp:ratio=4.75"),
        ("wide-mlp:ratio=0", "ratio must be"),
        ("wide-mlp:width=3", "needs the MLP's width"),
    ):
        with pytest.raises(UserError, match=words):
            Arm.parse(text)
    arm = Arm.parse("wide-mlp:ratio=4")
    assert (arm.control, arm.name) == (True, "wide-mlp-4")
    with pytest.raises(UserError, match="does not know the MLPs of GPT2"):
        arm.apply(FAMILIES["gpt2"]())


@pytest.mark.parametrize("arm", ["nonlinear-query", "wide-mlp:ratio=3", "identity-query"])
def test_run_trains_and_its_model_loads(tmp_path, arm):
    text = FakeText()
    recipe = Recipe(
        name="tiny",
        task=task(),
        arm=Arm.parse(arm),
        train=TrainConfig(
            steps=8, batch_size=4, lr=3e-3, eval_every=4, save_every=4, betas=(0.9, 0.95), tracker="none"
        ),
    )
    whole = run_training(recipe, tmp_path / "whole", prepared=text, quiet=True)
    assert whole.status == "done"
    loaded = load_model(tmp_path / "whole" / "model")
    queries = [module for module in loaded.modules() if isinstance(module, NonlinearQuery)]
    assert len(queries) == (2 if "query" in arm else 0)
    assert whole.final_loss < math.log(text.vocab_size)
