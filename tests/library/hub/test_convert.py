"""Up-cycling a plain checkpoint: dense weights kept, outputs measured, nothing half-written."""

import errno
import json
import os

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForImageTextToText,
    CLIPConfig,
    CLIPModel,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    Wav2Vec2Config,
    Wav2Vec2Model,
)

import nonlinear_lowrank as nlr
from model_helpers import FAMILIES, auto_class, batch, llama, randomised
from nonlinear_lowrank.hub import conversion, convert, load_model


def trained(make):
    """A plain model in evaluation mode, no tensor at its default."""
    return randomised(make().eval())


def names_of(folder):
    return {path.name for path in folder.iterdir()}


def logits(model, inputs):
    with torch.no_grad():
        return model(**inputs).logits


@pytest.fixture
def plain(tmp_path):
    folder = tmp_path / "plain"
    trained(llama).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", FAMILIES)
def test_converting_with_zero_init_is_bit_equal(name, tmp_path):
    model = trained(FAMILIES[name])
    model.save_pretrained(tmp_path / "plain")
    report = convert(tmp_path / "plain", tmp_path / "out", nlr.NobleConfig(rank=3))
    loaded = auto_class(name).from_pretrained(tmp_path / "out")
    inputs = batch(model)
    assert torch.equal(logits(loaded, inputs), logits(model, inputs))
    assert report.bit_equal
    assert report.difference == 0
    assert "bit-equal" in str(report)
    state = {key.replace(".dense.", "."): value for key, value in loaded.state_dict().items()}
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    added = {key for key in state if "noble_" in key}
    assert added == state.keys() - model.state_dict().keys()
    assert all(bool(state[key].any()) == ("noble_up" not in key) for key in added)
    assert loaded.config.nonlinear_lowrank[0]["config"]["init"] == "pretrained"


def test_converting_takes_options_and_writes_shared_down_projections_once(plain, tmp_path):
    config = nlr.NobleConfig(rank=3, activation="gelu", depth=1, share_down="qkv")
    report = convert(plain, tmp_path / "out", config, exclude=r".*mlp.up_proj", dtype=torch.bfloat16)
    assert report.bit_equal
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert {value.dtype for value in written.values()} == {torch.bfloat16}
    downs = [key for key in written if key.endswith("noble_down")]
    assert len(downs) == len(report.augmented.swapped) - 2 * 2 == 2 * 6 - 2 * 2
    loaded = load_model(tmp_path / "out")
    assert sum(each.numel() for each in written.values()) == sum(each.numel() for each in loaded.parameters())
    saved = json.loads((tmp_path / "out" / "config.json").read_text())
    assert saved["dtype"] == "bfloat16"
    assert saved["nonlinear_lowrank"][0]["config"]["activation"] == "gelu"


@pytest.mark.parametrize("name", ["gpt2"])
def test_converting_with_the_papers_init_reports_the_shift(name, tmp_path):
    model = trained(FAMILIES[name])
    model.save_pretrained(tmp_path / "plain")
    report = convert(tmp_path / "plain", tmp_path / "out", nlr.NobleConfig(rank=3), up_init="paper")
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


@pytest.mark.parametrize("anchor", ["none", "exact"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "vit"])
def test_converting_to_rational_activations_keeps_the_weights(name, anchor, tmp_path):
    model = trained(FAMILIES[name])
    model.save_pretrained(tmp_path / "plain")
    report = convert(tmp_path / "plain", tmp_path / "out", nlr.RationalConfig(groups=4, anchor=anchor))
    loaded = auto_class(name).from_pretrained(tmp_path / "out")
    assert report.bit_equal == (anchor == "exact")
    assert report.up_init is None
    assert "up init" not in str(report)
    inputs = batch(model)
    assert report.bit_equal or 0 < report.difference < 1
    assert torch.equal(logits(loaded, inputs), logits(model, inputs)) == report.bit_equal
    state = loaded.state_dict()
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    with pytest.raises(nlr.UserError, match="up_init='paper' is for NOBLE's"):
        convert(tmp_path / "plain", tmp_path / "no", nlr.RationalConfig(), up_init="paper")
    assert not (tmp_path / "no").exists()


