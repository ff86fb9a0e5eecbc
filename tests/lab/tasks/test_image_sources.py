"""What a source of images may be: labels, pixels of any depth, splits of a dataset, and what cannot be read."""

import io
import json

import numpy as np
import pytest
from PIL import Image

from nlr_lab.cli.main import main
from nlr_lab.tasks.images.backbones import VitBackbone
from nlr_lab.tasks.images.data import ImageSource
from nlr_lab.tasks.images.encoding import as_square, prepare_images
from nlr_lab.tasks.images.examples import Pixels
from nlr_lab.tasks.images.files import read_images
from nlr_lab.tasks.images.pretraining import ImagePretrainingTask
from nlr_lab.tasks.images.tokens import ImageTokenData
from nlr_lab.tasks.metrics import scores
from nonlinear_lowrank.errors import UserError
from seeds import rng

SMALL = {"steps": 2, "layers": 1, "width": 16, "heads": 2, "hidden": 16, "batch-size": 4, "arm": "noble:rank=2"}
SMALL |= {"tracker": "none", "threads": 1}
VIT = {**SMALL, "plain-rows": 8}
TOKENS = {**SMALL, "warmup-steps": 0, "codes": 8}


def noise(*shape):
    return rng().integers(0, 256, shape, dtype=np.uint8)


def nlr(verb, *words, **options):
    settings = [str(word) for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
    return main([verb, *map(str, words), *settings])


def refused(call, *arguments):
    """The message of a refusal, which is one line."""
    with pytest.raises(UserError) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def png(array):
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, "PNG")
    return buffer.getvalue()


def folder_of(path, train, test, broken=()):
    """<path>/<side>/<class>/<number>.png of two classes; `broken` are such names that hold no image."""
    for side, count in (("train", train), ("test", test)):
        for name in ("ant", "bee"):
            (path / side / name).mkdir(parents=True)
            for index in range(count):
                file = f"{side}/{name}/{index}.png"
                (path / file).write_bytes(b"no image" if file in broken else png(noise(8, 8)))
    return path


def vit_task(source, **fields):
    images = ImageSource(source=str(source), size=8, **fields.pop("images", {}))
    backbone = VitBackbone(layers=1, width=16, heads=2, hidden=16, patch=4, channels=1)
    return ImagePretrainingTask(images=images, backbone=backbone, **fields)


# --- arrays --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (np.array([0, 1, -1, 1]), "labels must be integers from 0 .*got -1; number the classes"),
        (np.eye(4, dtype=np.int64), r"\(4, 4\); of one-hot rows give the argmax"),
        (np.array(["cat", "dog", "cat", "dog"]), "got 'cat'; number the classes"),
        (np.array([0, 1, 0.5, 1]), "got 0.5"),
        (np.array([0, 1, np.nan, 1]), "got nan"),
        (np.array([0, 1, 2**62, 1]), f"got {2**62}"),
        (np.array(3), r"got \(\)"),
    ],
)
def test_labels_that_number_no_classes(tmp_path, labels, words):
    np.savez(tmp_path / "a.npz", images=noise(4, 5, 5), labels=labels)
    file = png(noise(5, 5))
    blob = {"blob": np.frombuffer(file * 4, np.uint8), "off": np.arange(5) * len(file), "y": labels}
    np.savez(
        tmp_path / "b.npz", **{f"{side}_{name}": each for side in ("train", "test") for name, each in blob.items()}
    )
    for name in ("a.npz", "b.npz"):
        with pytest.raises(UserError, match=words.replace("labels must", "(labels|train_y) must")):
            read_images(str(tmp_path / name))


@pytest.mark.parametrize(
    "labels", [[[0], [1], [1], [0], [1]], [0.0, 1.0, 1.0, 0.0, 1.0], [False, True, True, False, True]]
)
def test_labels_of_other_forms(tmp_path, labels):
    np.savez(tmp_path / "a.npz", images=noise(5, 3, 3, 4), labels=np.array(labels))
    splits = read_images(str(tmp_path / "a.npz"))
    found = np.concatenate([splits.train.labels, splits.test.labels])
    assert found.dtype == np.int64
    assert sorted(found.tolist()) == [0, 0, 1, 1, 1]
    assert splits.classes == ("0", "1")


