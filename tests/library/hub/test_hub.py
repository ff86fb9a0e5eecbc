"""Augmented models of transformers: loading, strictly, and other models beside them.

Bit-equal files of every method are in methods/test_replaced.py, those of every family in surgery/test_families.py.
"""

import copy
import pickle

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import nonlinear_lowrank as nlr
from cli_helpers import python_prints, run_python
from model_helpers import FAMILIES, auto_class, batch, glm, llama, randomised
from nonlinear_lowrank import hub
from nonlinear_lowrank.hub import classes as hub_classes
from nonlinear_lowrank.hub.classes import augmented_layers
from refusals import assert_refused
from tokenizer_helpers import word_tokenizer


def augmented(name, **settings):
    """A model of the family with branches, no tensor at a default."""
    model = FAMILIES[name]().eval()
    nlr.augment(model, nlr.NobleConfig(rank=3, **settings), verbose=False)
    return randomised(model)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp("saved")
    models = {name: (root / name, augmented(name)) for name in FAMILIES}
    for folder, model in models.values():
        model.save_pretrained(folder)
    return models


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


def test_loading_without_the_package_fails_by_name(saved, tmp_path):
    for name, (_, model) in saved.items():
        bare = copy.deepcopy(model)
        bare.config.modeling_file = False
        bare.save_pretrained(tmp_path / name)
    python_prints(LOAD_PLAIN, tmp_path)


@pytest.mark.parametrize("name", FAMILIES)
def test_loading_puts_a_backbone_under_another_head_and_records_as_before(saved, name, tmp_path):
    folder, model = saved[name]
    loaded = auto_class(name).from_pretrained(folder)
    assert type(loaded.config) is type(model.config)
    assert loaded.config.architectures == [type(model).__name__]
    assert loaded.config.model_type == f"nonlinear_lowrank_{FAMILIES[name]().config.model_type}"
    assert not loaded.training
    hf.AutoModel.from_pretrained(folder).save_pretrained(tmp_path)
    headed = auto_class(name).from_pretrained(tmp_path)  # the head is new, or tied
    assert all(torch.isfinite(parameter).all() for parameter in headed.parameters())
    inputs = batch(model)
    with torch.no_grad():
        ours, theirs = (each(**inputs, output_hidden_states=True).hidden_states for each in (model, loaded))
        expected = model.base_model(**inputs).last_hidden_state
        assert torch.equal(headed.base_model(**inputs).last_hidden_state, expected)
    assert len(ours) == 3
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_loading_makes_a_language_model_a_classifier(saved):
    folder, model = saved["llama"]
    inputs = batch(model)
    classifier = hf.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3)
    assert type(classifier).__name__ == "NonlinearLowrankLlamaForSequenceClassification"
    assert classifier.score.weight.shape == (3, 32)
    assert classifier.score.weight.std() < 0.03
    with torch.no_grad():
        assert torch.equal(classifier.model(**inputs)[0], model.model(**inputs)[0])


@pytest.mark.parametrize("name", ["glm", "vit"])
def test_from_config_draws_converted_layers_as_the_plain_model(name):
    model = augmented(name, init="pretrained")
    fresh = auto_class(name).from_config(copy.deepcopy(model.config))
    for layer in augmented_layers(fresh):
        assert layer.weight.std().item() == pytest.approx(0.02, rel=0.15)
        assert not layer.noble_up.any()
        assert layer.noble_down.std().item() == pytest.approx(layer.in_features**-0.5, rel=0.5)


@pytest.mark.parametrize(
    ("lost", "added", "shape"),
    [
        ("layers.1.mlp.down_proj.noble_phase2", None, ()),
        ("layers.1.mlp.down_proj.weight", None, ()),
        ("embed_tokens.weight", None, ()),
        (None, "layers.0.self_attn.q_proj.noble_mix9", (3, 3)),
        (None, "layers.0.self_attn.q_proj.noble_mix1", (4, 4)),
    ],
    ids=["missing branch", "missing dense", "missing embedding", "extra", "another rank"],
)
def test_loading_is_strict(saved, tmp_path, lost, added, shape):
    saved["glm"][1].save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors.pop(f"model.{lost}", None)
    tensors |= {f"model.{added}": torch.zeros(shape)} if added else {}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    options = {"ignore_mismatched_sizes": True} if shape == (4, 4) else {}
    for auto in (hf.AutoModelForCausalLM, hf.AutoModel):
        with pytest.raises(nlr.UserError, match=r"does not fit NonlinearLowrankGlm.*(missing|extra|another size)"):
            auto.from_pretrained(tmp_path, **options)
    with pytest.raises(nlr.UserError) as caught:
        hub.load_model(tmp_path)
    assert "\n" not in str(caught.value)


