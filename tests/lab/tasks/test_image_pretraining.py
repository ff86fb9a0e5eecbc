"""Image classification from scratch: augmentation, mixing, the backbone, unreadable images, runs and commands."""

import copy
import io
import json
import math

import numpy as np
import pytest
import torch
from PIL import Image

from nlr_lab.tasks.images import randaugment
from nlr_lab.tasks.images.augmentation import Augmentation
from nlr_lab.tasks.images.examples import Pixels
from nlr_lab.tasks.images.files import read_images
from nlr_lab.tasks.images.mixing import mix_pairs
from nlr_lab.tasks.images.pretraining import classification_loss
from nlr_lab.training import run_training
from nonlinear_lowrank.errors import UserError
from pretraining_helpers import image_task as task
from pretraining_helpers import recipe
from seeds import rng

PLAIN = {"randaugment": 0, "mixup": 0.0, "cutmix": 0.0}


# --- RandAugment and crops -----------------------------------------------------------------------------------

NAMES = list(randaugment.OPERATIONS)


@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize("name", NAMES)
def test_operations_keep_size_and_mode_and_do_nothing_at_zero(name, mode):
    shape = (12, 10) if mode == "L" else (12, 10, 3)
    picture = Image.fromarray(rng().integers(0, 256, shape, dtype=np.uint8))
    before = np.array(picture)
    operation = randaugment.OPERATIONS[name]
    changed = operation(picture, 0.3, -1)
    assert (changed.size, changed.mode) == (picture.size, mode)
    assert (np.array(picture) == before).all(), "the original is left alone"
    if name not in ("identity", "autocontrast", "equalize") and (name, mode) != ("color", "L"):
        assert (np.array(changed) != before).any()
    if name not in ("autocontrast", "equalize"):
        assert np.abs(np.array(operation(picture, 0.0, 1)).astype(int) - before).max() <= 1


def test_operations_move_by_what_the_table_says():
    column = np.zeros((33, 33), dtype=np.uint8)
    column[:, 16] = 255
    picture = Image.fromarray(column)

    def centres(image):
        array = np.array(image).astype(float)
        return (array * np.arange(33)).sum(1) / np.maximum(array.sum(1), 1e-9), array.sum(1) > 0

    for sign in (1, -1):
        moved, seen = centres(randaugment._translate_x(picture, 9 / 30, sign))
        assert moved[seen] == pytest.approx(16 - sign * 150 / 331 * 0.3 * 33, abs=0.05)
        tilted, seen = centres(randaugment._shear_x(picture, 9 / 30, sign))
        slope = np.polyfit(np.arange(33)[seen], tilted[seen], 1)[0]
        assert slope == pytest.approx(-sign * 0.09, abs=0.005)
        assert tilted[16] == pytest.approx(16, abs=0.1), "about the middle"
        turned, seen = centres(randaugment._rotate(picture, 9 / 30, sign))
        angle = math.degrees(math.atan(np.polyfit(np.arange(33)[seen], turned[seen], 1)[0]))
        assert abs(angle) == pytest.approx(9, abs=0.7)
    grey = Image.fromarray(np.array([[10, 100, 200]], dtype=np.uint8))
    assert np.array(randaugment._solarize(grey, 9 / 30, 1)).tolist() == [[10, 100, 55]]
    assert np.array(randaugment._posterize(grey, 9 / 30, 1)).tolist() == [[10, 100, 200]]
    assert np.array(randaugment._posterize(grey, 1.0, 1)).tolist() == [[0, 96, 192]]
    bright = randaugment.OPERATIONS["brightness"]
    assert np.array(bright(grey, 9 / 30, -1)).tolist() == [[7, 73, 146]]


def test_operations_are_drawn_for_each_image(tmp_path, monkeypatch):
    seen = []

    def noting(name):
        return lambda picture, m, sign: seen.append((name, m, sign)) or picture

    for name in NAMES:
        monkeypatch.setitem(randaugment.OPERATIONS, name, noting(name))
    prepared = task(tmp_path, {"magnitude": 12}, images={"held_out": 0.0}).prepare()
    for index in range(60 * 4):
        prepared.train[index]
    names = [name for name, _, _ in seen]
    assert len(names) == 2 * 60 * 4
    assert {m for _, m, _ in seen} == {0.4}
    assert set(names) == set(NAMES)
    pairs = {tuple(names[at : at + 2]) for at in range(0, len(names), 2)}
    assert len(pairs) > 60, "not one choice for a batch"
    assert {sign for _, _, sign in seen} == {-1, 1}


