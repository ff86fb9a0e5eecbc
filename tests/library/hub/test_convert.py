"""Up-cycling a plain checkpoint: dense weights kept, outputs measured, nothing half-written."""

import errno
import json
import os

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file

import nonlinear_lowrank as nlr
from model_helpers import FAMILIES, auto_class, batch, llama, randomised
from nonlinear_lowrank.hub import conversion, convert, load_model
from nonlinear_lowrank.hub.modeling_file import MODELING_FILE
from refusals import assert_refused

SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
NOBLE = nlr.NobleConfig(rank=3)


def written(model, folder):
    """The model in evaluation mode, no tensor at its default, and saved."""
    randomised(model.eval()).save_pretrained(folder)
    return model


def names_of(folder):
    return {path.name for path in folder.iterdir()}


def logits(model, inputs):
    with torch.no_grad():
        return model(**inputs).logits


@pytest.fixture
def plain(tmp_path):
    written(llama(), tmp_path / "plain")
    return tmp_path / "plain"


EXACT = nlr.RationalConfig(groups=4, anchor="exact")
QUERY = nlr.NonlinearQueryConfig(rank=3)


@pytest.mark.parametrize("config", [NOBLE, EXACT, QUERY], ids=["noble", "rational", "query"])
@pytest.mark.parametrize("name", FAMILIES)
def test_converting_is_bit_equal_and_keeps_the_weights(name, config, tmp_path):
    model = written(FAMILIES[name](), tmp_path / "plain")
    report = convert(tmp_path / "plain", tmp_path / "out", config)
    loaded = auto_class(name).from_pretrained(tmp_path / "out")
    inputs = batch(model)
    assert torch.equal(logits(loaded, inputs), logits(model, inputs))
    assert report.bit_equal
    assert report.difference == 0
    assert "bit-equal" in str(report)
    assert report.up_init == ("zero" if config is NOBLE else None)
    state = {key.replace(".dense.", "."): value for key, value in loaded.state_dict().items()}
    queries = report.augmented.swapped if config is QUERY else []
    for each in queries:
        weight, plain = loaded.get_submodule(each).query_weight, model.get_submodule(each).weight
        assert torch.equal(weight / 2, plain.T[:32] if name == "gpt2" else plain)
        assert loaded.config.nonlinear_lowrank[0]["config"]["residual"] == "linear"
    for key, value in model.state_dict().items():
        assert key.rpartition(".")[0] in queries or torch.equal(state[key], value), key
    if config is NOBLE:
        added = {key for key in state if "noble_" in key}
        assert added == state.keys() - model.state_dict().keys()
        assert all(bool(state[key].any()) == ("noble_up" not in key) for key in added)
        assert loaded.config.nonlinear_lowrank[0]["config"]["init"] == "pretrained"


def test_converting_takes_options_and_writes_shared_down_projections_once(plain, tmp_path):
    config = nlr.NobleConfig(rank=3, activation="gelu", depth=1, share_down="qkv")
    report = convert(plain, tmp_path / "out", config, exclude=r".*mlp.up_proj", dtype=torch.bfloat16)
    assert report.bit_equal
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {value.dtype for value in tensors.values()} == {torch.bfloat16}
    downs = [key for key in tensors if key.endswith("noble_down")]
    assert len(downs) == len(report.augmented.swapped) - 2 * 2 == 2 * 6 - 2 * 2
    loaded = load_model(tmp_path / "out")
    assert sum(each.numel() for each in tensors.values()) == sum(each.numel() for each in loaded.parameters())
    saved = json.loads((tmp_path / "out" / "config.json").read_text())
    assert saved["dtype"] == "bfloat16"
    assert saved["nonlinear_lowrank"][0]["config"]["activation"] == "gelu"


def test_converting_with_the_papers_init_reports_the_shift(tmp_path):
    model = written(FAMILIES["gpt2"](), tmp_path / "plain")
    report = convert(tmp_path / "plain", tmp_path / "out", NOBLE, up_init="paper")
    assert not report.bit_equal
    assert f"{report.difference:.3e}" in str(report)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    ups = torch.cat([value.flatten() for key, value in tensors.items() if "noble_up" in key])
    assert ups.std().item() == pytest.approx(0.01 / 3**0.5, rel=0.15)
    inputs = batch(model)
    before, loaded = logits(model, inputs), load_model(tmp_path / "out")
    shift = (logits(loaded, inputs) - before).abs().max().item()
    assert shift / 10 < report.difference < 10 * shift  # on other inputs; of 100 draws a family from 0.52 to 4.2
    with nlr.branches_disabled(loaded) as dense:
        assert torch.equal(logits(dense, inputs), before)
    assert not torch.equal(logits(loaded, inputs), before)


def test_converting_to_fitted_activations_moves_the_outputs(plain, tmp_path):
    report = convert(plain, tmp_path / "out", nlr.RationalConfig(groups=4))
    assert not report.bit_equal
    assert 0 < report.difference < 1
    assert "up init" not in str(report)


