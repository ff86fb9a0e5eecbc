"""Settings that make no sense are one clear line."""

import functools

import pytest

from nlr_lab.tasks.finetune.classification import GlueData, ImageData
from nlr_lab.tasks.finetune.instructions import InstructionData
from nlr_lab.tasks.images.augmentation import Augmentation
from nlr_lab.tasks.images.pretraining import ConvNextBackbone, ImagePretrainingTask, VitBackbone
from nlr_lab.tasks.images.sources import ImageSource
from nlr_lab.tasks.images.tokens import ImageTokenData, ImageTokenTask
from nlr_lab.tasks.text.data import TextData
from nlr_lab.tasks.text.language_model import (
    EncoderBackbone,
    GlmBackbone,
    MaskedLanguageModelTask,
    Masking,
    OptBackbone,
)
from nonlinear_lowrank.errors import UserError

GLM = {"layers": 2, "width": 64, "heads": 4, "hidden": 96}
VIT = {"layers": 2, "width": 16, "heads": 2, "hidden": 32, "patch": 4}
STAGES = {"depths": (1, 2), "widths": (8, 16), "patch": 2}


glue = functools.partial(GlueData, task="cola")
glm = functools.partial(GlmBackbone, **GLM)
vit = functools.partial(VitBackbone, **VIT)
convnext = functools.partial(ConvNextBackbone, **STAGES)


def pretraining(size=8, backbone=None, **fields):
    return ImagePretrainingTask(images=ImageSource(size=size), backbone=backbone or vit(), **fields)


def image_tokens(width=24, heads=4, **fields):
    backbone = GlmBackbone(layers=1, width=width, heads=heads, hidden=8)
    return ImageTokenTask(tokens=ImageTokenData(), backbone=backbone, **fields)


NAN, INFINITE = float("nan"), float("inf")
NAMED = [  # fields whose values are refused by a line that names the field
    (
        TextData,
        {"sequence_length": (0,), "eval_sequences": (0,), "max_bytes": (0,), "valid_fraction": (0.0, 0.9, "half")},
    ),
    (Masking, {"probability": (0.0, 1.0), "mask_share": (1.1,), "random_share": (-0.1,)}),
    (glm, {"hidden": (1.5,), "heads": (True,), "embedding_std": (0.0, NAN), "dropout": (1.0,)}),
    (Augmentation, {"randaugment": (-1,), "magnitude": (31, 9.5), "mixup": (-0.1,), "cutmix": (NAN,)}),
    (vit, {"layers": (0,), "dropout": (1.0,)}),
    (convnext, {"widths": ((8, 0),), "drop_path": (1.0,), "layer_scale": (-1.0,)}),
    (pretraining, {"shorter": (7,), "plain_rows": (-1,)}),
    (ImageSource, {"held_out": (-0.1,), "size": (0,), "train_rows": (1,)}),
    (ImageData, {"augment": ("mixup",)}),
    (ImageTokenData, {"train_images": (0,), "eval_images": (True,)}),
    (glue, {"max_length": (2,), "held_out": (1.0,), "train_rows": (1,), "scored": ("train",), "pad": ("left",)}),
    (InstructionData, {"held_out": (0.0,), "max_length": (2,), "rows": (1,), "eval_rows": (0,)}),
]
WRONG = [
    *((make, {name: each}, name) for make, fields in NAMED for name, values in fields.items() for each in values),
    (TextData, {"sequence_length": 1}, "sequence_length must be an integer of at least 2, got 1"),
    (TextData, {"vocab_size": 100}, "vocab_size must be an integer of at least 257, got 100"),
    (TextData, {"max_bytes": "5"}, "max_bytes must be a positive integer, got '5'"),
    *((TextData, {name: ""}, f"{name} is empty") for name in ("source", "valid_source", "tokenizer")),
    (Masking, {"mask_share": 0.8, "random_share": 0.3}, "together, got 1.1"),
    (lambda: MaskedLanguageModelTask(text=TextData(), backbone=EncoderBackbone(**GLM)), {}, "'wordpiece'"),
    (glm, {"layers": 0}, "layers must be a positive integer, got 0"),
    (glm, {"width": 60, "heads": 8}, "60 does not split into 8 heads of even size; choose a multiple of 16"),
    (glm, {"dense_init": "xavier"}, "unknown init 'xavier'; choose one of stock, noble, kaiming"),
    (lambda: OptBackbone(**GLM | {"width": 66}), {}, "66 does not split into 4 heads; choose a multiple of 4"),
    (Augmentation, {"crop": "centre"}, "unknown crop"),
    (vit, {"heads": 3}, "3 heads"),
    (vit, {"channels": 2}, "channels must be 1 or 3, got 2"),
    (vit, {"dense_init": "xavier"}, "unknown init"),
    (convnext, {"depths": (1, 1, 1)}, "a number for each stage"),
    (pretraining, {"size": 10}, "10 pixels do not split into patches of 4; choose 8 or 12"),
    (pretraining, {"size": 3}, "choose 4"),
    (pretraining, {"backbone": convnext(patch=3)}, "patches of 3, halved 1 times; choose 6 or 12"),
    *((ImageSource, {"classes": value}, "classes must be at least two different") for value in ((1,), (1, 1), (-1, 0))),
    (ImageSource, {"mean": (0.5,)}, "mean and std"),
    (ImageSource, {"mean": (0.5,), "std": (0.0,)}, "std above 0, got (0.5,), (0.0,)"),
    (ImageSource, {"mean": (INFINITE,), "std": (0.5,)}, "mean and std need one finite number each"),
    (ImageTokenData, {"size": 30}, "images of 30 pixels do not divide into patches of 4"),
    (ImageTokenData, {"codes": 1}, "codes must be an integer of at least 2"),
    (image_tokens, {}, "head dimension divisible by 4, got 6"),
    (image_tokens, {"heads": 2, "rope_theta": 1.0}, "rope_theta"),
    (glue, {"task": "sst3"}, "unknown GLUE task 'sst3'; choose one of cola"),
    (InstructionData, {"template": "vicuna"}, "unknown template"),
]


@pytest.mark.parametrize(("make", "settings", "words"), WRONG)
def test_wrong_settings_are_named(make, settings, words):
    with pytest.raises(UserError) as caught:
        make(**settings)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