def test_crops():
    array = rng().integers(1, 256, (16, 16), dtype=np.uint8)
    picture = Image.fromarray(array)
    shift, resized = (Augmentation(crop=crop, **PLAIN) for crop in ("shift", "resized"))
    found = set()
    for seed in range(200):
        moved = np.array(shift.picture(picture, 16, lambda each: each, np.random.default_rng(seed)))
        at = [(y, x) for y in range(-2, 3) for x in range(-2, 3) if (_moved(array, y, x) == moved).all()]
        assert len(at) == 1
        found |= set(at)
    assert len(found) == 25
    # A ramp tells which part was taken.
    ramp = Image.fromarray((np.arange(200)[None] * np.ones((100, 1))).astype(np.uint8))
    spans = []
    for seed in range(200):
        part = np.array(resized.picture(ramp, 32, None, np.random.default_rng(seed)))
        assert part.shape == (32, 32)
        spans.append(int(part[0, -1]) - int(part[0, 0]))
    # Of 8 to 100 % of the area, as wide as high or up to a third more or less: 35 to 163 of 200 columns.
    assert 30 <= min(spans) < 60
    assert 120 < max(spans) <= 140
    mirror, flipped = Augmentation(flip=True, **PLAIN), set()
    for seed in range(20):
        flipped.add(np.array(mirror.picture(picture, 16, lambda each: each, np.random.default_rng(seed))).tobytes())
    assert flipped == {array.tobytes(), np.ascontiguousarray(array[:, ::-1]).tobytes()}


def _moved(array, y, x):
    padded = np.pad(array, 2)
    return padded[2 + y : 18 + y, 2 + x : 18 + x]


# --- mixing --------------------------------------------------------------------------------------------------


def batch(count=6, classes=5, side=7):
    pixels = torch.randn(count, 3, side, side, dtype=torch.float64)
    return {"pixel_values": pixels, "labels": torch.randint(classes, (count,))}


def test_mixup_is_the_formula_of_each_pair():
    given = batch()
    before = copy.deepcopy(given)
    weights = torch.rand(6, dtype=torch.float64)
    mixing = torch.stack([torch.tensor([1.0, float(w), 0.5, 0.5], dtype=torch.float64) for w in weights])
    mixed = mix_pairs(given, mixing, 5)
    one_hot = torch.eye(5, dtype=torch.float64)[given["labels"]]
    for index in range(6):
        other, weight = index ^ 1, weights[index - index % 2]
        x, y = given["pixel_values"], one_hot
        torch.testing.assert_close(mixed["pixel_values"][index], weight * x[index] + (1 - weight) * x[other])
        torch.testing.assert_close(mixed["labels"][index], weight * y[index] + (1 - weight) * y[other])
    assert torch.equal(given["pixel_values"], before["pixel_values"])


def test_cutmix_swaps_a_box_and_weighs_the_labels_by_it():
    for _ in range(50):
        given = batch(count=2, classes=2, side=9)
        given["labels"] = torch.tensor([0, 1])
        weight, y, x = torch.rand(3, dtype=torch.float64).tolist()
        mixed = mix_pairs(given, torch.tensor([[2.0, weight, y, x], [1.0, 0.5, 0, 0]], dtype=torch.float64), 2)
        pixels, result = given["pixel_values"], mixed["pixel_values"]
        swapped = (result[0] != pixels[0]).any(0)
        assert torch.equal(result[0], torch.where(swapped, pixels[1], pixels[0]))
        assert torch.equal(result[1], torch.where(swapped, pixels[0], pixels[1]))
        share = swapped.double().mean().item()
        assert mixed["labels"][0].tolist() == pytest.approx([1 - share, share])
        assert mixed["labels"][1].tolist() == pytest.approx([share, 1 - share])
        rows, columns = swapped.any(1).sum(), swapped.any(0).sum()
        assert rows * columns == swapped.sum(), "a box"
        assert max(rows, columns) <= round(9 * math.sqrt(1 - weight)) + 1