def test_converting_models_of_text_and_images_and_refusing_what_cannot_be_measured(tmp_path):
    vision = hf.CLIPVisionConfig(**SIZES, image_size=16, patch_size=4)
    text = hf.LlamaConfig(**SIZES, vocab_size=67, max_position_embeddings=20)
    llava = hf.LlavaConfig(vision_config=vision, text_config=text, image_token_index=66)
    clip = hf.CLIPConfig(vision_config=vision.to_dict(), text_config={**SIZES, "vocab_size": 67}, projection_dim=16)
    for model, measured in (
        (hf.AutoModelForImageTextToText.from_config(llava), "logits (2, 20, 67)"),
        (hf.CLIPModel(clip), "logits_per_image (2, 2)"),
    ):
        written(model, tmp_path / model.config.model_type)
        report = convert(tmp_path / model.config.model_type, tmp_path / "out", NOBLE, overwrite=True)
        assert report.measured == measured
        assert report.bit_equal
    waves = {"conv_dim": (32,), "conv_stride": (5,), "conv_kernel": (5,), "num_conv_pos_embedding_groups": 4}
    written(hf.Wav2Vec2Model(hf.Wav2Vec2Config(**SIZES, **waves, vocab_size=9)), tmp_path / "waves")
    assert_refused("cannot measure Wav2Vec2Model", convert, tmp_path / "waves", tmp_path / "no", NOBLE)
    assert names_of(tmp_path) == {"llava", "clip", "out", "waves"}


def test_a_converted_folder_may_be_saved_into_again(plain, tmp_path):
    convert(plain, tmp_path / "out", nlr.NobleConfig(rank=3))
    assert (tmp_path / "out" / "manifest.json").exists()
    model = load_model(tmp_path / "out")
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    model.save_pretrained(tmp_path / "out")
    assert torch.equal(load_model(tmp_path / "out").lm_head.weight, model.lm_head.weight)
    (tmp_path / "out" / "manifest.json").write_text('{"files": {"theirs.txt": {}}}')
    model.save_pretrained(tmp_path / "out")
    assert (tmp_path / "out" / "manifest.json").exists(), "of somebody else"


def test_converting_copies_companions_and_no_code(plain, tmp_path):
    kept = {"tokenizer.json": "{}", "tokenizer_config.json": "{}", "merges.txt": "a b", "LICENSE": "free"}
    left = {"modeling.py": "boom", "training_args.bin": "pickle", "pytorch_model.bin.index.json": "{}"}
    left |= {"model.safetensors.index.json": "{}", "manifest.json": '{"files": {}}'}
    for name, text in {**kept, **left}.items():
        (plain / name).write_text(text)
    report = convert(plain, tmp_path / "out", NOBLE)
    made = {"config.json", "generation_config.json", "model.safetensors", "manifest.json", "README.md", MODELING_FILE}
    assert names_of(tmp_path / "out") == {*kept, *made}
    assert set(report.copied) == set(kept)
    assert all((tmp_path / "out" / name).read_text() == text for name, text in kept.items())


def test_converting_refuses_in_one_line_and_writes_nothing(plain, tmp_path):
    out = tmp_path / "deep" / "out"
    convert(plain, tmp_path / "augmented", NOBLE)
    before = names_of(tmp_path)
    refused = [
        ({"input_dir": tmp_path / "augmented"}, "augmented already"),
        ({"config": nlr.NobleConfig(rank=32)}, "rank 32 is too high"),
        ({"up_init": "one"}, "unknown up_init 'one'; choose one of zero, paper"),
        ({"up_init": "paper", "config": EXACT}, "up_init='paper' is for NOBLE's"),
        ({"output_dir": plain, "overwrite": True}, "overlaps the input"),
        ({"output_dir": plain / "inside"}, "overlaps the input"),
        ({"output_dir": tmp_path, "overwrite": True}, "overlaps the input"),
    ]
    for change, message in refused:
        assert_refused(message, convert, **{"input_dir": plain, "output_dir": out, "config": NOBLE, **change})
        assert names_of(tmp_path) == before
    load_model(plain)


def test_converting_into_a_full_folder_or_disk(plain, tmp_path, monkeypatch):
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("precious")
    for overwrite in (False, True):
        assert_refused("holds no model", convert, plain, out, NOBLE, overwrite=overwrite)
        assert names_of(out) == {"mine.txt"}
    (out / "mine.txt").unlink()
    convert(plain, out, NOBLE)
    assert_refused("not an empty folder; choose another, or pass overwrite=True", convert, plain, out, NOBLE)
    (out / "old.txt").write_text("of a former model")
    convert(plain, out, NOBLE, overwrite=True)
    assert "old.txt" not in names_of(out)
    before = (out / "model.safetensors").read_bytes()

    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(conversion, "copy_companions", fail)
    assert_refused(r"cannot write .*out: no space left", convert, plain, out, nlr.NobleConfig(rank=5), overwrite=True)
    assert (out / "model.safetensors").read_bytes() == before
    assert names_of(tmp_path) == {"plain", "out"}


def test_difference_is_the_largest_of_the_outputs(tmp_path, monkeypatch):
    model = written(FAMILIES["gpt2"](), tmp_path / "plain")
    inputs = batch(model)
    monkeypatch.setattr(conversion, "random_inputs", lambda model: inputs)
    report = convert(tmp_path / "plain", tmp_path / "out", NOBLE, up_init="paper")
    shift = logits(load_model(tmp_path / "out"), inputs) - logits(model, inputs)
    assert report.difference == pytest.approx(shift.abs().max().item(), rel=1e-4)


def test_outputs_that_differ_by_rounding_are_not_bit_equal(plain, tmp_path, monkeypatch):
    found, measure = [0.0, 1e-9], conversion.first_output

    def moved(model, inputs):
        output, name = measure(model, inputs)
        return output.double() + found.pop(0), name

    monkeypatch.setattr(conversion, "first_output", moved)
    report = convert(plain, tmp_path / "out", NOBLE)
    assert not report.bit_equal
    assert report.difference == pytest.approx(1e-9)


def test_outputs_are_measured_on_many_tokens():
    assert len(conversion.random_inputs(llama())["input_ids"].unique()) > 10
