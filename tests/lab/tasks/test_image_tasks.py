"""Image classification: sources, splits, pixels, augmentation, and the new head."""

import functools
import io
import lzma

import numpy as np
import pytest
import torch
from PIL import Image

import finetune_helpers as kit
from nlr_lab.tasks.finetune.image_classification import vary_image
from nlr_lab.tasks.finetune.pretrained import Pretrained
from nlr_lab.tasks.images.examples import Pixels, TrainingImages
from nlr_lab.tasks.images.files import Images, read_images
from nonlinear_lowrank.errors import UserError
from seeds import rng


def pixels(side, index):
    return np.asarray(side.read(index))


def as_png(array, kind="PNG"):
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, kind)
    return buffer.getvalue()


# --- sources -------------------------------------------------------------------------------------------------


def test_digits_are_embedded_and_split_the_same_way_each_time():
    one, two = read_images("digits"), read_images("digits")
    assert (len(one.train), len(one.test), len(one.classes)) == (1438, 359, 10)
    assert (one.train.labels == two.train.labels).all()
    assert pixels(one.train, 0).shape == (8, 8, 1)
    assert max(pixels(one.test, index).max() for index in range(20)) == 255


def test_arrays_and_encoded_blobs(tmp_path):
    images, labels = rng().integers(0, 256, (6, 5, 4, 3), dtype=np.uint8), np.array([0, 1, 2, 0, 1, 2], dtype=np.uint8)
    np.savez(tmp_path / "a.npz", x_train=images[:4], y_train=labels[:4], x_test=images[4:], y_test=labels[4:])
    files = [as_png(image) for image in images]
    blobs = {}
    for name, chosen in (("train", slice(0, 4)), ("test", slice(4, 6))):
        sizes = [len(file) for file in files[chosen]]
        blobs |= {
            f"{name}_blob": np.frombuffer(b"".join(files[chosen]), dtype=np.uint8),
            f"{name}_off": np.concatenate([[0], np.cumsum(sizes)]),
            f"{name}_y": labels[chosen],
        }
    buffer = io.BytesIO()
    np.savez(buffer, **blobs)
    (tmp_path / "b.npz.xz").write_bytes(lzma.compress(buffer.getvalue()))
    for name in ("a.npz", "b.npz.xz"):
        splits = read_images(str(tmp_path / name))
        assert splits.classes == ("0", "1", "2")
        assert splits.train.labels.tolist() + splits.test.labels.tolist() == labels.tolist()
        for index in range(4):
            assert (pixels(splits.train, index) == images[index]).all()
        assert (pixels(splits.test, 1) == images[5]).all()


def test_one_array_is_split(tmp_path):
    labels = rng().integers(0, 4, 50)
    labels[:4] = range(4)
    np.savez(tmp_path / "a.npz", images=rng().integers(0, 256, (50, 3, 3), dtype=np.uint8), labels=labels)
    splits = read_images(str(tmp_path / "a.npz"))
    assert (len(splits.train), len(splits.test)) == (40, 10)
    assert sorted([*splits.train.labels, *splits.test.labels]) == sorted(labels)


def test_folders_of_classes(tmp_path):
    arrays = {}
    for side, count in (("train", 3), ("val", 1)):
        for name in ("zebra", "ant"):
            (tmp_path / side / name).mkdir(parents=True)
            for index in range(count):
                arrays[side, name, index] = rng().integers(0, 256, (4 + index, 5, 3), dtype=np.uint8)
                (tmp_path / side / name / f"{index}.png").write_bytes(as_png(arrays[side, name, index]))
    (tmp_path / "train" / "ant" / "notes.txt").write_text("no image")
    splits = read_images(str(tmp_path))
    assert splits.classes == ("ant", "zebra")
    assert (len(splits.train), len(splits.test)) == (6, 2)
    assert splits.train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert (pixels(splits.train, 4) == arrays["train", "zebra", 1]).all()
    alone = read_images(str(tmp_path / "train"))
    assert (len(alone.train), len(alone.test)) == (5, 1)