def test_weights_follow_their_beta_and_coin():
    draws = torch.stack([Augmentation().draw_mixing(np.random.default_rng(seed)) for seed in range(4000)])
    mixup, cutmix = draws[draws[:, 0] == 1][:, 1], draws[draws[:, 0] == 2][:, 1]
    assert len(mixup) + len(cutmix) == 4000
    assert len(mixup) == pytest.approx(2000, abs=4 * math.sqrt(1000))
    # Variance of Beta(a, a): 1 / (4 (2 a + 1)); a uniform lambda, kornia's, would have 1 / 12.
    assert mixup.mean().item() == pytest.approx(0.5, abs=0.035)
    assert mixup.var().item() == pytest.approx(1 / (4 * 2.6), rel=0.06)
    assert cutmix.var().item() == pytest.approx(1 / 12, rel=0.08)
    for settings, kinds in (({"mixup": 0.0}, {2}), ({"cutmix": 0.0}, {1}), ({"mixup": 0.0, "cutmix": 0.0}, {0})):
        one = [int(Augmentation(**settings).draw_mixing(np.random.default_rng(seed))[0]) for seed in range(50)]
        assert set(one) == kinds


def test_what_cannot_be_mixed(tmp_path):
    with pytest.raises(UserError, match="have none"):
        mix_pairs({"pixel_values": torch.zeros(2, 1, 4, 4)}, torch.zeros(2, 4), 3)


def test_mixed_labels_are_probabilities_not_many_classes_at_once():
    logits = torch.randn(4, 3, dtype=torch.float64)
    classes, shares = torch.randint(3, (4,)), torch.rand(4, 3, dtype=torch.float32)
    shares /= shares.sum(1, keepdim=True)
    expected = -(shares * logits.float().log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(classification_loss(shares, logits, None), expected)
    hard = classification_loss(torch.eye(3)[classes], logits, None)
    torch.testing.assert_close(classification_loss(classes, logits, None), hard)


# --- the task ------------------------------------------------------------------------------------------------


def test_draws_follow_seed_image_and_pass_alone(tmp_path):
    train = task(tmp_path, {"crop": "shift", "flip": True}).prepare().train
    count = len(train)

    def same(one, two):
        return all(torch.equal(one[name], two[name]) for name in one)

    assert same(train.seeded(3)[5], train.seeded(3)[5])
    different = [train.seeded(3)[5], train.seeded(3)[5 + count], train.seeded(4)[5]]
    assert len({each["mixing"].numpy().tobytes() for each in different}) == 3
    assert len({int(each["labels"]) for each in different}) == 1
    assert train.seed == 0


def test_splits_and_the_plain_part(tmp_path):
    prepared = task(tmp_path, images={"held_out": 0.25}).prepare()
    assert [len(each) for each in (prepared.train, prepared.valid, prepared.test, prepared.plain)] == [45, 15, 30, 10]
    plain = {prepared.plain[index]["pixel_values"].numpy().tobytes() for index in range(10)}
    whole = prepared.train.images
    kept = {prepared.tokenizer.array(whole.read(index)).tobytes() for index in range(45)}
    assert plain <= kept
    assert task(tmp_path, plain_rows=0).prepare().plain is None
    assert task(tmp_path, images={"held_out": 0.0}).prepare().test is None
    one, two = task(tmp_path).prepare().fingerprint, task(tmp_path, {"mixup": 0.0}).prepare().fingerprint
    assert one != two


def test_the_middle_is_cut_out_as_the_saved_processor_does(tmp_path):
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    how = Pixels(size=8, channels=3, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4), shorter=10)
    how.save_pretrained(tmp_path)
    processor = ViTImageProcessorPil.from_pretrained(tmp_path)
    for shape in ((20, 12, 3), (13, 31, 3), (9, 9, 3)):
        array = rng().integers(0, 256, shape, dtype=np.uint8)
        theirs = processor(Image.fromarray(array), return_tensors="pt")["pixel_values"]
        ours = how.collate([{"pixel_values": torch.from_numpy(how.array(array)), "labels": torch.tensor(0)}])
        assert ours["pixel_values"].numpy() == pytest.approx(theirs.numpy(), abs=1e-5)


