"""Augmented models of transformers: every family of `model_helpers`, saved and loaded in fresh processes."""

import copy
import json
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GlmForCausalLM,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import nonlinear_lowrank as nlr
from cli_helpers import run_python
from model_helpers import FAMILIES, auto_class, batch, glm, llama, randomised
from nonlinear_lowrank import hub
from nonlinear_lowrank.hub import classes as hub_classes
from nonlinear_lowrank.hub.classes import augmented_layers


def augmented(name, **settings):
    """A model of the family with branches, every tensor random, so that none is at a default."""
    model = FAMILIES[name]().eval()
    nlr.augment(model, nlr.NobleConfig(rank=3, **settings), verbose=False)
    return randomised(model)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """{family: (folder, model)}; the folder also holds an input and the outputs for it."""
    root = tmp_path_factory.mktemp("saved")
    models = {}
    for name in FAMILIES:
        model = augmented(name)
        model.save_pretrained(root / name)
        inputs = batch(model)
        with torch.no_grad():
            expected = {"logits": model(**inputs).logits, "base": model.base_model(**inputs).last_hidden_state}
        save_file({**inputs, **expected}, root / f"{name}.check.safetensors")
        models[name] = (root / name, model)
    return models


LOAD_ALL = """
import json, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
import nonlinear_lowrank
import transformers
from safetensors.torch import load_file
transformers.logging.set_verbosity_error()
autos = {"eurobert": "AutoModelForMaskedLM", "vit": "AutoModelForImageClassification"}
results = {}
for folder in Path(sys.argv[1]).iterdir():
    if not folder.is_dir():
        continue
    tensors = load_file(f"{folder}.check.safetensors")
    inputs = {name: tensors[name] for name in tensors if name in ("input_ids", "pixel_values")}
    auto = getattr(transformers, autos.get(folder.name, "AutoModelForCausalLM"))
    with torch.no_grad():
        model = auto.from_pretrained(folder)
        logits = model(**inputs).logits
        base = transformers.AutoModel.from_pretrained(folder)(**inputs).last_hidden_state
    results[folder.name] = {
        "logits": torch.equal(logits, tensors["logits"]),
        "base": torch.equal(base, tensors["base"]),
        "class": type(model).__name__,
        "model_type": model.config.model_type,
    }
print(json.dumps(results))
"""


def test_a_fresh_process_loads_bit_equal_models(saved):
    result = run_python(LOAD_ALL, saved["llama"][0].parent)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == {
        name: {"logits": True, "base": True, "class": type(model).__name__, "model_type": model.config.model_type}
        for name, (_, model) in saved.items()
    }


LOAD_PLAIN = """
import sys
from pathlib import Path
import transformers
assert "nonlinear_lowrank" not in sys.modules
for folder in sorted(Path(sys.argv[1]).iterdir()):
    if folder.is_dir():
        for auto in (transformers.AutoConfig, transformers.AutoModel, transformers.AutoModelForCausalLM):
            try:
                auto.from_pretrained(folder)
            except ValueError as error:
                assert f"nonlinear_lowrank_" in str(error), error
            else:
                raise SystemExit(f"{auto} loaded {folder}")
model, info = transformers.GlmForCausalLM.from_pretrained(Path(sys.argv[1]) / "glm", output_loading_info=True)
assert any("noble_up" in key for key in info["unexpected_keys"])  # documented: a concrete class drops them
"""


def test_loading_without_the_package_fails_by_name(saved):
    result = run_python(LOAD_PLAIN, saved["llama"][0].parent)
    assert result.returncode == 0, result.stderr + result.stdout


@pytest.mark.parametrize("name", FAMILIES)
def test_loading_gives_back_what_was_saved(saved, name):
    folder, model = saved[name]
    loaded = auto_class(name).from_pretrained(folder)
    assert type(loaded) is type(model)
    assert type(loaded.config) is type(model.config)
    assert loaded.config.nonlinear_lowrank == model.config.nonlinear_lowrank
    assert loaded.config.architectures == [type(model).__name__]
    assert loaded.config.model_type == f"nonlinear_lowrank_{FAMILIES[name]().config.model_type}"
    assert not loaded.training
    state, expected = loaded.state_dict(), model.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[key], expected[key]) for key in state)
    inputs = batch(model)
    with torch.no_grad():
        ours, theirs = (each(**inputs, output_hidden_states=True) for each in (model, loaded))
    assert len(ours.hidden_states) == len(theirs.hidden_states) == 3
    assert all(torch.equal(a, b) for a, b in zip(ours.hidden_states, theirs.hidden_states, strict=True))