def test_loading_returns_what_is_missing_when_asked(saved, tmp_path):
    saved["glm"][1].save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    lost = "model.layers.0.self_attn.q_proj.noble_up"
    del tensors[lost]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    _, info = hf.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert info["missing_keys"] == {lost}


@pytest.mark.parametrize("init", ["scratch", "pretrained"])
def test_an_empty_state_dict_draws_every_tensor(init):
    config = hf.T5Config(vocab_size=99, d_model=32, d_ff=64, d_kv=8, num_heads=4, num_layers=2)
    plain = hf.T5ForConditionalGeneration(config)
    nlr.augment(plain, nlr.NobleConfig(rank=24, init=init), verbose=False)
    drawn = type(plain).from_pretrained(None, config=plain.config, state_dict={})
    for name, tensor in drawn.named_parameters():
        size = plain.get_parameter(name).square().mean()
        assert 0.25 * size <= tensor.square().mean() <= 4 * size, name


def test_loading_takes_the_constructors_arguments(saved):
    loaded = hf.AutoModel.from_pretrained(saved["vit"][0], use_mask_token=True)
    assert loaded.embeddings.mask_token.isfinite().all()
    backbone = hf.AutoModel.from_pretrained(saved["vit"][0])
    assert backbone.embeddings.mask_token is None


REGISTER = """
import transformers
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING
from nonlinear_lowrank.hub.classes import register
print(register(transformers.ViTConfig) in IMAGE_PROCESSOR_MAPPING)
"""


def test_registers_an_image_model_and_its_processors_quietly():
    done = run_python(REGISTER)
    assert (done.stdout, done.stderr) == ("True\n", "")


@pytest.mark.parametrize("name", ["llama", "vit"])
def test_loading_takes_a_dtype_and_a_device_map(saved, name):
    folder, model = saved[name]
    loaded = auto_class(name).from_pretrained(folder, dtype=torch.bfloat16, device_map="cpu")
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    inputs = {key: value.bfloat16() if value.is_floating_point() else value for key, value in batch(model).items()}
    reference = copy.deepcopy(model)
    for parameter in reference.parameters():  # not the buffers: rotary frequencies stay float32
        parameter.data = parameter.data.bfloat16()
    with torch.no_grad():
        assert torch.equal(loaded(**inputs).logits, reference(**inputs).logits)


class OfAUser(hf.LlamaForCausalLM):
    """A class that transformers does not know."""


def test_models_of_other_classes_are_pickled():
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    t5 = {"d_model": 16, "d_ff": 32, "d_kv": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 67}
    models = [OfAUser(hf.LlamaConfig(**sizes, vocab_size=67)), hf.T5EncoderModel(hf.T5Config(**t5)).encoder]
    for model in models:
        nlr.augment(model, nlr.NobleConfig(rank=2), verbose=False)
        again = pickle.loads(pickle.dumps(model))
        assert type(again) is type(model)
        assert type(again.config) is type(model.config)
        assert again.config.to_dict() == model.config.to_dict()
        assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in model.state_dict().items())


def test_copies_and_pickles_compute_the_same():
    model = augmented("gpt2")
    inputs = batch(model)
    with torch.no_grad():
        expected = model(**inputs).logits
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert type(copied) is type(model)
            assert torch.equal(copied(**inputs).logits, expected)
    assert hub_classes.NonlinearLowrankGPT2Config is type(model.config)