def test_fewer_images_than_classes(tmp_path):
    labels = np.array([0, 1, 2, 9, 3])
    images = rng().integers(0, 256, (5, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "few.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    with pytest.raises(UserError, match="5 images to train on for 10 classes"):
        task(tmp_path, images={"source": str(tmp_path / "few.npz"), "held_out": 0.0}).prepare()


def test_the_split_of_a_dataset_that_has_labels(monkeypatch):
    from datasets import ClassLabel, Dataset, DatasetDict, Features
    from datasets import Image as ImageFeature

    features = Features({"image": ImageFeature(), "label": ClassLabel(names=["cat", "dog"])})
    png = io.BytesIO()
    Image.fromarray(rng().integers(0, 256, (4, 4, 3), dtype=np.uint8)).save(png, "PNG")
    files = [{"bytes": png.getvalue(), "path": None}, {"bytes": b"no image", "path": None}]

    def rows(labels):
        return Dataset.from_dict({"image": files, "label": labels}, features=features)

    imagenet = DatasetDict({"train": rows([0, 1]), "validation": rows([1, 0]), "test": rows([-1, -1])})
    monkeypatch.setattr("datasets.load_dataset", lambda name: imagenet)
    splits = read_images("some/imagenet")
    assert splits.test.labels.tolist() == [1, 0], "ImageNet's test images have no labels"
    assert splits.train.read(0).size == (4, 4)
    with pytest.raises(UserError, match="cannot read the image validation/1 of some/imagenet"):
        splits.test.read(1)


# --- unreadable images ---------------------------------------------------------------------------------------


@pytest.fixture
def damaged(tmp_path):
    """Twenty images of two classes in a folder, of which one in training and one in the test split is cut off."""
    for side, count in (("train", 8), ("test", 4)):
        for name in ("ant", "bee"):
            folder = tmp_path / "images" / side / name
            folder.mkdir(parents=True)
            for index in range(count):
                Image.fromarray(rng().integers(0, 256, (8, 8), dtype=np.uint8)).save(folder / f"{index}.png")
    for file in ("train/bee/3.png", "test/ant/1.png"):
        path = tmp_path / "images" / file
        path.write_bytes(path.read_bytes()[:60])
    return tmp_path


@pytest.mark.parametrize("workers", [0, 2])
def test_unreadable_images_are_named_and_counted_and_training_goes_on(damaged, tmp_path, workers, recwarn):
    own = task(damaged, images={"source": str(damaged / "images"), "held_out": 0.0}, plain_rows=0)
    settings = {"steps": 8, "batch_size": 4, "save_every": 8, "eval_every": 4, "dataloader_workers": workers}
    result = run_training(recipe(own, **settings), tmp_path / "run", quiet=True)
    assert result.status == "done"
    record = json.loads((tmp_path / "run" / "result.json").read_text())
    assert record["data"]["unreadable_images"] == 2
    named = [str(each.message) for each in recwarn]
    assert sum("ant/1.png" in text for text in named) == 1, "once, however often it is evaluated"
    if not workers:  # else they warn on their own stderr
        assert sum("train/bee/3.png" in text for text in named) == 1
    # Seven test images are left, so the accuracy is a number of sevenths.
    assert result.score * 7 == pytest.approx(round(result.score * 7), abs=1e-9)
    assert math.isfinite(result.final_loss)


def test_the_next_image_stands_in_with_its_own_label(damaged):
    prepared = task(damaged, PLAIN, images={"source": str(damaged / "images"), "held_out": 0.0}).prepare()
    with pytest.warns(UserWarning, match=r"bee.3\.png.*skipped \(1 so far\)"):
        stand_in = prepared.train[11]
    after = prepared.train[12]
    assert torch.equal(stand_in["pixel_values"], after["pixel_values"])
    assert int(stand_in["labels"]) == 1
    with pytest.warns(UserWarning, match="ant"):
        assert int(prepared.valid[1]["labels"]) == -100
    assert prepared.describe()["unreadable_images"] == 2


def test_a_source_of_nothing_but_damage(tmp_path):
    for side in ("train", "test"):
        for name in ("ant", "bee"):
            folder = tmp_path / "images" / side / name
            folder.mkdir(parents=True)
            for index in range(2):
                (folder / f"{index}.png").write_bytes(b"no image")
    with pytest.raises(UserError, match="none of the 4 images can be read"):
        task(tmp_path, images={"source": str(tmp_path / "images"), "held_out": 0.0}).prepare()


# --- runs ----------------------------------------------------------------------------------------------------
