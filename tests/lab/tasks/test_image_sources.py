"""Sources of images: arrays, folders, datasets, labels, pixels of any depth."""

import io
import json
import lzma
import re

import numpy as np
import pytest
from PIL import Image

from cli_helpers import refused, succeed
from image_helpers import noise, png
from nlr_lab.fields.image import read_pixels
from nlr_lab.tasks.images.encoding import as_square
from nlr_lab.tasks.images.examples import Pixels
from nlr_lab.tasks.images.sources import ImageSource, read_images
from refusals import assert_refused


def pixels(side, index):
    return np.asarray(side.read(index))


def test_digits_are_embedded_and_split_the_same_way_each_time():
    one, two = read_images("digits"), read_images("digits")
    assert (len(one.train), len(one.test), len(one.classes)) == (1438, 359, 10)
    assert (one.train.labels == two.train.labels).all()
    assert pixels(one.train, 0).shape == (8, 8, 1)
    assert max(pixels(one.test, index).max() for index in range(20)) == 255


def test_arrays_and_encoded_blobs(tmp_path):
    images, labels = noise(6, 5, 4, 3), np.array([0, 1, 2, 0, 1, 2], dtype=np.uint8)
    np.savez(tmp_path / "a.npz", x_train=images[:4], y_train=labels[:4], x_test=images[4:], y_test=labels[4:])
    blobs = {}
    for name, chosen in (("train", slice(0, 4)), ("test", slice(4, 6))):
        files = [png(image) for image in images[chosen]]
        blobs |= {f"{name}_blob": np.frombuffer(b"".join(files), dtype=np.uint8), f"{name}_y": labels[chosen]}
        blobs[f"{name}_off"] = np.cumsum([0, *map(len, files)])
    buffer = io.BytesIO()
    np.savez(buffer, **blobs)
    (tmp_path / "b.npz.xz").write_bytes(lzma.compress(buffer.getvalue()))
    for name in ("a.npz", "b.npz.xz"):
        splits = read_images(str(tmp_path / name))
        assert splits.classes == ("0", "1", "2")
        assert splits.train.labels.tolist() + splits.test.labels.tolist() == labels.tolist()
        assert all((pixels(splits.train, index) == images[index]).all() for index in range(4))
        assert (pixels(splits.test, 1) == images[5]).all()


@pytest.mark.parametrize("held_out", ["val", "valid", "dev"])
def test_folders_of_classes(tmp_path, held_out):
    arrays = {}
    for side, count in (("train", 3), (held_out, 1)):
        for name in ("zebra", "ant"):
            (tmp_path / side / name).mkdir(parents=True)
            for index in range(count):
                arrays[side, name, index] = noise(4 + index, 5, 3)
                (tmp_path / side / name / f"{index}.png").write_bytes(png(arrays[side, name, index]))
    (tmp_path / "train" / "ant" / "notes.txt").write_text("no image")
    splits = read_images(str(tmp_path))
    assert splits.classes == ("ant", "zebra")
    assert (len(splits.train), len(splits.test)) == (6, 2)
    assert splits.train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert (pixels(splits.train, 4) == arrays["train", "zebra", 1]).all()
    alone = read_images(str(tmp_path / "train"))
    assert (len(alone.train), len(alone.test)) == (5, 1)
    (tmp_path / "train" / "bat").mkdir()
    for source in (tmp_path, tmp_path / "train"):
        assert_refused("bat holds no image; delete it", read_images, str(source))


def test_classes_of_a_folder_that_are_not_used_are_told(tmp_path):
    for name in "abc":
        (tmp_path / name).mkdir()
        for index in range(4):
            (tmp_path / name / f"{index}.png").write_bytes(png(noise(4, 4, 3)))
    with pytest.warns(
        UserWarning, match="2 classes of .* are used; --classes chooses among its 3, without a value all"
    ):
        assert ImageSource(source=str(tmp_path), classes=(0, 2)).find().classes == ("a", "c")
    assert ImageSource(source=str(tmp_path)).find().classes == ("a", "b", "c")


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (np.array([0, 1, -1, 1]), "labels must be integers from 0 .*got -1; number the classes"),
        (np.eye(4, dtype=np.int64), r"got \[1, 0, 0, 0\]; .*, and of one-hot rows give the argmax"),
        (np.array(["cat", "dog", "cat", "dog"]), "got 'cat'; number the classes"),
        (np.array([0, 1, 0.5, 1]), "got 0.5"),
        (np.array([0, 1, np.nan, 1]), "got nan"),
        (np.array([0, 1, 2**62, 1]), f"got {2**62}"),
    ],
)
def test_labels_that_number_no_classes(tmp_path, labels, words):
    np.savez(tmp_path / "a.npz", images=noise(4, 5, 5), labels=labels)
    file = png(noise(5, 5))
    blob = {"blob": np.frombuffer(file * 4, np.uint8), "off": np.arange(5) * len(file), "y": labels}
    blobs = {f"{side}_{name}": each for side in ("train", "test") for name, each in blob.items()}
    np.savez(tmp_path / "b.npz", **blobs)
    for name in ("a.npz", "b.npz"):
        assert_refused(words.replace("labels must", "(labels|train_y) must"), read_images, str(tmp_path / name))