def test_a_dataset(tmp_path, monkeypatch):
    from datasets import ClassLabel, Dataset, DatasetDict, Features
    from datasets import Image as ImageFeature

    array = rng().integers(0, 256, (4, 4, 3), dtype=np.uint8)
    features = Features({"img": ImageFeature(), "fine_label": ClassLabel(names=["cat", "dog"])})
    rows = Dataset.from_dict({"img": [Image.fromarray(array)] * 3, "fine_label": [0, 1, 1]}, features=features)
    monkeypatch.setattr("datasets.load_dataset", lambda name: DatasetDict({"train": rows, "test": rows.select([1])}))
    splits = read_images("some/dataset")
    assert splits.classes == ("cat", "dog")
    assert (splits.train.labels.tolist(), splits.test.labels.tolist()) == ([0, 1, 1], [1])
    assert (pixels(splits.train, 2) == array).all()


@pytest.mark.shared_data
def test_the_shared_images(shared_data):
    mnist = read_images(str(shared_data / "mnist10k" / "mnist10k.npz"))
    assert (len(mnist.train), len(mnist.test), len(mnist.classes)) == (8000, 2000, 10)
    counts = np.bincount(np.concatenate([mnist.train.labels, mnist.test.labels]))
    assert counts.tolist() == [1001, 1127, 991, 1032, 980, 863, 1014, 1070, 944, 978]
    cifar = read_images(str(shared_data / "cifar10" / "cifar10_full_jpeg.npz.xz"))
    assert (len(cifar.train), len(cifar.test), len(cifar.classes)) == (50_000, 10_000, 10)
    assert pixels(cifar.train, 49_999).shape == (32, 32, 3)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"x": np.zeros(3)}, "needs the arrays x_train"),
        ({"images": np.zeros((3, 4, 4)), "labels": np.zeros(3)}, "uint8"),
        ({"images": np.zeros((3, 4, 4), np.uint8), "labels": np.zeros(2)}, "2 labels"),
        ({"images": np.array([object()]), "labels": np.zeros(1)}, "no .npz file that can be read"),
    ],
)
def test_arrays_that_do_not_fit(tmp_path, arrays, words):
    np.savez(tmp_path / "a.npz", **arrays, allow_pickle=True)
    with pytest.raises(UserError, match=words) as caught:
        read_images(str(tmp_path / "a.npz"))
    assert "\n" not in str(caught.value)


def test_sources_that_are_not_there(tmp_path):
    with pytest.raises(UserError, match="no file or folder"):
        read_images(str(tmp_path / "none.npz"))
    with pytest.raises(UserError, match="cannot read the dataset 'no/such'"):
        read_images("no/such")
    (tmp_path / "a.npz").write_bytes(b"PK no")
    with pytest.raises(UserError, match=r"no \.npz file that can be read"):
        read_images(str(tmp_path / "a.npz"))
    (tmp_path / "empty" / "cat").mkdir(parents=True)
    with pytest.raises(UserError, match="no folders of images"):
        read_images(str(tmp_path / "empty"))
    (tmp_path / "empty" / "cat" / "1.png").write_bytes(b"no image")
    splits = read_images(str(tmp_path / "empty"))
    with pytest.raises(UserError, match="cannot read the image"):
        (splits.train if len(splits.train) else splits.test).read(0)


# --- pixels and splits ---------------------------------------------------------------------------------------


def test_pixels_are_resized_converted_and_normalised():
    array = rng().integers(0, 256, (8, 8, 3), dtype=np.uint8)
    how = Pixels(size=8, channels=3, mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7))
    item = torch.from_numpy(how.array(array))
    assert (item.numpy() == array.transpose(2, 0, 1)).all()
    batch = how.collate([{"pixel_values": item, "labels": torch.tensor(2)}] * 2)
    assert batch["labels"].tolist() == [2, 2]
    expected = (array.transpose(2, 0, 1) / 255 - np.array([[[0.1]], [[0.2]], [[0.3]]])) / np.array(
        [[[0.5]], [[0.6]], [[0.7]]]
    )
    assert batch["pixel_values"][1].numpy() == pytest.approx(expected, abs=1e-5)
    assert Pixels(size=4, channels=1, mean=(0.5,), std=(0.5,)).array(array).shape == (1, 4, 4)
    grey = how.array(array[..., 0])
    assert (grey[0] == grey[2]).all()
    assert how.array(Image.fromarray(array).resize((16, 20))).shape == (3, 8, 8)