@pytest.mark.parametrize("shape", [(4, 8, 8, 5), (4, 8, 8, 2), (4, 0, 0), (4, 8, 8, 0), (0, 8, 8)])
def test_images_without_pixels_or_of_strange_channels(tmp_path, shape):
    np.savez(tmp_path / "a.npz", images=noise(*shape), labels=np.zeros(shape[0], np.int64))
    message = refused(read_images, str(tmp_path / "a.npz"))
    assert "1, 3 or 4 channels" in message if shape[0] else "at least one image" in message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"train_off": np.array([0.0, 1.0, 2.0])}, "train_off must be integers that rise"),
        ({"train_off": np.array([0, 9, 5])}, "train_off must be integers that rise"),
        ({"train_off": np.array([0, 5, 9999])}, "to the length of train_blob"),
        ({"test_off": np.array([0])}, "there must be one more"),
        ({"test_off": None}, "needs the arrays"),
    ],
)
def test_encoded_files_whose_offsets_do_not_fit(tmp_path, change, words):
    side = {"blob": noise(10), "off": np.array([0, 5, 10]), "y": np.array([0, 1])}
    arrays = {f"{name}_{part}": each for name in ("train", "test") for part, each in side.items()} | change
    np.savez(tmp_path / "a.npz", **{name: each for name, each in arrays.items() if each is not None})
    assert words in refused(read_images, str(tmp_path / "a.npz"))


@pytest.mark.parametrize(("recipe", "options"), [("vit-demo", VIT), ("image-tokens-demo", TOKENS)])
def test_a_refused_source_leaves_the_former_run(tmp_path, capsys, recipe, options):
    run = tmp_path / "run"
    np.savez(tmp_path / "bad.npz", images=noise(60, 8, 8), labels=np.eye(3, dtype=np.int64).repeat(20, 0))
    cache = {"cache-dir": tmp_path / "cache"} if recipe.startswith("image") else {}
    assert nlr("train", recipe, **options, **cache, out=run) == 0
    before = (run / "result.json").read_bytes()
    capsys.readouterr()
    bad = {**options, **cache, "source": tmp_path / "bad.npz", "out": run}
    assert nlr("train", recipe, "--overwrite", **bad) == 2
    assert "one-hot" in capsys.readouterr().err
    assert (run / "result.json").read_bytes() == before


# --- pixels of other depths ----------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 3])
def test_grey_of_16_bits_keeps_its_range(tmp_path, channels):
    levels = np.arange(256, dtype=np.uint8).reshape(16, 16)
    deep = levels.astype(np.uint16) * 257
    Image.fromarray(deep).save(tmp_path / "deep.png")
    how = Pixels(size=16, channels=channels, mean=(0.5,) * channels, std=(0.5,) * channels)
    for picture in (Image.open(tmp_path / "deep.png"), Image.fromarray(deep)):
        assert picture.mode == "I;16"
        assert (how.array(picture) == levels).all()
        assert (as_square(picture, 16, channels) == levels[..., None]).all()
    near = Image.fromarray(np.array([[128, 129, 65535 - 128, 65535 - 129]], dtype=np.uint16).repeat(4, 0))
    assert as_square(near, 4, 1)[0, :, 0].tolist() == [0, 1, 255, 254]


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.full((8, 8), 0.5, np.float32), "mode F"),
        (np.full((8, 8), 70_000, np.int32), "mode I"),
        (np.full((8, 8), -1, np.int32), "mode I"),
    ],
)
def test_pictures_of_an_unknown_range_count_as_unreadable(tmp_path, array, words):
    source = folder_of(tmp_path / "images", 3, 3)
    path = source / "train" / "bee" / "1.tif"
    Image.fromarray(array).save(path)
    message = refused(read_images(str(source)).train.read, 5)
    assert str(path) in message
    assert words in message
    with pytest.warns(UserWarning, match=f"1 of 7 train images .*1.tif: .*{words}"):
        tokens = prepare_images(
            ImageTokenData(source=str(source), size=8, patch=4, codes=4, cache_dir=str(tmp_path / "cache"))
        )
    assert tokens.facts["channels"] == 1
    prepared = vit_task(source, images={"held_out": 0.0}).prepare()
    with pytest.warns(UserWarning, match=words):
        prepared.train[5]
    assert prepared.describe()["unreadable_images"] == 1


# --- images that cannot be read ------------------------------------------------------------------------------


