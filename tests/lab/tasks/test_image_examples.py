"""Labelled images on their way to a model: pixels, splits, and images that cannot be read."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import finetune_helpers as kit
from image_helpers import damaged_folder, noise
from nlr_lab.tasks.finetune.pretrained import Pretrained
from nlr_lab.tasks.images import pretraining
from nlr_lab.tasks.images.encoding import prepare_images
from nlr_lab.tasks.images.examples import Pixels
from nlr_lab.tasks.images.sources import Images, read_images
from nlr_lab.tasks.images.tokens import ImageTokenData
from nlr_lab.tasks.task import scores, scores_of_examples
from nlr_lab.training import run_training
from nonlinear_lowrank.errors import UserError
from pretraining_helpers import image_task, recipe
from refusals import assert_refused


def test_pixels_are_converted():
    array = noise(8, 8, 3)
    how = Pixels(size=8, channels=3, mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7))
    assert (how.array(array) == array.transpose(2, 0, 1)).all()
    grey = how.array(array[..., 0])
    assert (grey[0] == grey[2]).all()
    assert Pixels(size=4, channels=1, mean=(0.5,), std=(0.5,)).array(array).shape == (1, 4, 4)


@pytest.mark.parametrize("shorter", [None, 10])
def test_saved_processor_does_the_same(tmp_path, shorter):
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    how = Pixels(size=8, channels=3, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4), shorter=shorter)
    how.save_pretrained(tmp_path)
    processor = ViTImageProcessorPil.from_pretrained(tmp_path)
    for shape in ((20, 12, 3), (13, 31, 3), (9, 9, 3)):
        array = noise(*shape)
        theirs = processor(Image.fromarray(array), return_tensors="pt")["pixel_values"]
        ours = how.collate([{"pixel_values": torch.from_numpy(how.array(array)), "labels": torch.tensor(2)}])
        assert ours["labels"].tolist() == [2]
        assert ours["pixel_values"].numpy() == pytest.approx(theirs.numpy(), abs=1e-5)


def test_sets_are_apart_and_the_plain_part_is_of_training(tmp_path):
    prepared = image_task(tmp_path, images={"held_out": 0.25}).prepare()
    splits = (prepared.train, prepared.valid, prepared.test, prepared.plain)
    assert [len(each) for each in splits] == [45, 15, 30, 10]
    held, plain = ({each[i]["pixel_values"].numpy().tobytes() for i in range(len(each))} for each in splits[1::2])
    seen = {prepared.tokenizer.array(prepared.train.images.read(index)).tobytes() for index in range(45)}
    assert len(seen) == 45
    assert not seen & held
    assert plain <= seen
    assert image_task(tmp_path, plain_rows=0).prepare().plain is None
    one, two = (image_task(tmp_path, augmentation).prepare().fingerprint for augmentation in ({}, {"mixup": 0.0}))
    assert one != two
    alone = kit.image_task(tmp_path, held_out=0.0).prepare()
    assert (len(alone.train), len(alone.valid), alone.test) == (60, 30, None)
    fewer = kit.image_task(tmp_path, train_rows=20, test_rows=7).prepare()
    assert (len(fewer.train), len(fewer.valid), len(fewer.test)) == (18, 2, 7)


def test_chosen_classes_are_renumbered():
    labels = np.array([0, 3, 1, 3, 2, 0])
    chosen = Images(labels, lambda index: np.full((2, 2), index, np.uint8)).of_classes((3, 0))
    assert chosen.labels.tolist() == [1, 0, 0, 1]
    assert [int(chosen.read(index)[0, 0]) for index in range(4)] == [0, 1, 3, 5]


def test_data_that_do_not_fit_are_refused(tmp_path):
    labels, images = np.array([0, 1, 2, 9, 3]), noise(5, 8, 8)
    np.savez(tmp_path / "few.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    for task, message in (
        (kit.image_task(tmp_path, classes=(0, 7)), "no class 7"),
        (kit.image_task(tmp_path, mean=(0.1, 0.2), std=(0.1, 0.2)), "takes 1 channels"),
        (folder_task(tmp_path / "few.npz"), "5 images to train on for 10 classes"),
    ):
        assert_refused(message, task.prepare)


def test_head_is_new_whatever_the_checkpoint_had(tmp_path):
    task = kit.image_task(tmp_path)
    prepared = task.prepare()
    one, two = (task.build_model(prepared, seed=3) for _ in range(2))
    old = Pretrained(checkpoint=str(tmp_path / "vit")).load("image", 3, 9)
    assert torch.equal(one.classifier.weight, two.classifier.weight)
    assert not torch.equal(one.classifier.weight, old.classifier.weight)
    assert one.config.id2label == {0: "0", 1: "1", 2: "2"}
    assert task.adapter_setup(one).head == ("classifier",)
    for (name, mine), other in zip(one.vit.named_parameters(), old.vit.parameters(), strict=True):
        assert torch.equal(mine, other), name


def test_digits_vit_is_made_once(tmp_path, monkeypatch):
    monkeypatch.setenv("NLR_CACHE", str(tmp_path))
    monkeypatch.setattr(pretraining, "_STEPS", 30)
    folder = pretraining.digits_vit_folder()
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert pretraining.digits_vit_folder() == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    model = Pretrained(checkpoint="digits-vit").load("image", 5, 0)
    assert model.config.image_size == 8


def folder_task(source, held_out=0.0, plain_rows=0, **fields):
    images = {"source": str(source), "held_out": held_out}
    return image_task(source.parent, images=images, plain_rows=plain_rows, **fields)


@pytest.mark.parametrize("workers", [0, 2])
def test_unreadable_images_are_named_and_counted_and_training_goes_on(tmp_path, workers, monkeypatch):
    named = tmp_path / "named"  # by whichever process read it

    def warn(text, **_):
        with named.open("a") as file:
            file.write(f"{text}\n")

    monkeypatch.setattr("nlr_lab.tasks.images.examples.warnings", SimpleNamespace(warn=warn))
    source = damaged_folder(tmp_path / "images", 8, 4, ("train/bee/3.png", "test/ant/1.png"))
    settings = {"steps": 8, "batch_size": 4, "save_every": 8, "eval_every": 4, "dataloader_workers": workers}
    result = run_training(recipe(folder_task(source), **settings), tmp_path / "run", quiet=True)
    assert result.status == "done"
    record = json.loads((tmp_path / "run" / "result.json").read_text())
    assert record["data"]["unreadable_images"] == 2
    for name in ("ant/1.png", "train/bee/3.png"):
        assert sum(name in line for line in named.read_text().splitlines()) == 1, "once, however often it is read"
    # Seven test images are left, so the accuracy is a number of sevenths.
    assert result.score * 7 == pytest.approx(round(result.score * 7), abs=1e-9)
    assert math.isfinite(result.final_loss)


def test_next_image_stands_in_with_its_own_label_and_each_is_counted_once(tmp_path):
    broken = [*(f"train/bee/{index}.png" for index in range(3)), "test/ant/1.png"]
    source = damaged_folder(tmp_path / "images", 8, 4, broken)
    unvaried = {"randaugment": 0, "mixup": 0.0, "cutmix": 0.0}
    prepared = folder_task(source, plain_rows=12, augmentation=unvaried).prepare()
    splits = (prepared.train, prepared.plain, prepared.valid)
    with pytest.warns(UserWarning, match=r"skipped \(") as named:
        train, plain, valid = ([split[index] for index in range(len(split))] for split in splits)
    assert len(named) == 4
    assert "(3 so far)" in str(named[2].message)
    assert prepared.describe()["unreadable_images"] == 4
    assert all(torch.equal(train[index]["pixel_values"], train[11]["pixel_values"]) for index in (8, 9, 10))
    assert [int(each["labels"]) for each in train] == [0] * 8 + [1] * 8
    assert int(valid[1]["labels"]) == -100
    rows = np.sort(np.random.default_rng(3).permutation(16)[:12])
    assert [int(each["labels"]) == -100 for each in plain] == np.isin(rows, [8, 9, 10]).tolist()


@pytest.mark.parametrize(("value", "words"), [(0.5, "mode F"), (70_000, "mode I"), (-1, "mode I")])
def test_pictures_of_an_unknown_range_count_as_unreadable(tmp_path, value, words):
    source = damaged_folder(tmp_path / "images", 3, 3)
    path = source / "train" / "bee" / "1.tif"
    Image.fromarray(np.full((8, 8), value, np.float32 if words == "mode F" else np.int32)).save(path)
    assert_refused(f"{path}.*{words}", read_images(str(source)).train.read, 5)
    settings = ImageTokenData(source=str(source), size=8, patch=4, codes=4, cache_dir=str(tmp_path / "cache"))
    with pytest.warns(UserWarning, match=f"1.tif: .*{words}"):
        tokens = prepare_images(settings)
    assert (tokens.facts["channels"], tokens.facts["train"]["unreadable"], tokens.classes) == (1, 1, ("ant", "bee"))
    assert [int(each["input_ids"][0]) - 4 for each in map(tokens.train.__getitem__, range(6))] == [0, 0, 0, 1, 1, 1]
    prepared = folder_task(source).prepare()
    with pytest.warns(UserWarning, match=words):
        prepared.train[5]
    assert prepared.describe()["unreadable_images"] == 1


def test_parts_of_nothing_but_damage_are_refused(tmp_path):
    names = [f"train/{name}/{index}.png" for name in ("ant", "bee") for index in range(4)]
    tests = [f"test/{name}/{index}.png" for name in ("ant", "bee") for index in (0, 1)]
    source = damaged_folder(tmp_path / "a", 4, 2, tests)
    # Of eight, always the same ones are held out, and the same ones are plain.
    held = folder_task(damaged_folder(tmp_path / "whole", 4, 1), 0.25).images.find().held
    lost = damaged_folder(tmp_path / "b", 4, 1, [names[place] for place in held])
    first = int(np.random.default_rng(3).permutation(8)[0])
    unseen = damaged_folder(tmp_path / "c", 4, 1, [names[first]])
    for task, message in (
        (folder_task(source), "none of the 4 images can be read"),
        (folder_task(source, 0.25), "none of the 4 images can be read"),
        (folder_task(lost, 0.25), f"none of the {len(held)} images can be read"),
        (folder_task(unseen, plain_rows=1), "none of the 1 images can be read"),
    ):
        assert_refused(message, task.prepare)
    with pytest.raises(UserError, match="none of the 3 images can be read"):  # they vanish during training
        scores_of_examples(torch.zeros(3, 2), torch.full((3,), -100), scores(("accuracy",)))
