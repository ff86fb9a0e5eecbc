"""Image classification from scratch: augmentation, mixing, the backbone, unreadable images, runs and commands."""

import copy
import io
import json
import math
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import finetune_helpers as kit
from model_helpers import parameters
from nlr_lab.cli import main as cli
from nlr_lab.compare import compare
from nlr_lab.runtime.storage import step_folders
from nlr_lab.tasks.images import randaugment
from nlr_lab.tasks.images.augmentation import Augmentation
from nlr_lab.tasks.images.backbones import ConvNextBackbone, VitBackbone
from nlr_lab.tasks.images.data import ImageSource
from nlr_lab.tasks.images.examples import Pixels
from nlr_lab.tasks.images.files import read_images
from nlr_lab.tasks.images.mixing import mix_pairs
from nlr_lab.tasks.images.pretraining import ImagePretrainingTask, classification_loss
from nlr_lab.training import Arm, Recipe, TrainConfig, run_training
from nlr_lab.training.result import TrainResult
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.hub import load_model
from seeds import rng

PLAIN = {"randaugment": 0, "mixup": 0.0, "cutmix": 0.0}
SIZES = {"layers": 2, "width": 16, "heads": 2, "hidden": 32, "patch": 4, "channels": 1}
STAGES = {"depths": (1, 2), "widths": (8, 16), "patch": 2, "channels": 1}
LAST_STAGE = r"sine-lowrank:rank=2,omega=30,include=.*stages\.1\..*pwconv[12]"


def task(root, augmentation=None, backbone=None, convnext=None, **fields):
    if not (root / "images.npz").exists():
        kit.image_file(root / "images.npz")
    data = {"source": str(root / "images.npz"), "size": 8, **fields.pop("images", {})}
    return ImagePretrainingTask(
        images=ImageSource(**data),
        backbone=VitBackbone(**{**SIZES, **(backbone or {})})
        if convnext is None
        else ConvNextBackbone(**{**STAGES, **convnext}),
        augmentation=Augmentation(**(augmentation or {})),
        **{"plain_rows": 10, **fields},
    )