def test_an_image_of_the_plain_part_is_counted_once(tmp_path):
    broken = [f"train/bee/{index}.png" for index in range(3)]
    source = folder_of(tmp_path / "images", 8, 2, broken)
    prepared = vit_task(source, images={"held_out": 0.0}, plain_rows=12).prepare()
    with pytest.warns(UserWarning, match="skipped") as named:
        [split[index] for split in (prepared.train, prepared.plain, prepared.valid) for index in range(len(split))]
    assert len(named) == 3
    assert "(3 so far)" in str(named[2].message)
    assert prepared.describe()["unreadable_images"] == 3
    left_out = sum(int(prepared.plain[index]["labels"]) == -100 for index in range(12))
    rows = np.sort(np.random.default_rng(3).permutation(16)[:12])
    assert left_out == np.isin(rows, [8, 9, 10]).sum()


@pytest.mark.parametrize("held_out", [0.0, 0.25])
def test_splits_of_nothing_but_damage_are_refused_before_training(tmp_path, capsys, held_out):
    source = folder_of(
        tmp_path / "images", 4, 2, [f"test/{name}/{index}.png" for name in ("ant", "bee") for index in (0, 1)]
    )
    options = {**VIT, "source": source, "images.held-out": held_out, "out": tmp_path / "run"}
    assert nlr("train", "vit-demo", **options) == 2
    error = capsys.readouterr().err
    assert "none of the 4 images can be read" in error
    assert not (tmp_path / "run").exists()


def test_nothing_but_damage_held_out_or_in_the_plain_part(tmp_path):
    # Of eight, always the same ones are held out, and the same ones are plain.
    rows = [0, 1, 2, 3, 4, 5, 6, 7]
    whole = vit_task(folder_of(tmp_path / "a", 4, 1), images={"held_out": 0.25}).images.find()
    held = [f"train/{('ant', 'bee')[row // 4]}/{row % 4}.png" for row in whole.held]
    source = folder_of(tmp_path / "b", 4, 1, held)
    message = refused(vit_task(source, images={"held_out": 0.25}).prepare)
    assert f"none of the {len(held)} images can be read" in message
    first = np.random.default_rng(3).permutation(rows)[0]
    source = folder_of(tmp_path / "c", 4, 1, [f"train/{('ant', 'bee')[first // 4]}/{first % 4}.png"])
    message = refused(vit_task(source, images={"held_out": 0.0}, plain_rows=1).prepare)
    assert "none of the 1 images can be read" in message
    assert "plain_rows" in message


def test_images_that_vanish_during_training(tmp_path):
    import torch

    from nlr_lab.tasks.metrics import scores_of_examples

    with pytest.raises(UserError, match="none of the 3 images can be read"):
        scores_of_examples(torch.zeros(3, 2), torch.full((3,), -100), scores(("accuracy",)))


# --- datasets ------------------------------------------------------------------------------------------------


def dataset(monkeypatch, **splits):
    """Makes load_dataset return splits of (images, labels); labels None: without that column."""
    from datasets import Dataset, DatasetDict, Features, Sequence, Value
    from datasets import Image as ImageFeature

    made = {}
    for name, (images, labels) in splits.items():
        values, kinds = {"image": images}, {"image": ImageFeature()}
        if labels is not None:
            some = next(each for each in [*labels, 0] if each is not None)
            kind = (
                Sequence(Value("int64"))
                if isinstance(some, list)
                else Value("string" if isinstance(some, str) else "int64")
            )
            values, kinds = values | {"label": labels}, kinds | {"label": kind}
        made[name] = Dataset.from_dict(values, features=Features(kinds))
    monkeypatch.setattr("datasets.load_dataset", lambda name: DatasetDict(made))


def pictures(count):
    return [{"bytes": png(noise(4, 4)), "path": None} for _ in range(count)]


@pytest.mark.parametrize(
    ("splits", "words"),
    [
        ({"fit": [0, 1]}, "needs a split train; it has fit"),
        ({"train": ["cat", "dog"]}, "got 'cat'"),
        ({"train": [0, None]}, r"'label' of some/set \(train\) must be integers"),
        ({"train": [[0, 1], [1, 0]]}, "must be integers"),
        ({"train": [0, -1]}, "got -1"),
        ({"train": [0, 1], "test": ["cat", "dog"]}, r"\(test\) must be integers from 0, got 'cat'"),
    ],
)
def test_datasets_that_do_not_fit(monkeypatch, splits, words):
    dataset(monkeypatch, **{name: (pictures(len(labels)), labels) for name, labels in splits.items()})
    with pytest.raises(UserError, match=words) as caught:
        read_images("some/set")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("labels", [None, [-1, -1], [None, None], []])