def test_augmenting_keeps_other_models_of_the_config_plain(tmp_path):
    config = llama().config
    one, two = hf.LlamaForCausalLM(config), hf.LlamaForCausalLM(config)
    nlr.augment(one, nlr.NobleConfig(rank=3), verbose=False)
    assert type(two) is hf.LlamaForCausalLM
    assert two.config is config
    assert config.model_type == "llama"
    assert not hasattr(config, "nonlinear_lowrank")
    assert one.model.config is one.config
    assert one.model.layers[0].self_attn.config is one.config
    two.save_pretrained(tmp_path)
    assert type(hf.AutoModelForCausalLM.from_pretrained(tmp_path)) is hf.LlamaForCausalLM


@pytest.mark.parametrize("part", ["model", "model.layers"])
def test_a_model_around_an_augmented_part_is_not_saved_without_it(part, tmp_path):
    whole = llama()
    nlr.augment(whole.get_submodule(part), nlr.NobleConfig(rank=3), verbose=False)
    with pytest.raises(nlr.UserError, match="does not list its augmented layers"):
        whole.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
    listed = llama()
    nlr.augment(listed, nlr.NobleConfig(rank=3), include=r"model\..*", verbose=False)
    listed.model.save_pretrained(tmp_path)
    loaded = hf.AutoModel.from_pretrained(tmp_path)
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in listed.model.state_dict().items())


def test_models_inside_a_module_are_saved_with_their_branches(tmp_path):
    whole = nn.ModuleDict(
        {"one": llama(), "head": nn.ModuleDict({"two": FAMILIES["gpt2"]()}), "plain": nn.Linear(32, 32)}
    )
    nlr.augment(whole, nlr.NobleConfig(rank=3, up_scale=1.0), split_fused=True, verbose=False)
    for name in ("one", "head.two"):
        part = whole.get_submodule(name).eval()
        part.save_pretrained(tmp_path / name)
        loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path / name)
        tokens = torch.arange(9)[None]
        torch.testing.assert_close(loaded(tokens).logits, part(tokens).logits)
        assert loaded.state_dict().keys() == part.state_dict().keys()


def test_trainer_finds_the_loss_of_the_base(saved):
    # Trainer shifts labels under label smoothing for the classes of this table only.
    assert type(saved["glm"][1]).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    assert saved["glm"][1].loss_type == hf.GlmForCausalLM(glm().config).loss_type == "ForCausalLM"
    assert saved["llama"][1].can_generate()


def test_load_model_takes_plain_models_and_options(tmp_path):
    model = llama().eval()
    model.save_pretrained(tmp_path / "shards", max_shard_size="50KB")
    assert (tmp_path / "shards" / "model.safetensors.index.json").is_file()
    assert hub.load_model(tmp_path / "shards").state_dict().keys() == model.state_dict().keys()
    model.save_pretrained(tmp_path)
    assert type(hub.load_model(tmp_path)) is hf.LlamaForCausalLM
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_refused(r"1 missing \(model.norm.weight\)", hub.load_model, tmp_path)


def test_load_tokenizer_reads_whole_files_alone(saved, tmp_path):
    saved["llama"][1].save_pretrained(tmp_path)
    assert_refused("has no tokenizer", hub.load_tokenizer, tmp_path)
    word_tokenizer(["<unk>", "one"], unk_token="<unk>").save_pretrained(tmp_path)
    assert hub.load_tokenizer(tmp_path)("one")["input_ids"] == [1]
    for text in ('{"version": "1.0"}', "{"):
        (tmp_path / "tokenizer.json").write_text(text)
        assert_refused("cannot be loaded", hub.load_tokenizer, tmp_path)


def test_whispers_pipeline_is_whispers():
    sizes = {"vocab_size": 64, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "num_mel_bins": 80}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 0)
    model = hf.WhisperForConditionalGeneration(hf.WhisperConfig(**sizes, **heads, **tokens))
    nlr.augment(model, nlr.NobleConfig(rank=4), verbose=False)
    parts = {"tokenizer": word_tokenizer(["a", "b"], "a"), "feature_extractor": hf.WhisperFeatureExtractor()}
    pipeline = hf.AutomaticSpeechRecognitionPipeline(model=model, **parts)
    (chunk,) = pipeline.preprocess({"raw": torch.zeros(16_000 * 40).numpy(), "sampling_rate": 16_000})
    assert chunk["input_features"].shape[-1] == 4000, "of all 40 seconds"
    assert model.config.model_type == "nonlinear_lowrank_whisper"