@pytest.mark.parametrize("name", FAMILIES)
def test_loading_puts_a_backbone_under_a_head_and_back(saved, name, tmp_path):
    folder, model = saved[name]
    inputs = batch(model)
    backbone = AutoModel.from_pretrained(folder)
    assert "ForCausalLM" not in type(backbone).__name__
    backbone.save_pretrained(tmp_path)
    headed = auto_class(name).from_pretrained(tmp_path)  # the head is new, or tied
    with torch.no_grad():
        expected = model.base_model(**inputs).last_hidden_state
        assert torch.equal(headed.base_model(**inputs).last_hidden_state, expected)
    assert all(torch.isfinite(parameter).all() for parameter in headed.parameters())


def test_loading_makes_a_language_model_a_classifier(saved):
    folder, model = saved["llama"]
    inputs = batch(model)
    classifier = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3)
    assert type(classifier).__name__ == "NonlinearLowrankLlamaForSequenceClassification"
    assert classifier.score.weight.shape == (3, 32)
    assert classifier.score.weight.std() < 0.03
    with torch.no_grad():
        assert torch.equal(classifier.model(**inputs)[0], model.model(**inputs)[0])


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("init", ["scratch", "pretrained"])
def test_from_config_draws_every_tensor(name, init):
    model = augmented(name, init=init)
    fresh = auto_class(name).from_config(copy.deepcopy(model.config))
    assert type(fresh) is type(model)
    layers = list(augmented_layers(fresh))
    assert len(layers) == len(model.config.nonlinear_lowrank[0]["modules"])
    for parameter in fresh.parameters():
        assert torch.isfinite(parameter).all()
        assert parameter.abs().max() < 10
    for layer in layers:
        d_in, _ = layer.noble_shape
        expected = 0.5 / d_in**0.5 if init == "scratch" else 0.02
        if init == "scratch" or name not in ("gpt2", "opt"):  # GPT-2 scales its own init by depth
            assert layer.weight.std().item() == pytest.approx(expected, rel=0.15)
        assert layer.noble_down.std().item() == pytest.approx(d_in**-0.5, rel=0.5)
        assert bool(layer.noble_up.any()) == (init == "scratch")
        frequencies = torch.cat([layer.noble_frequency1, layer.noble_frequency2])
        assert ((frequencies >= 0.8) & (frequencies <= 1.2)).all()
        assert torch.cat([layer.noble_phase1, layer.noble_phase2]).abs().max() < 1
    assert not torch.equal(layers[0].noble_down, layers[1].noble_down)


def test_initializing_again_keeps_trained_tensors():
    model = augmented("gpt2")
    before = copy.deepcopy(model.state_dict())
    model.init_weights()
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize("kind", ["missing branch", "missing dense", "missing embedding", "extra", "another rank"])
def test_loading_is_strict(saved, tmp_path, kind):
    saved["glm"][1].save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    if kind == "extra":
        tensors["model.layers.0.self_attn.q_proj.noble_mix9"] = torch.zeros(3, 3)
    elif kind == "another rank":
        tensors["model.layers.0.self_attn.q_proj.noble_mix1"] = torch.zeros(4, 4)
    else:
        key = {"branch": "layers.1.mlp.down_proj.noble_phase2", "dense": "layers.1.mlp.down_proj.weight"}
        del tensors["model." + key.get(kind.split()[1], "embed_tokens.weight")]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for auto in (AutoModelForCausalLM, AutoModel):
        options = {"ignore_mismatched_sizes": True} if kind == "another rank" else {}
        with pytest.raises(nlr.UserError, match=r"does not fit NonlinearLowrankGlm.*(missing|extra|another size)"):
            auto.from_pretrained(tmp_path, **options)
    with pytest.raises(nlr.UserError) as caught:
        hub.load_model(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["llama", "vit"])