def recipe(own, arm="noble:rank=4", **train):
    settings = {"steps": 6, "batch_size": 4, "lr": 1e-2, "eval_every": 3, "save_every": 3, "log_every": 1}
    settings = {**settings, "tracker": "none", "threads": 1, **train}
    return Recipe(name="tiny", task=own, arm=Arm.parse(arm), train=TrainConfig(**settings))


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


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"crop": "centre"}, "crop"),
        ({"randaugment": -1}, "randaugment"),
        ({"magnitude": 31}, "magnitude"),
        ({"magnitude": 9.5}, "magnitude"),
        ({"mixup": -0.1}, "mixup"),
        ({"cutmix": float("nan")}, "cutmix"),
    ],
)
def test_bad_augmentation(settings, word):
    with pytest.raises(UserError, match=word):
        Augmentation(**settings)


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
    with pytest.raises(UserError, match="takes 3 images at once"):
        run_training(recipe(task(tmp_path), batch_size=3), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()
    run_training(recipe(task(tmp_path, PLAIN), batch_size=3, steps=1), tmp_path / "run", quiet=True)


def test_mixed_labels_are_probabilities_not_many_classes_at_once():
    logits = torch.randn(4, 3, dtype=torch.float64)
    classes, shares = torch.randint(3, (4,)), torch.rand(4, 3, dtype=torch.float32)
    shares /= shares.sum(1, keepdim=True)
    expected = -(shares * logits.float().log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(classification_loss(shares, logits, None), expected)
    hard = classification_loss(torch.eye(3)[classes], logits, None)
    torch.testing.assert_close(classification_loss(classes, logits, None), hard)


# --- the task ------------------------------------------------------------------------------------------------


def test_published_counts():
    sizes = {"layers": 12, "width": 384, "heads": 6, "hidden": 1536}
    small = ImagePretrainingTask(images=ImageSource(), backbone=VitBackbone(patch=16, **sizes), meta_classes=1000)
    assert parameters(small.build_on_meta()) == 22_050_664
    cifar = ImagePretrainingTask(images=ImageSource(size=32), backbone=VitBackbone(patch=4, **sizes), meta_classes=100)
    model = cifar.build_on_meta()
    assert parameters(model) == 21_376_996
    assert all(parameter.is_meta for parameter in model.parameters())
    assert (small.sequence_length, cifar.sequence_length) == (197, 65)
    tiny = ConvNextBackbone(depths=(3, 3, 9, 3), widths=(96, 192, 384, 768))
    convnext = ImagePretrainingTask(images=ImageSource(size=32), backbone=tiny, meta_classes=100)
    assert parameters(convnext.build_on_meta()) == 27_897_028
    assert convnext.sequence_length == 64


@pytest.mark.parametrize("dense_init", ["stock", "noble", "kaiming"])
def test_init_table(tmp_path, dense_init):
    own = task(tmp_path, backbone={"width": 256, "hidden": 320, "heads": 4})
    prepared = own.prepare()
    torch.manual_seed(1)
    model, plain = own.build_model(prepared, dense_init, seed=4), own.build_model(prepared, seed=4)
    for name, module in model.vit.named_modules():
        if isinstance(module, torch.nn.Linear):
            d_in = module.in_features
            # A normal that is cut at two of its own deviations keeps 0.88 of its width.
            std = {"stock": 0.02, "noble": 0.5 / math.sqrt(d_in), "kaiming": 1 / math.sqrt(3 * d_in)}[dense_init]
            assert module.weight.std().item() == pytest.approx(std, rel=0.13 if dense_init == "stock" else 0.03), name
            assert not module.bias.any()
    for name in ("classifier.weight", "vit.embeddings.cls_token", "vit.embeddings.patch_embeddings.projection.weight"):
        assert torch.equal(model.get_parameter(name), plain.get_parameter(name))
    assert model.config.id2label == {0: "0", 1: "1", 2: "2"}
    other = own.build_model(prepared, dense_init, seed=5)
    name = next(name for name, _ in model.named_parameters() if name.endswith("fc1.weight"))
    assert not torch.equal(other.get_parameter(name), model.get_parameter(name))


@pytest.mark.parametrize("dense_init", ["stock", "noble", "kaiming"])
def test_init_of_a_convnext(tmp_path, dense_init):
    own = task(tmp_path, convnext={"widths": (64, 128)})
    prepared = own.prepare()
    model, plain = own.build_model(prepared, dense_init, seed=4), own.build_model(prepared, seed=4)
    for name, module in model.convnext.named_modules():
        if isinstance(module, torch.nn.Linear):
            d_in = module.in_features
            std = {"stock": 0.02, "noble": 0.5 / math.sqrt(d_in), "kaiming": 1 / math.sqrt(3 * d_in)}[dense_init]
            assert module.weight.std().item() == pytest.approx(std, rel=0.03), name
        else:
            for local, parameter in module.named_parameters(recurse=False):
                assert torch.equal(parameter, plain.convnext.get_submodule(name).get_parameter(local)), name
    assert torch.equal(model.classifier.weight, plain.classifier.weight)


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


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"images": {"size": 10}}, "10 pixels do not split into patches of 4; choose 8 or 12"),
        ({"images": {"size": 3}}, "choose 4"),
        ({"backbone": {"heads": 3}}, "3 heads"),
        ({"backbone": {"layers": 0}}, "layers"),
        ({"backbone": {"channels": 2}}, "channels"),
        ({"backbone": {"dropout": 1.0}}, "dropout"),
        ({"backbone": {"dense_init": "xavier"}}, "unknown init"),
        ({"shorter": 7}, "shorter"),
        ({"convnext": {"depths": (1, 1, 1)}}, "a number for each stage"),
        ({"convnext": {"widths": (8, 0)}}, "widths"),
        ({"convnext": {"drop_path": 1.0}}, "drop_path"),
        ({"convnext": {"patch": 3}}, "8 pixels do not split into patches of 3, halved 1 times; choose 6 or 12"),
        ({"plain_rows": -1}, "plain_rows"),
    ],
)
def test_bad_settings(tmp_path, change, words):
    with pytest.raises(UserError, match=words) as caught:
        task(tmp_path, **change)
    assert "\n" not in str(caught.value)


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

