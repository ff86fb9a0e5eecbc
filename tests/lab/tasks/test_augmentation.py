"""Augmentation of training images: RandAugment, crops, Mixup and CutMix."""

import functools
import math

import numpy as np
import pytest
import torch
from PIL import Image

from nlr_lab.tasks.finetune.classification import vary_image
from nlr_lab.tasks.images import augmentation
from nlr_lab.tasks.images.augmentation import Augmentation, mix_pairs
from nlr_lab.tasks.images.examples import Pixels, TrainingImages
from nlr_lab.tasks.images.pretraining import classification_loss
from nlr_lab.tasks.images.sources import Images
from pretraining_helpers import image_task
from seeds import rng

PLAIN = {"randaugment": 0, "mixup": 0.0, "cutmix": 0.0}
NAMES = list(augmentation.OPERATIONS)


@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize("name", NAMES)
def test_operations_keep_size_and_mode_and_do_nothing_at_zero(name, mode):
    shape = (12, 10) if mode == "L" else (12, 10, 3)
    picture = Image.fromarray(rng().integers(0, 256, shape, dtype=np.uint8))
    before = np.array(picture)
    operation = augmentation.OPERATIONS[name]
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
        moved, seen = centres(augmentation.OPERATIONS["translate-x"](picture, 9 / 30, sign))
        assert moved[seen] == pytest.approx(16 - sign * 150 / 331 * 0.3 * 33, abs=0.05)
        tilted, seen = centres(augmentation.OPERATIONS["shear-x"](picture, 9 / 30, sign))
        slope = np.polyfit(np.arange(33)[seen], tilted[seen], 1)[0]
        assert slope == pytest.approx(-sign * 0.09, abs=0.005)
        assert tilted[16] == pytest.approx(16, abs=0.1), "about the middle"
        turned, seen = centres(augmentation.OPERATIONS["rotate"](picture, 9 / 30, sign))
        angle = math.degrees(math.atan(np.polyfit(np.arange(33)[seen], turned[seen], 1)[0]))
        assert abs(angle) == pytest.approx(9, abs=0.7)
    grey = Image.fromarray(np.array([[10, 100, 200]], dtype=np.uint8))
    for name, magnitude, sign, expected in (
        ("solarize", 0.3, 1, [10, 100, 55]),
        ("posterize", 0.3, 1, [10, 100, 200]),
        ("posterize", 1.0, 1, [0, 96, 192]),
        ("brightness", 0.3, -1, [7, 73, 146]),
    ):
        assert np.array(augmentation.OPERATIONS[name](grey, magnitude, sign)).tolist() == [expected]


def test_operations_are_drawn_for_each_image(tmp_path, monkeypatch):
    seen = []
    for name in NAMES:
        note = lambda picture, m, sign, name=name: seen.append((name, m, sign)) or picture  # noqa: E731
        monkeypatch.setitem(augmentation.OPERATIONS, name, note)
    prepared = image_task(tmp_path, {"magnitude": 12}, images={"held_out": 0.0}).prepare()
    for index in range(60 * 4):
        prepared.train[index]
    names, magnitudes, signs = zip(*seen, strict=True)
    assert len(names) == 2 * 60 * 4
    assert (set(names), set(magnitudes), set(signs)) == (set(NAMES), {0.4}, {-1, 1})
    assert len(set(zip(names[::2], names[1::2], strict=True))) > 60, "not one choice for a batch"


def test_crops():
    array = rng().integers(1, 256, (16, 16), dtype=np.uint8)
    picture, padded = Image.fromarray(array), np.pad(array, 2)

    def vary(picture, size, seed, **settings):
        how = Pixels(size=size, channels=1, mean=(0.5,), std=(0.5,))
        varied = Augmentation(**settings, **PLAIN).vary(picture, how, np.random.default_rng(seed))
        return varied["pixel_values"][0].numpy()

    found = set()
    for seed in range(200):
        moved = vary(picture, 16, seed, crop="shift")
        at = [(y, x) for y in range(5) for x in range(5) if (padded[y : y + 16, x : x + 16] == moved).all()]
        assert len(at) == 1
        found |= set(at)
    assert len(found) == 25
    # A ramp tells which part was taken.
    ramp = Image.fromarray((np.arange(200)[None] * np.ones((100, 1))).astype(np.uint8))
    spans = []
    for seed in range(200):
        part = vary(ramp, 32, seed, crop="resized")
        assert part.shape == (32, 32)
        spans.append(int(part[0, -1]) - int(part[0, 0]))
    # Of 8 to 100 % of the area, as wide as high or up to a third more or less: 35 to 163 of 200 columns.
    assert 30 <= min(spans) < 60
    assert 120 < max(spans) <= 140
    flipped = {vary(picture, 16, seed, flip=True).tobytes() for seed in range(20)}
    assert flipped == {array.tobytes(), np.ascontiguousarray(array[:, ::-1]).tobytes()}