def test_a_saved_processor_does_the_same(tmp_path):
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    array = rng().integers(0, 256, (20, 12, 3), dtype=np.uint8)
    how = Pixels(size=8, channels=3, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))
    how.save_pretrained(tmp_path)
    theirs = ViTImageProcessorPil.from_pretrained(tmp_path)(Image.fromarray(array), return_tensors="pt")["pixel_values"]
    ours = how.collate([{"pixel_values": torch.from_numpy(how.array(array)), "labels": torch.tensor(0)}])
    assert ours["pixel_values"].numpy() == pytest.approx(theirs.numpy(), abs=1e-5)


def test_three_sets_apart(tmp_path):
    prepared = kit.image_task(tmp_path, held_out=0.25).prepare()
    assert (len(prepared.train), len(prepared.valid), len(prepared.test)) == (45, 15, 30)
    seen = {bytes(each["pixel_values"].numpy().tobytes()) for each in (prepared.train[i] for i in range(45))}
    held = {bytes(each["pixel_values"].numpy().tobytes()) for each in (prepared.valid[i] for i in range(15))}
    assert len(seen) == 45
    assert not seen & held
    alone = kit.image_task(tmp_path, held_out=0.0).prepare()
    assert (len(alone.train), len(alone.valid), alone.test) == (60, 30, None)
    fewer = kit.image_task(tmp_path, train_rows=20, test_rows=7).prepare()
    assert (len(fewer.train), len(fewer.valid), len(fewer.test)) == (18, 2, 7)


def test_chosen_classes_are_renumbered():
    labels = np.array([0, 3, 1, 3, 2, 0])
    chosen = Images(labels, lambda index: np.full((2, 2), index, np.uint8)).of_classes((3, 0))
    assert chosen.labels.tolist() == [1, 0, 0, 1]
    assert [int(chosen.read(index)[0, 0]) for index in range(4)] == [0, 1, 3, 5]


def test_augmentation_depends_on_pass_and_image_alone():
    array = rng().integers(0, 256, (16, 8, 8), dtype=np.uint8)
    images = Images(np.arange(16), lambda index: array[index])
    how = Pixels(size=8, channels=1, mean=(0.5,), std=(0.5,))
    plain = TrainingImages(images, how)
    assert not plain.counts_passes
    for kind in ("flip", "crop-flip"):
        examples = TrainingImages(images, how, functools.partial(vary_image, crop=kind == "crop-flip"))
        assert examples.counts_passes
        passes = [[examples[index + 16 * number]["pixel_values"].numpy() for index in range(16)] for number in range(4)]
        again = examples[5 + 16]["pixel_values"].numpy()
        assert (again == passes[1][5]).all()
        assert any(not (one == two).all() for one, two in zip(passes[0], passes[1], strict=True))
        assert [int(examples[index + 32]["labels"]) for index in range(16)] == list(range(16))
        if kind == "flip":
            for row in passes:
                for index, found in enumerate(row):
                    assert (found[0] == array[index]).all() or (found[0] == array[index][:, ::-1]).all()


def test_the_head_is_new_whatever_the_checkpoint_had(tmp_path):
    task = kit.image_task(tmp_path)
    prepared = task.prepare()
    one, two = (task.build_model(prepared, seed=3) for _ in range(2))
    old = Pretrained(checkpoint=str(tmp_path / "vit")).image_classifier(3, seed=9)
    assert torch.equal(one.classifier.weight, two.classifier.weight)
    assert not torch.equal(one.classifier.weight, old.classifier.weight)
    assert one.config.id2label == {0: "0", 1: "1", 2: "2"}
    assert task.adapter_setup(one).head == ("classifier",)
    for (name, mine), other in zip(one.vit.named_parameters(), old.vit.parameters(), strict=True):
        assert torch.equal(mine, other), name


def test_classes_and_channels_that_do_not_fit(tmp_path):
    with pytest.raises(UserError, match="no class 7"):
        kit.image_task(tmp_path, classes=(0, 7)).prepare()
    with pytest.raises(UserError, match="takes 1 channels"):
        kit.image_task(tmp_path, mean=(0.1, 0.2), std=(0.1, 0.2)).prepare()


def test_digits_vit_is_made_once_and_knows_its_digits(tmp_path, monkeypatch):
    from nlr_lab.tasks.images import digits_vit

    monkeypatch.setenv("NLR_CACHE", str(tmp_path))
    monkeypatch.setattr(digits_vit, "_STEPS", 30)
    folder = digits_vit.folder()
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert digits_vit.folder() == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    model = Pretrained(checkpoint="digits-vit").image_classifier(5, 0)
    assert model.config.image_size == 8