SEEN = []


def spy(model, draws=0):
    """Notes what the model is trained on; may draw random numbers."""
    torch.randn(draws + 1)

    def note(module, args, kwargs):
        if module.training:
            SEEN.append((kwargs["pixel_values"].clone(), kwargs["labels"].clone()))

    model.register_forward_pre_hook(note, with_kwargs=True)
    return model


def test_all_arms_see_the_same_pictures_in_every_micro_batch(tmp_path):
    seen = {}
    own = task(tmp_path, {"crop": "shift", "flip": True})
    for name, settings in {"a": {}, "b": {"gradient_accumulation": 2}, "seed": {"seed": 1}}.items():
        SEEN.clear()
        arm = f"{__name__}:spy,draws={100 * (name == 'b')}"
        run_training(recipe(own, arm, **settings), tmp_path / name, quiet=True)
        seen[name] = [torch.cat(each) for each in zip(*SEEN, strict=True)]
    for one, two, other in zip(seen["a"], seen["b"], seen["seed"], strict=True):
        assert torch.equal(one, two)
        assert not torch.equal(one, other)
    assert seen["a"][1].shape == (24, 3)
    assert ((seen["a"][1] > 0).sum(1) == 2).any(), "labels are mixed"


def test_losses_with_and_without_augmentation(tmp_path):
    own = task(tmp_path, {"randaugment": 0})
    result = run_training(recipe(own, steps=60, eval_every=20, save_every=60), tmp_path / "run", quiet=True)
    assert TrainResult.from_json((tmp_path / "run" / "result.json").read_text()) == result
    assert [step for step, _ in result.plain_curve] == [20, 40, 60]
    prepared, model = own.prepare(), load_model(tmp_path / "run" / "model")
    items = [prepared.plain[index] for index in range(10)]
    inputs = prepared.collate(items)
    with torch.no_grad():
        logits = model(pixel_values=inputs["pixel_values"]).logits.double()
    loss = torch.nn.functional.cross_entropy(logits, inputs["labels"]).item()
    assert result.plain_curve[-1][1] == pytest.approx(loss, rel=1e-4)
    # Blended labels cannot be fitted: their loss stays above that of the same images as they are.
    assert result.train_curve[-1][1] > result.plain_curve[-1][1]
    assert result.metric == "accuracy"
    assert result.score > 0.5


@pytest.mark.parametrize(
    ("model", "arm"),
    [({"backbone": {"dropout": 0.1}}, "noble:rank=4"), ({"convnext": {"drop_path": 0.2}}, LAST_STAGE)],
    ids=["vit", "convnext"],
)
def test_resuming_is_exact(tmp_path, model, arm):
    own = task(tmp_path, {"crop": "resized", "flip": True}, **model)
    settings = {"arm": arm, "batch_size": 12, "steps": 12, "save_every": 6, "eval_every": 6}
    run_training(recipe(own, **settings), tmp_path / "whole", quiet=True)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    (tmp_path / "cut" / "result.json").unlink()
    shutil.rmtree(tmp_path / "cut" / "model")
    shutil.rmtree(step_folders(tmp_path / "cut" / "checkpoints")[12])
    run_training(recipe(own, **settings), tmp_path / "cut", resume=True, quiet=True)
    one, two = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "cut"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    records = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("whole", "cut")]
    assert records[0] | {"seconds": 0} == records[1] | {"seconds": 0}