def test_loading_takes_a_dtype_and_a_device_map(saved, name):
    folder, model = saved[name]
    loaded, info = auto_class(name).from_pretrained(
        folder, dtype=torch.bfloat16, device_map="cpu", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    inputs = {key: value.bfloat16() if value.is_floating_point() else value for key, value in batch(model).items()}
    reference = copy.deepcopy(model)
    for parameter in reference.parameters():  # not the buffers: rotary frequencies stay float32
        parameter.data = parameter.data.bfloat16()
    with torch.no_grad():
        assert torch.equal(loaded(**inputs).logits, reference(**inputs).logits)


def test_copies_and_pickles_compute_the_same():
    model = augmented("gpt2")
    inputs = batch(model)
    with torch.no_grad():
        expected = model(**inputs).logits
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert type(copied) is type(model)
            assert torch.equal(copied(**inputs).logits, expected)
    assert hub_classes.NonlinearLowrankGPT2Config is type(model.config)


def test_augmenting_twice_saves_both(tmp_path):
    model = llama()
    nlr.augment(model, nlr.NobleConfig(rank=3), include=r".*self_attn.*", verbose=False)
    nlr.augment(model, nlr.NobleConfig(rank=5, activation="gelu", depth=1), include=r".*mlp.*", verbose=False)
    assert [entry["config"]["rank"] for entry in model.config.nonlinear_lowrank] == [3, 5]
    model.eval().save_pretrained(tmp_path)
    inputs = batch(model)
    with torch.no_grad():
        assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(**inputs).logits, model(**inputs).logits)


def test_augmenting_keeps_other_models_of_the_config_plain(tmp_path):
    config = llama().config
    one, two = LlamaForCausalLM(config), LlamaForCausalLM(config)
    nlr.augment(one, nlr.NobleConfig(rank=3), verbose=False)
    assert type(two) is LlamaForCausalLM
    assert two.config is config
    assert config.model_type == "llama"
    assert not hasattr(config, "nonlinear_lowrank")
    assert one.model.config is one.config
    assert one.model.layers[0].self_attn.config is one.config
    two.save_pretrained(tmp_path)
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path)) is LlamaForCausalLM


def test_trainer_finds_the_loss_of_the_base(saved):
    # Trainer shifts labels under label smoothing for the classes of this table only.
    assert type(saved["glm"][1]).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    assert saved["glm"][1].loss_type == GlmForCausalLM(glm().config).loss_type == "ForCausalLM"
    assert saved["llama"][1].can_generate()


def test_load_model_takes_plain_models_and_options(tmp_path):
    model = llama().eval()
    model.save_pretrained(tmp_path / "shards", max_shard_size="50KB")
    assert (tmp_path / "shards" / "model.safetensors.index.json").is_file()
    assert hub.load_model(tmp_path / "shards").state_dict().keys() == model.state_dict().keys()
    model.save_pretrained(tmp_path)
    loaded = hub.load_model(tmp_path, dtype=torch.bfloat16)
    assert type(loaded) is LlamaForCausalLM
    assert loaded.dtype == torch.bfloat16
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(nlr.UserError, match=r"1 missing \(model.norm.weight\)"):
        hub.load_model(tmp_path)


def tiny_tokenizer():
    inner = Tokenizer(models.WordLevel({"<unk>": 0, "one": 1, "two": 2}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")


def test_load_tokenizer_reads_whole_files_alone(saved, tmp_path):
    saved["llama"][1].save_pretrained(tmp_path)
    with pytest.raises(nlr.UserError, match="has no tokenizer"):
        hub.load_tokenizer(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    assert hub.load_tokenizer(tmp_path)("two one three")["input_ids"] == [2, 1, 0]
    for text in ('{"version": "1.0"}', "{"):
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(nlr.UserError, match="cannot be loaded") as caught:
            hub.load_tokenizer(tmp_path)
        assert "\n" not in str(caught.value)