def test_a_test_split_without_labels_is_passed_over(monkeypatch, labels):
    test = pictures(2 if labels is None else len(labels))
    dataset(monkeypatch, train=(pictures(3), [0, 1, 1]), test=(test, labels), valid=(pictures(2), [0, 3]))
    splits = read_images("some/set")
    assert splits.test.labels.tolist() == [0, 3]
    assert splits.classes == ("0", "1", "2", "3")


def test_an_image_that_is_missing_in_a_dataset_is_left_out(monkeypatch, tmp_path):
    images = [*pictures(6), None]
    dataset(monkeypatch, train=(images, [0, 1, 0, 1, 0, 1, 0]), test=(pictures(2), [0, 1]))
    prepared = vit_task("some/set", images={"held_out": 0.0}).prepare()
    with pytest.warns(UserWarning, match=r"train/6 of some/set: there is no image; skipped"):
        assert prepared.train[6]["pixel_values"].shape == (1, 8, 8)
    assert prepared.describe()["unreadable_images"] == 1
    settings = ImageTokenData(source="some/set", size=4, patch=2, codes=4, cache_dir=str(tmp_path))
    with pytest.warns(UserWarning, match="1 of 7 train images .*there is no image"):
        assert len(prepare_images(settings).train) == 6


# --- settings ------------------------------------------------------------------------------------------------


def test_fewer_images_than_classes_for_tokens(tmp_path, capsys):
    where = {"cache-dir": tmp_path / "cache", "out": tmp_path / "run"}
    assert nlr("train", "image-tokens-demo", **TOKENS, **where, train_images=3) == 2
    assert "train_images 3 is fewer than the 10 classes of digits; set 10 or more" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


# --- a cache that is damaged ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["image_tokenizer.json", "image_tokenizer.safetensors"])
def test_a_damaged_tokenizer_in_the_cache_is_made_anew(tmp_path, name):
    np.savez(tmp_path / "a.npz", images=noise(30, 8, 8), labels=np.arange(30) % 2)
    settings = ImageTokenData(source=str(tmp_path / "a.npz"), patch=4, codes=8, cache_dir=str(tmp_path / "cache"))
    first = prepare_images(settings, progress=False)
    (file,) = (tmp_path / "cache" / "image-tokens").glob(f"*/tokenizer/{name}")
    for damage in (file.unlink, lambda: file.write_bytes(file.read_bytes()[:-5])):
        damage()
        again = prepare_images(settings, progress=False)
        assert again.fingerprint == first.fingerprint
        assert np.array_equal(again.tokenizer.tokenizer.means, first.tokenizer.tokenizer.means)


def test_damaged_parts_of_an_encoding_are_made_anew(tmp_path, monkeypatch):
    from nlr_lab.tasks.images import encoding

    np.savez(tmp_path / "a.npz", images=noise(30, 8, 8), labels=np.arange(30) % 2)
    settings = ImageTokenData(source=str(tmp_path / "a.npz"), patch=4, codes=8, cache_dir=str(tmp_path / "cache"))

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(encoding, "_report", stop)
        with pytest.raises(KeyboardInterrupt):
            prepare_images(settings, progress=False)
    (parts,) = (tmp_path / "cache" / "image-tokens").glob("*.parts")
    part = parts / "train-000000000.npz"
    part.write_bytes(part.read_bytes()[:-30])
    with monkeypatch.context() as patch:
        patch.setattr(encoding, "_report", stop)
        with pytest.raises(KeyboardInterrupt):
            prepare_images(settings, progress=False)
    (parts / "tokenizer" / "image_tokenizer.json").write_text("{")
    other = ImageTokenData(source=settings.source, patch=4, codes=8, cache_dir=str(tmp_path / "other"))
    assert prepare_images(settings).fingerprint == prepare_images(other).fingerprint


# --- commands ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [("--images", "3"), ("--out", "foo.png"), ("--classes", "1")])
def test_a_text_model_draws_nothing(tmp_path, capsys, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "glm"}))
    (tmp_path / "model" / "model.safetensors").write_bytes(b"")
    assert main(["generate", "model", *words]) == 2
    assert f"{words[0]} is for models of image tokens" in capsys.readouterr().err
