"""Images as tokens: tokenizers, the cache of encoded sets, training, and pictures drawn by class."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from cli_helpers import refused, succeed
from image_helpers import noise
from nlr_lab.cli.main import main
from nlr_lab.evaluation.generation import Sampling, picture, sample_images
from nlr_lab.tasks.images import encoding
from nlr_lab.tasks.images.encoding import as_square, prepare_images
from nlr_lab.tasks.images.tokenizers import ImageCodec, PatchTokenizer, VQTokenizer, find_vq
from nlr_lab.tasks.images.tokens import ImageTokenData
from nlr_lab.training import Recipe, run_training
from nonlinear_lowrank.hub import convert, load_model
from nonlinear_lowrank.hub.image_tokens import ImageTokensConfig, ImageTokensForCausalLM
from nonlinear_lowrank.methods.noble import NobleConfig
from pretraining_helpers import assert_resumes_exactly
from refusals import assert_refused
from seeds import rng


def save_images(path, train=40, test=10, side=8, channels=3):
    """Class 0 is dark, class 1 bright; returns the arrays by name."""
    arrays = {}
    for name, count in (("train", train), ("test", test)):
        labels = np.arange(count) % 2
        images = rng().integers(0, 60, (count, side, side, channels)) + 190 * labels[:, None, None, None]
        arrays |= {f"x_{name}": images.astype(np.uint8), f"y_{name}": labels}
    np.savez(path, **arrays)
    return arrays


def data(tmp_path, source, **changes):
    values = {"size": 8, "patch": 4, "codes": 8, "cache_dir": str(tmp_path / "cache")}
    return ImageTokenData(source=str(source), **{**values, **changes})


@pytest.mark.parametrize("channels", [1, 3])
def test_a_patch_becomes_the_nearest_mean(channels):
    tokenizer = PatchTokenizer.fit(noise(50, 6, 9, channels), codes=16, patch=3)
    images = noise(7, 6, 9, channels)
    codes = tokenizer.encode(images)
    assert codes.shape == (7, 2, 3)
    for index, row, column in [(0, 0, 0), (3, 1, 2), (6, 0, 1)]:
        patch = images[index, 3 * row : 3 * row + 3, 3 * column : 3 * column + 3].reshape(-1)
        distances = ((tokenizer.means.astype(np.float64) - patch) ** 2).sum(1)
        assert distances[codes[index, row, column]] <= distances.min() * (1 + 1e-5)
    drawn = tokenizer.decode(codes)
    assert drawn.shape == images.shape
    assert np.array_equal(drawn[3, 3:6, 6:9].reshape(-1), np.rint(tokenizer.means[codes[3, 1, 2]]).astype(np.uint8))


def test_patches_are_fitted_the_same_way_each_time():
    tiles = noise(6, 2, 2, 3)
    images = tiles[rng().integers(0, 6, (40, 4, 5))].transpose(0, 1, 3, 2, 4, 5).reshape(40, 8, 10, 3)
    one, two = (PatchTokenizer.fit(images, codes=6, patch=2) for _ in range(2))
    assert np.array_equal(one.means, two.means)
    assert np.abs(one.decode(one.encode(images)).astype(int) - images).mean() < 20  # means may have merged
    assert_refused("6 different patches, fewer than the 7 codes", PatchTokenizer.fit, images, codes=7, patch=2)


def test_a_codec_is_saved_and_read_back(tmp_path):
    tokenizer = PatchTokenizer.fit(noise(50, 4, 4, 3), codes=9, patch=2)
    ImageCodec(tokenizer, 2, 2, ("cat", "7", "dog")).save_pretrained(tmp_path / "a")
    codec = ImageCodec.load(tmp_path / "a")
    images = noise(5, 4, 4, 3)
    assert np.array_equal(codec.tokenizer.encode(images), tokenizer.encode(images))
    assert (codec.rows, codec.columns, codec.classes) == (2, 2, ("cat", "7", "dog"))
    assert [codec.find_class(name) for name in ("dog", "7", "0")] == [2, 1, 0]
    assert_refused("no class 'cow'; the model has 3: cat, 7, dog", codec.find_class, "cow")
    text = (tmp_path / "a" / "image_tokenizer.json").read_text()
    for change, message in (('"kind": "x"', "cannot be read .'x'"), ('"kind": "patches", "codes": 8', "9 codes")):
        broken = text.replace('"kind": "patches",\n  "codes": 9', change)
        (tmp_path / "a" / "image_tokenizer.json").write_text(broken)
        assert_refused(message, ImageCodec.load, tmp_path / "a")
    (tmp_path / "a" / "image_tokenizer.safetensors").write_bytes(b"cut short")
    (tmp_path / "a" / "image_tokenizer.json").write_text(text)
    assert_refused("cannot be read", ImageCodec.load, tmp_path / "a")


def test_the_middle_of_an_image_is_kept():
    tall = noise(12, 6, 3)
    assert np.array_equal(as_square(tall, 6, 3), tall[3:9])
    wide = Image.fromarray(noise(4, 10))
    assert np.array_equal(as_square(wide, 4, 1)[..., 0], np.asarray(wide)[:, 3:7])
    assert as_square(wide, 9, 3).shape == (9, 9, 3)
    flat = np.full((31, 17), 99, dtype=np.uint8)
    assert np.array_equal(as_square(flat, 8, 1), np.full((8, 8, 1), 99))


def test_sequences_are_the_class_and_the_codes_in_raster_order(tmp_path):
    arrays = save_images(tmp_path / "a.npz")
    prepared = prepare_images(data(tmp_path, tmp_path / "a.npz"))
    tokenizer = prepared.tokenizer.tokenizer
    assert (prepared.vocab_size, len(prepared.train), len(prepared.valid)) == (8, 40, 10)
    for side, images, labels in (
        (prepared.train, arrays["x_train"], arrays["y_train"]),
        (prepared.valid, arrays["x_test"], arrays["y_test"]),
    ):
        codes = tokenizer.encode(images).reshape(len(images), -1)
        for index in range(len(side)):
            item = side[index]
            assert item["input_ids"].tolist() == [8 + labels[index], *codes[index]]
            assert torch.equal(item["input_ids"], item["labels"])
    drawn = tokenizer.decode(tokenizer.encode(arrays["x_test"]))
    error = ((drawn.astype(float) - arrays["x_test"]) ** 2).mean()
    facts = prepared.describe()
    assert facts["psnr_db"] == pytest.approx(10 * np.log10(255**2 / error), abs=1e-3)
    assert (facts["train"]["images"], facts["grid"], facts["channels"]) == (40, [2, 2], 3)


def test_encoded_sets_are_cached_by_content(tmp_path, monkeypatch):
    arrays = save_images(tmp_path / "a.npz")
    first = prepare_images(data(tmp_path, tmp_path / "a.npz"))
    shutil.copy(tmp_path / "a.npz", tmp_path / "b.npz")

    def must_not(*args):
        raise AssertionError("an image was read")

    with monkeypatch.context() as patch:
        patch.setattr(encoding, "as_square", must_not)
        assert prepare_images(data(tmp_path, tmp_path / "a.npz")).fingerprint == first.fingerprint
        assert prepare_images(data(tmp_path, tmp_path / "b.npz")).fingerprint == first.fingerprint
    arrays["x_train"][0, 0, 0, 0] ^= 255
    np.savez(tmp_path / "b.npz", **arrays)
    assert prepare_images(data(tmp_path, tmp_path / "b.npz")).fingerprint != first.fingerprint
    assert prepare_images(data(tmp_path, tmp_path / "a.npz", codes=9)).fingerprint != first.fingerprint
    few = prepare_images(data(tmp_path, tmp_path / "a.npz", train_images=20, eval_images=3))
    assert (len(few.train), len(few.valid)) == (20, 3)


@pytest.mark.parametrize(
    "name", ["train.npy", "tokenizer/image_tokenizer.json", "tokenizer/image_tokenizer.safetensors"]
)
def test_damaged_files_of_the_cache_are_made_anew(tmp_path, name):
    save_images(tmp_path / "a.npz")
    first = prepare_images(data(tmp_path, tmp_path / "a.npz"))
    (file,) = (tmp_path / "cache" / "image-tokens").glob(f"*/{name}")
    content = file.read_bytes()
    for damage in (
        file.unlink,
        lambda: file.write_bytes(content[:-5]),
        lambda: file.write_bytes(content[:-1] + bytes([content[-1] ^ 1])),
    ):
        damage()
        again = prepare_images(data(tmp_path, tmp_path / "a.npz"))
        assert again.fingerprint == first.fingerprint
        assert file.read_bytes() == content
        assert np.array_equal(again.tokenizer.tokenizer.means, first.tokenizer.tokenizer.means)


def test_a_killed_encoding_resumes_at_its_last_batch(tmp_path, monkeypatch):
    save_images(tmp_path / "a.npz", train=30)
    whole = prepare_images(data(tmp_path, tmp_path / "a.npz"))
    monkeypatch.setattr(encoding, "_BATCH", 4)
    encode, sizes = PatchTokenizer.encode, []

    def count(self, images):
        if sum(sizes) >= 20 and not (tmp_path / "go").exists():
            raise KeyboardInterrupt
        sizes.append(len(images))
        return encode(self, images)

    monkeypatch.setattr(PatchTokenizer, "encode", count)
    other = data(tmp_path, tmp_path / "a.npz", cache_dir=str(tmp_path / "other"))
    with pytest.raises(KeyboardInterrupt):
        prepare_images(other)
    assert sum(sizes) == 20
    (tmp_path / "go").touch()
    (begun,) = (tmp_path / "other").rglob("*.parts/train.npy")
    begun.write_bytes(begun.read_bytes()[: 128 + 10 * 5 * 4])  # cut short in the third batch of four
    assert prepare_images(other).fingerprint == whole.fingerprint
    assert sum(sizes) == 20 + 30 - 8 + 10
    assert not list((tmp_path / "other" / "image-tokens").glob("*.parts"))


@pytest.mark.slow
@pytest.mark.shared_data
def test_cifar_survives_512_mean_patches_with_22_6_db(tmp_path, shared_data):
    source = shared_data / "cifar10" / "cifar10_full_jpeg.npz.xz"
    prepared = prepare_images(data(tmp_path, source, size=32, codes=512, train_images=10_000))
    assert prepared.train.length == 65
    assert prepared.facts["psnr_db"] == pytest.approx(22.6, abs=0.15)


def test_bad_sources(tmp_path):
    images, labels = noise(4, 8, 8, 3), np.array([0, 1, 2, 9])
    np.savez(tmp_path / "few.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    save_images(tmp_path / "a.npz")
    (tmp_path / "config.json").write_text("{}")
    for name, changes, message in (
        ("few.npz", {}, "4 training images are fewer than the 10 classes"),
        ("a.npz", {"classes": 10}, "2 classes, not 10; set --classes 2"),
        ("a.npz", {"train_images": 1}, "1 training images are fewer than the 2 classes"),
        ("a.npz", {"tokenizer": "./nowhere"}, "no such image tokenizer"),
        ("a.npz", {"tokenizer": str(tmp_path)}, "holds no VQModel"),
    ):
        assert_refused(message, prepare_images, data(tmp_path, tmp_path / name, **changes))


VQ = {
    "block_out_channels": (4, 8, 8),
    "down_block_types": ("DownEncoderBlock2D",) * 3,
    "up_block_types": ("UpDecoderBlock2D",) * 3,
    "latent_channels": 6,
    "vq_embed_dim": 6,
    "num_vq_embeddings": 24,
    "norm_num_groups": 4,
    "mid_block_add_attention": False,
    "lookup_from_codebook": True,  # these two as amused-512 has them
    "force_upcast": True,
}


@pytest.fixture
def vq(tmp_path):
    """A small VQModel as amused keeps its own, in the folder `vqvae`; the folder, and the model."""
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.VQModel(**VQ).eval()
    torch.nn.init.normal_(model.quantize.embedding.weight)  # diffusers' own is so narrow that one code wins
    torch.nn.init.normal_(model.quant_conv.weight)
    model.save_pretrained(tmp_path / "amused" / "vqvae")
    return tmp_path / "amused", model


@torch.no_grad()
def test_a_vqmodel_encodes_to_its_codes_and_decodes_them(vq, tmp_path):
    folder, model = vq
    tokenizer = find_vq(str(folder))
    assert (tokenizer.codes, tokenizer.patch, tokenizer.channels) == (24, 4, 3)
    images = noise(18, 16, 24, 3)  # more than a batch
    codes = tokenizer.encode(images)
    assert codes.shape == (18, 4, 6)
    latents = model.encode(torch.from_numpy(images).permute(0, 3, 1, 2) / 255).latents.permute(0, 2, 3, 1)
    distances = torch.cdist(latents.double().flatten(0, 2), model.quantize.embedding.weight.double())
    chosen = distances.gather(1, torch.from_numpy(codes).reshape(-1, 1))[:, 0]
    torch.testing.assert_close(chosen, distances.amin(1), rtol=1e-4, atol=1e-5)
    assert len(np.unique(codes)) > 3
    pixels = model.decode(torch.from_numpy(codes), force_not_quantize=True, shape=(18, 4, 6, 6)).sample.clamp(0, 1)
    drawn = tokenizer.decode(codes)
    assert drawn.shape == images.shape
    assert np.abs(drawn - (pixels * 255).permute(0, 2, 3, 1).numpy()).max() <= 0.51
    ImageCodec(tokenizer, 4, 6, ("a",)).save_pretrained(tmp_path / "saved")
    shutil.rmtree(folder)
    assert np.array_equal(ImageCodec.load(tmp_path / "saved").tokenizer.encode(images), codes)


def test_images_encoded_by_a_vqmodel(vq, tmp_path):
    folder, _ = vq
    arrays = save_images(tmp_path / "a.npz", train=6, test=4, side=16)
    source = {"source": tmp_path / "a.npz", "tokenizer": str(folder), "size": 16}
    prepared = prepare_images(data(tmp_path, **source, codes=24))
    assert prepared.train[3]["input_ids"][0] == 24 + arrays["y_train"][3]
    codes = find_vq(str(folder)).encode(arrays["x_train"])[3]
    assert prepared.train[3]["input_ids"][1:].tolist() == codes.ravel().tolist()
    assert_refused("24 codes of 4 pixels; set --codes 24 --patch 4", prepare_images, data(tmp_path, **source, codes=25))


def test_a_vqmodel_without_diffusers_or_safetensors(tmp_path, monkeypatch):
    config = {"_class_name": "VQModel", "num_vq_embeddings": 5, "in_channels": 3, "block_out_channels": [8, 8]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_refused("pickled weights are never read", VQTokenizer, tmp_path)
    (tmp_path / "diffusion_pytorch_model.safetensors").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "diffusers", None)
    assert_refused(r"pip install '.*\[images\]'", VQTokenizer(tmp_path).encode, noise(1, 4, 4, 3))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    save_images(folder / "a.npz", train=64, test=16)
    options = {"source": folder / "a.npz", "patch": 4, "codes": 8, "classes": 2, "cache_dir": folder / "cache"}
    options |= {"layers": 1, "width": 16, "heads": 2, "hidden": 24, "steps": 60, "batch_size": 16, "lr": 0.02}
    options |= {"warmup_steps": 5, "eval_every": 30, "save_every": 30, "tracker": "none", "threads": 1}
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    assert main(["train", "image-tokens-demo", "--arm", "noble:rank=2", "--out", str(folder / "run"), *words]) == 0
    return folder / "run"


def test_the_class_decides_what_is_drawn(trained):
    model, codec = load_model(trained / "model"), ImageCodec.load(trained / "model")
    sampling = Sampling(temperature=1.0, top_k=0, seed=3)
    images = sample_images(model, codec, [0, 1, 1, 0], 12, sampling)
    assert images.shape == (4, 12, 8, 8, 3)
    brightness = images.reshape(4, -1).mean(1)
    assert brightness[[1, 2]].min() > 180
    assert brightness[[0, 3]].max() < 80
    assert not np.array_equal(images[0], images[3]), "drawn, not looked up"
    assert np.array_equal(sample_images(model, codec, [0, 1, 1, 0], 12, sampling), images)
    other = sample_images(model, codec, [0, 1, 1, 0], 12, Sampling(temperature=1.0, top_k=0, seed=4))
    assert not np.array_equal(other, images)
    surest = sample_images(model, codec, [0], 5, Sampling(temperature=0))
    assert all(np.array_equal(each, surest[0, 0]) for each in surest[0])


def test_requests_that_cannot_be_drawn(trained):
    model, codec = load_model(trained / "model"), ImageCodec.load(trained / "model")
    stranger = ImageCodec(codec.tokenizer, 1, 4, codec.classes)
    for tokenizer, classes, each, sampling, message in (
        (codec, [2], 1, Sampling(), "classes 0 to 1, got 1 of"),
        (codec, [0], 0, Sampling(), "at least one image"),
        (codec, [0], 1, Sampling(max_new_tokens=3), "every image has 4 tokens"),
        (stranger, [0], 1, Sampling(), "they do not match"),
    ):
        assert_refused(message, sample_images, model, tokenizer, classes, each, sampling)


def test_generate_writes_a_picture(trained, tmp_path, capsys):
    out = tmp_path / "samples.png"
    assert "3 images of each of 0, 1" in succeed(capsys, "generate", trained, "--images", 3, "--out", out)
    assert np.asarray(Image.open(out)).shape == (2 * 50 + 2, 12 + 3 * 50, 3)
    succeed(capsys, "generate", trained, "--classes", 1, "--images", 1, "--out", tmp_path / "b.jpg")
    for arguments, message in (
        (["--classes", "7"], "no class '7'"),
        (["--prompt", "def"], "takes no --prompt"),
        (["--out", str(tmp_path / "no" / "a.png")], "no such folder"),
        (["--out", str(tmp_path / "a.txt")], "must end in .png"),
    ):
        assert message in refused(capsys, "generate", trained, *arguments)


def plain_model(folder, tokenizer):
    config = ImageTokensConfig(
        vocab_size=tokenizer.codes, num_classes=2, grid_rows=2, grid_columns=2, hidden_size=16, intermediate_size=24,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=8, hidden_act="gelu",
        attention_bias=False,
    )  # fmt: skip
    ImageTokensForCausalLM(config).save_pretrained(folder)
    ImageCodec(tokenizer, 2, 2, ("cat", "dog")).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["patches", "vq"])
def test_a_converted_model_keeps_its_tokenizer_and_draws(kind, tmp_path, request):
    if kind == "vq":
        tokenizer = find_vq(str(request.getfixturevalue("vq")[0]))
        files = ["image_tokenizer/config.json", "image_tokenizer/diffusion_pytorch_model.safetensors"]
    else:
        tokenizer = PatchTokenizer.fit(noise(50, 8, 8, 3), codes=9, patch=4)
        files = ["image_tokenizer.safetensors"]
    folder = plain_model(tmp_path / "plain", tokenizer)
    report = convert(folder, tmp_path / "out", NobleConfig(rank=2))
    assert {"image_tokenizer.json", *files} <= set(report.copied)
    shutil.rmtree(folder)
    assert main(["generate", str(tmp_path / "out"), "--images", "1", "--out", str(tmp_path / "a.png")]) == 0
    assert np.asarray(Image.open(tmp_path / "a.png")).shape[0] > 16


def test_evaluate_repeats_the_loss_of_training(trained, capsys):
    code = f"from nonlinear_lowrank.hub.loading import check_causal; check_causal({str(trained / 'model')!r})"
    subprocess.run([sys.executable, "-c", code], check=True)  # where nothing else has registered its class
    out = succeed(capsys, "evaluate", trained)
    loss = json.loads((trained / "result.json").read_text())["final_loss"]
    assert f"loss {loss:.4f} nats a token over {16 * 4} tokens" in out
    assert "held-out images of image-tokens-demo" in out
    assert "bits per byte" not in out


def test_a_killed_run_resumes_bit_by_bit_with_any_cache(trained, tmp_path):
    recipe = Recipe.from_dict(json.loads((trained / "recipe.json").read_text())["recipe"])
    moved = replace(
        recipe, task=replace(recipe.task, tokens=replace(recipe.task.tokens, cache_dir=str(tmp_path / "c")))
    )
    assert_resumes_exactly(moved, trained, tmp_path / "run")
    other = replace(moved, task=replace(moved.task, tokens=replace(moved.task.tokens, codes=9)))
    assert_refused("codes", run_training, other, tmp_path / "run", resume=True, quiet=True)


def test_a_picture_shows_the_pixels():
    images = noise(2, 3, 5, 7, 3)
    sheet = np.asarray(picture(images, ["a", "bcd"]))
    scale = 10  # to 48 pixels or more
    assert sheet.shape == (2 + 2 * (50 + 2), 8 * 3 + 4 + 3 * (70 + 2), 3)
    last = sheet[54:104, 28 + 2 * 72 : 28 + 2 * 72 + 70]
    assert np.array_equal(last[::scale, ::scale], images[1, 2])