@pytest.mark.parametrize(
    ("model", "arm", "name"),
    [({}, "noble:rank=4", "ViT"), ({"convnext": {}}, LAST_STAGE, "ConvNext")],
    ids=["vit", "convnext"],
)
def test_a_saved_model_is_the_same_in_a_fresh_process(tmp_path, model, arm, name):
    run_training(recipe(task(tmp_path, **model), arm), tmp_path / "run", quiet=True)
    pixels = torch.randn(2, 1, 8, 8)
    with torch.no_grad():
        expected = load_model(tmp_path / "run" / "model")(pixel_values=pixels).logits
    torch.save({"pixels": pixels, "logits": expected}, tmp_path / "expected.pt")
    code = (
        "import sys, torch, nonlinear_lowrank\n"
        "from transformers import AutoModelForImageClassification\n"
        "torch.set_num_threads(1)\n"
        "model = AutoModelForImageClassification.from_pretrained(sys.argv[1] + '/run/model').eval()\n"
        "seen = torch.load(sys.argv[1] + '/expected.pt')\n"
        "with torch.no_grad(): found = model(pixel_values=seen['pixels']).logits\n"
        "assert torch.equal(found, seen['logits'])\n"
        "print(type(model).__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.stdout.strip() == f"NonlinearLowrank{name}ForImageClassification", done.stderr


def test_a_comparison_reports_both_training_losses(tmp_path):
    own = recipe(task(tmp_path), log_every=1, save_every=6)
    arms = [Arm.parse("baseline"), Arm.parse("noble:rank=4")]
    record = compare(own, tmp_path / "out", arms=arms, seeds=2, timing_rounds=2, quiet=True).results
    report = (tmp_path / "out" / "report.md").read_text()
    assert "## Training loss" in report
    assert "without augmentation" in report
    for arm in record["arms"]:
        runs = sorted((tmp_path / "out" / "runs" / arm["name"]).rglob("result.json"))
        found = [json.loads(path.read_text()) for path in runs]
        assert arm["plain_loss"] == pytest.approx(np.mean([each["plain_curve"][-1][1] for each in found]))
        assert arm["train_loss"] == pytest.approx(np.mean([each["train_curve"][-1][1] for each in found]))
        assert arm["flops_per_token"] > 0
    for which in ("train", "plain"):
        delta = record["arms"][1][f"{which}_delta"]
        one, two = (arm[f"{which}_loss"] for arm in record["arms"])
        assert delta["value"] == pytest.approx(two - one)
        assert delta["n"] == 2
        assert f"| {two:.4f} | {delta['value']:+.4f} [" in report


def test_the_command_trains_and_evaluate_repeats(tmp_path, capsys):
    kit.image_file(tmp_path / "images.npz")
    sizes = "--layers 1 --width 16 --heads 2 --hidden 16 --patch 4 --mixup 0 --cutmix 0 --epochs 1 --batch-size 9"
    options = ["--source", tmp_path / "images.npz", *sizes.split(), "--tracker", "none"]
    arguments = ["train", "vit-demo", "--arm", "noble:rank=4", "--out", tmp_path / "run", *options]
    assert cli.main([str(each) for each in arguments]) == 0
    out = capsys.readouterr().out
    assert "accuracy 0." in out
    assert "nats a token" not in out
    assert cli.main(["evaluate", str(tmp_path / "run"), "--output", str(tmp_path / "score.json")]) == 0
    score = json.loads((tmp_path / "score.json").read_text())["held_out"]
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert score["accuracy"] == pytest.approx(result["score"])
    assert "held-out data of vit-demo: accuracy" in capsys.readouterr().out
    assert cli.main([str(each) for each in [*arguments, "--overwrite", "--size", "9"]]) == 2
    assert "patches of 4" in capsys.readouterr().err