def test_converting_models_of_text_and_images(tmp_path):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    vision = CLIPVisionConfig(**sizes, image_size=16, patch_size=4)
    text = LlamaConfig(**sizes, vocab_size=67, max_position_embeddings=20)
    llava = LlavaConfig(vision_config=vision, text_config=text, image_token_index=66)
    trained(lambda: AutoModelForImageTextToText.from_config(llava)).save_pretrained(tmp_path / "llava")
    report = convert(tmp_path / "llava", tmp_path / "out", nlr.NobleConfig(rank=3))
    assert report.measured == "logits (2, 20, 67)"
    assert report.bit_equal
    clip = CLIPConfig(vision_config=vision.to_dict(), text_config={**sizes, "vocab_size": 67}, projection_dim=16)
    trained(lambda: CLIPModel(clip)).save_pretrained(tmp_path / "clip")
    report = convert(tmp_path / "clip", tmp_path / "out", nlr.NobleConfig(rank=3), overwrite=True)
    assert report.measured == "logits_per_image (2, 2)"
    assert report.bit_equal


def test_converting_refuses_a_model_that_cannot_be_measured(tmp_path):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    config = Wav2Vec2Config(
        **sizes, vocab_size=9, conv_dim=(32,), conv_stride=(5,), conv_kernel=(5,), num_conv_pos_embedding_groups=4
    )
    Wav2Vec2Model(config).save_pretrained(tmp_path / "plain")
    with pytest.raises(nlr.UserError, match="cannot measure Wav2Vec2Model"):
        convert(tmp_path / "plain", tmp_path / "out", nlr.NobleConfig(rank=3))
    assert names_of(tmp_path) == {"plain"}


def test_converting_copies_companions_and_no_code(plain, tmp_path):
    kept = {"tokenizer.json": "{}", "tokenizer_config.json": "{}", "merges.txt": "a b", "LICENSE": "free"}
    left = {"modeling.py": "boom", "training_args.bin": "pickle", "pytorch_model.bin.index.json": "{}"}
    for name, text in {**kept, **left}.items():
        (plain / name).write_text(text)
    report = convert(plain, tmp_path / "out", nlr.NobleConfig(rank=3))
    there = {path.name for path in (tmp_path / "out").iterdir()}
    assert there == {*kept, "config.json", "generation_config.json", "model.safetensors", "manifest.json", "README.md"}
    assert set(report.copied) == set(kept)
    assert all((tmp_path / "out" / name).read_text() == text for name, text in kept.items())


def test_converting_refuses_in_one_line_and_writes_nothing(plain, tmp_path):
    out = tmp_path / "deep" / "out"
    convert(plain, tmp_path / "augmented", nlr.NobleConfig(rank=3))
    before = names_of(tmp_path)
    refused = [
        ({"input_dir": tmp_path / "augmented"}, "augmented already"),
        ({"input_dir": tmp_path / "nowhere"}, "does not exist"),
        ({"config": nlr.NobleConfig(rank=32)}, "rank 32 is not low"),
        ({"up_init": "one"}, "unknown up_init 'one'; choose one of zero, paper"),
        ({"include": "nothing"}, "matches no linear"),
        ({"output_dir": plain, "overwrite": True}, "overlaps the input"),
        ({"output_dir": plain / "inside"}, "overlaps the input"),
        ({"output_dir": tmp_path, "overwrite": True}, "overlaps the input"),
        ({"output_dir": plain / "config.json"}, "overlaps"),
    ]
    for change, message in refused:
        arguments = {"input_dir": plain, "output_dir": out, "config": nlr.NobleConfig(rank=3), **change}
        with pytest.raises(nlr.UserError, match=message) as caught:
            convert(**arguments)
        assert "\n" not in str(caught.value)
        assert names_of(tmp_path) == before
    load_model(plain)


def test_converting_into_a_full_folder_or_disk(plain, tmp_path, monkeypatch):
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("precious")
    with pytest.raises(nlr.UserError, match="not an empty folder; choose another or pass overwrite"):
        convert(plain, out, nlr.NobleConfig(rank=3))
    assert names_of(out) == {"mine.txt"}
    convert(plain, out, nlr.NobleConfig(rank=3), overwrite=True)
    assert "mine.txt" not in names_of(out)
    before = (out / "model.safetensors").read_bytes()

    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(conversion, "copy_companions", fail)
    with pytest.raises(nlr.UserError, match=r"cannot write .*out: no space left"):
        convert(plain, out, nlr.NobleConfig(rank=5), overwrite=True)
    assert (out / "model.safetensors").read_bytes() == before
    assert names_of(tmp_path) == {"plain", "out"}