@pytest.mark.parametrize(
    "labels", [[[0], [1], [1], [0], [1]], [0.0, 1.0, 1.0, 0.0, 1.0], [False, True, True, False, True]]
)
def test_labels_of_other_forms(tmp_path, labels):
    np.savez(tmp_path / "a.npz", images=noise(5, 3, 3, 4), labels=np.array(labels))
    splits = read_images(str(tmp_path / "a.npz"))
    assert (len(splits.train), len(splits.test)) == (4, 1)
    found = np.concatenate([splits.train.labels, splits.test.labels])
    assert found.dtype == np.int64
    assert sorted(found.tolist()) == [0, 0, 1, 1, 1]
    assert splits.classes == ("0", "1")


FITTING = {"images": np.zeros((3, 4, 4), np.uint8), "labels": np.zeros(3, np.int64)}
ENCODED = {"blob": np.zeros(10, np.uint8), "off": np.array([0, 5, 10]), "y": np.array([0, 1])}
ENCODED = {f"{side}_{part}": each for side in ("train", "test") for part, each in ENCODED.items()}


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"x": np.zeros(3)}, "needs the arrays x_train"),
        (FITTING | {"images": np.zeros((3, 4, 4))}, "uint8"),
        (FITTING | {"labels": np.zeros(2)}, "2 labels"),
        ({"images": np.array([object()]), "labels": np.zeros(1)}, "not a readable .npz file"),
        *(
            (FITTING | {"images": np.zeros((3, *s), np.uint8)}, "3 or 4 channels")
            for s in ((8, 8, 5), (8, 8, 2), (0, 0))
        ),
        ({"images": np.zeros((0, 8, 8), np.uint8), "labels": np.zeros(0, np.int64)}, "at least one image"),
        (ENCODED | {"train_off": np.array([0.0, 1.0, 2.0])}, "train_off must be 3 integers that rise"),
        (ENCODED | {"train_off": np.array([0, 9, 5])}, "train_off must be 3 integers that rise"),
        (ENCODED | {"train_off": np.array([0, 5, 9999])}, "to the length of train_blob"),
        (ENCODED | {"test_off": np.array([0])}, "test_off must be 3 integers that rise"),
        ({name: each for name, each in ENCODED.items() if name != "test_off"}, "needs the arrays"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(tmp_path, arrays, words):
    np.savez(tmp_path / "a.npz", **arrays, allow_pickle=True)
    assert_refused(re.escape(words), read_images, str(tmp_path / "a.npz"))


def test_absent_sources_are_refused(tmp_path):
    (tmp_path / "a.npz").write_bytes(b"PK no")
    (tmp_path / "empty" / "cat").mkdir(parents=True)
    (tmp_path / "alone" / "train" / "cat").mkdir(parents=True)
    for source, words in (
        (tmp_path / "none.npz", "no file or folder"),
        ("no/such", "cannot read the dataset 'no/such'"),
        (tmp_path / "a.npz", "not a readable .npz file"),
        (tmp_path / "empty", "no folders of images"),
        (tmp_path / "alone", f"holds train alone; put test or val beside it, or give {tmp_path}/alone/train"),
    ):
        assert_refused(re.escape(words), read_images, str(source))
    (tmp_path / "empty" / "cat" / "1.png").write_bytes(b"no image")
    assert_refused("has one class, 'cat'; give", ImageSource(source=str(tmp_path / "empty")).find)
    splits = read_images(str(tmp_path / "empty"))
    assert_refused("cannot read the image", (splits.train if len(splits.train) else splits.test).read, 0)


def test_no_picture_is_given_to_ghostscript(tmp_path, monkeypatch):
    program = tmp_path / "gs"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    file = tmp_path / "a.png"
    file.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n%%EOF\n")
    assert_refused("a.png: it is EPS, a program and no picture; convert it to PNG", read_pixels, file)
    assert not (tmp_path / "ran").exists()


@pytest.mark.shared_data
def test_the_shared_images(shared_data):
    mnist = read_images(str(shared_data / "mnist10k" / "mnist10k.npz"))
    assert (len(mnist.train), len(mnist.test), len(mnist.classes)) == (8000, 2000, 10)
    counts = np.bincount(np.concatenate([mnist.train.labels, mnist.test.labels]))
    assert counts.tolist() == [1001, 1127, 991, 1032, 980, 863, 1014, 1070, 944, 978]
    cifar = read_images(str(shared_data / "cifar10" / "cifar10_full_jpeg.npz.xz"))
    assert (len(cifar.train), len(cifar.test), len(cifar.classes)) == (50_000, 10_000, 10)
    assert pixels(cifar.train, 49_999).shape == (32, 32, 3)


def dataset(monkeypatch, names=None, label="label", **splits):
    """Make load_dataset return splits of (images, labels); labels None: without that column."""
    from datasets import ClassLabel, Dataset, DatasetDict, Features, Sequence, Value
    from datasets import Image as ImageFeature

    made = {}
    for name, (images, labels) in splits.items():
        values, kinds = {"image": images}, {"image": ImageFeature()}
        if labels is not None:
            some = next(each for each in [*labels, 0] if each is not None)
            kind = ClassLabel(names=names) if names else Value("string" if isinstance(some, str) else "int64")
            kind = Sequence(Value("int64")) if isinstance(some, list) else kind
            values, kinds = values | {label: labels}, kinds | {label: kind}
        made[name] = Dataset.from_dict(values, features=Features(kinds))
    monkeypatch.setattr("datasets.load_dataset", lambda name: DatasetDict(made))


def pictures(count):
    return [{"bytes": png(noise(4, 4)), "path": None} for _ in range(count)]


def test_dataset_gives_images_labels_and_names(monkeypatch):
    array = noise(4, 4, 3)
    files = [{"bytes": png(array), "path": None}, {"bytes": b"no image", "path": None}, None]
    splits = {"train": (files, [0, 1, 1]), "test": (files[:1], [1])}
    dataset(monkeypatch, names=["cat", "dog"], label="fine_label", **splits)
    splits = read_images("some/dataset")
    assert splits.classes == ("cat", "dog")
    assert (splits.train.labels.tolist(), splits.test.labels.tolist()) == ([0, 1, 1], [1])
    assert (pixels(splits.train, 0) == array).all()
    assert_refused("cannot read the image train/1 of some/dataset", splits.train.read, 1)
    assert_refused("train/2 of some/dataset: there is no image", splits.train.read, 2)


@pytest.mark.parametrize(
    ("splits", "words"),
    [
        ({"fit": [0, 1]}, "needs a split train; it has fit"),
        ({"train": [0, None]}, "'label' of some/set (train) must be integers"),
        ({"train": [[0, 1], [1, 0]]}, "must be integers"),
        ({"train": [0, -1]}, "got -1"),
        ({"train": [0, 1], "test": ["cat", "dog"]}, "(test) must be integers from 0 to 999,999, got 'cat'"),
    ],
)
def test_datasets_that_do_not_fit(monkeypatch, splits, words):
    dataset(monkeypatch, **{name: (pictures(len(labels)), labels) for name, labels in splits.items()})
    assert_refused(re.escape(words), read_images, "some/set")


@pytest.mark.parametrize("labels", [None, [-1, -1], [None, None], []])
def test_splits_without_labels_are_passed_over(monkeypatch, labels):
    test = pictures(2 if labels is None else len(labels))
    dataset(monkeypatch, train=(pictures(3), [0, 1, 1]), test=(test, labels), valid=(pictures(2), [0, 3]))
    splits = read_images("some/set")
    assert splits.test.labels.tolist() == [0, 3]
    assert splits.classes == ("0", "1", "2", "3")


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


def test_refused_source_leaves_the_former_run(tmp_path, capsys):
    sizes = ["--steps=2", "--layers=1", "--width=16", "--heads=2", "--hidden=16", "--batch-size=4", "--plain-rows=8"]
    command = ["train", "vit-demo", *sizes, "--arm", "noble:rank=2", "--out", tmp_path / "run"]
    np.savez(tmp_path / "bad.npz", images=noise(60, 8, 8), labels=np.eye(3, dtype=np.int64).repeat(20, 0))
    succeed(capsys, *command)
    before = (tmp_path / "run" / "result.json").read_bytes()
    assert "one-hot" in refused(capsys, *command, "--overwrite", "--source", tmp_path / "bad.npz")
    assert (tmp_path / "run" / "result.json").read_bytes() == before


@pytest.mark.parametrize("words", [("--images", "3"), ("--out", "foo.png"), ("--classes", "1")])
def test_text_models_draw_nothing(tmp_path, capsys, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "glm"}))
    (tmp_path / "model" / "model.safetensors").write_bytes(b"")
    assert f"{words[0]} is for models of image tokens" in refused(capsys, "generate", "model", *words)