def batch(count=6, classes=5, side=7):
    pixels = torch.randn(count, 3, side, side, dtype=torch.float64)
    return {"pixel_values": pixels, "labels": torch.randint(classes, (count,))}


def test_mixup_is_the_formula_of_each_pair():
    given = batch()
    before = given["pixel_values"].clone()
    weights = torch.rand(6, dtype=torch.float64)
    mixing = torch.stack([torch.tensor([1.0, float(w), 0.5, 0.5], dtype=torch.float64) for w in weights])
    mixed = mix_pairs(given, mixing, 5)
    one_hot = torch.eye(5, dtype=torch.float64)[given["labels"]]
    for index in range(6):
        other, weight = index ^ 1, weights[index - index % 2]
        x, y = given["pixel_values"], one_hot
        torch.testing.assert_close(mixed["pixel_values"][index], weight * x[index] + (1 - weight) * x[other])
        torch.testing.assert_close(mixed["labels"][index], weight * y[index] + (1 - weight) * y[other])
    assert torch.equal(given["pixel_values"], before)


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


def test_mixed_labels_are_probabilities():
    logits = torch.randn(4, 3, dtype=torch.float64)
    classes, shares = torch.randint(3, (4,)), torch.rand(4, 3, dtype=torch.float32)
    shares /= shares.sum(1, keepdim=True)
    expected = -(shares * logits.float().log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(classification_loss(shares, logits, None), expected)
    hard = classification_loss(torch.eye(3)[classes], logits, None)
    torch.testing.assert_close(classification_loss(classes, logits, None), hard)


@pytest.mark.parametrize("kind", ["augmentation", "flip", "crop-flip"])
def test_draws_follow_seed_image_and_pass_alone(kind):
    array = rng().integers(0, 256, (16, 8, 8), dtype=np.uint8)
    images, how = Images(np.arange(16), lambda index: array[index]), Pixels(size=8, channels=1, mean=(0.5,), std=(0.5,))
    seeded, tuned = kind == "augmentation", functools.partial(vary_image, crop=kind == "crop-flip")
    vary = Augmentation(crop="shift", flip=True).vary if seeded else tuned
    train = TrainingImages(images, how, vary, 0 if seeded else None)
    assert train.counts_passes
    assert not TrainingImages(images, how).counts_passes
    passes = [[train.seeded(3)[index + 16 * number] for index in range(16)] for number in range(4)]
    assert torch.equal(train.seeded(3)[5 + 16]["pixel_values"], passes[1][5]["pixel_values"])
    changed = [not torch.equal(a["pixel_values"], b["pixel_values"]) for a, b in zip(*passes[:2], strict=True)]
    assert any(changed)
    assert [int(each["labels"]) for each in passes[2]] == list(range(16))
    other = [train.seeded(4)[index]["pixel_values"] for index in range(16)]
    alike = [torch.equal(a, b["pixel_values"]) for a, b in zip(other, passes[0], strict=True)]
    assert all(alike) != seeded, "of the seed, where the draws are a run's own"
    assert train.seed == (0 if seeded else None)
    if kind == "flip":
        for row in passes:
            for index, found in enumerate(row):
                pixels = found["pixel_values"][0].numpy()
                assert (pixels == array[index]).all() or (pixels == array[index][:, ::-1]).all()


def test_tuned_images_are_mirrored_and_moved_by_an_eighth():
    picture = Image.fromarray(rng().integers(0, 256, (8, 8), np.uint8))
    pixels = Pixels(size=8, channels=1, mean=(0.0,), std=(1.0,))
    plain = pixels.tensor(pixels.fitted(picture)).numpy()
    wide = [np.pad(each, ((0, 0), (1, 1), (1, 1))) for each in (plain, plain[:, :, ::-1])]
    ways = {each[:, y : y + 8, x : x + 8].tobytes() for each in wide for y in range(3) for x in range(3)}
    made = [vary_image(picture, pixels, np.random.default_rng(seed), crop=True) for seed in range(400)]
    assert {each["pixel_values"].numpy().tobytes() for each in made} == ways
