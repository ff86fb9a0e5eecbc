"""Settings that make no sense are one clear line."""

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


def glue(**settings):
    return GlueData(**{"task": "cola", **settings})


def glm(**sizes):
    return GlmBackbone(**GLM | sizes)


def vit(**sizes):
    return VitBackbone(**VIT | sizes)


def convnext(**sizes):
    return ConvNextBackbone(**STAGES | sizes)


def pretraining(size=8, backbone=None, **fields):
    return ImagePretrainingTask(images=ImageSource(size=size), backbone=backbone or vit(), **fields)


def image_tokens(width=24, heads=4, **fields):
    backbone = GlmBackbone(layers=1, width=width, heads=heads, hidden=8)
    return ImageTokenTask(tokens=ImageTokenData(), backbone=backbone, **fields)


NAN, INFINITE = float("nan"), float("inf")
WRONG = [
    *((TextData, {name: 0}, name) for name in ("sequence_length", "eval_sequences", "max_bytes")),
    *((TextData, {"valid_fraction": value}, "valid_fraction") for value in (0.0, 0.9, "half")),
    (TextData, {"sequence_length": 1}, "sequence_length must be an integer of at least 2, got 1"),
    (TextData, {"vocab_size": 100}, "vocab_size must be an integer of at least 257, got 100"),
    (TextData, {"max_bytes": "5"}, "max_bytes must be a positive integer, got '5'"),
    *((TextData, {name: ""}, f"{name} is empty") for name in ("source", "valid_source", "tokenizer")),
    *((Masking, {"probability": value}, "probability") for value in (0.0, 1.0)),
    (Masking, {"mask_share": 1.1}, "mask_share"),
    (Masking, {"random_share": -0.1}, "random_share"),
    (Masking, {"mask_share": 0.8, "random_share": 0.3}, "together, got 1.1"),
    (lambda: MaskedLanguageModelTask(text=TextData(), backbone=EncoderBackbone(**GLM)), {}, "'wordpiece'"),
    (glm, {"layers": 0}, "layers must be a positive integer, got 0"),
    (glm, {"hidden": 1.5}, "hidden"),
    (glm, {"heads": True}, "heads"),
    (glm, {"width": 60, "heads": 8}, "60 does not split into 8 heads of even size; choose a multiple of 16"),
    (glm, {"width": 24, "heads": 8}, "of even size"),
    *((glm, {"embedding_std": value}, "embedding_std") for value in (0.0, NAN)),
    (glm, {"dropout": 1.0}, "dropout"),
    (glm, {"dense_init": "xavier"}, "unknown init 'xavier'; choose one of stock, noble, kaiming"),
    (lambda: OptBackbone(**GLM | {"width": 66}), {}, "66 does not split into 4 heads; choose a multiple of 4"),
    (Augmentation, {"crop": "centre"}, "unknown crop"),
    (Augmentation, {"randaugment": -1}, "randaugment"),
    *((Augmentation, {"magnitude": value}, "magnitude") for value in (31, 9.5)),
    (Augmentation, {"mixup": -0.1}, "mixup"),
    (Augmentation, {"cutmix": NAN}, "cutmix"),
    (vit, {"heads": 3}, "3 heads"),
    (vit, {"layers": 0}, "layers"),
    (vit, {"channels": 2}, "channels must be 1 or 3, got 2"),
    (vit, {"dropout": 1.0}, "dropout"),
    (vit, {"dense_init": "xavier"}, "unknown init"),
    (convnext, {"depths": (1, 1, 1)}, "a number for each stage"),
    (convnext, {"widths": (8, 0)}, "widths"),
    (convnext, {"drop_path": 1.0}, "drop_path"),
    (convnext, {"layer_scale": -1.0}, "layer_scale"),
    (pretraining, {"size": 10}, "10 pixels do not split into patches of 4; choose 8 or 12"),
    (pretraining, {"size": 3}, "choose 4"),
    (pretraining, {"backbone": convnext(patch=3)}, "patches of 3, halved 1 times; choose 6 or 12"),
    (pretraining, {"shorter": 7}, "shorter"),
    (pretraining, {"plain_rows": -1}, "plain_rows"),
    *((ImageSource, {"classes": value}, "classes must be at least two different") for value in ((1,), (1, 1), (-1, 0))),
    (ImageSource, {"held_out": -0.1}, "held_out"),
    (ImageSource, {"mean": (0.5,)}, "mean and std"),
    (ImageSource, {"mean": (0.5,), "std": (0.0,)}, "std must be finite numbers above 0, got 0.0"),
    (ImageSource, {"mean": (0.5,), "std": (NAN,)}, "std must be finite numbers above 0, got nan"),
    (ImageSource, {"mean": (INFINITE,), "std": (0.5,)}, "mean must be finite numbers, got inf"),
    (ImageSource, {"size": 0}, "size"),
    (ImageSource, {"train_rows": 1}, "train_rows"),
    (ImageData, {"augment": "mixup"}, "augment"),
    (ImageTokenData, {"size": 30}, "images of 30 pixels do not divide into patches of 4"),
    (ImageTokenData, {"codes": 1}, "codes must be an integer of at least 2"),
    (ImageTokenData, {"train_images": 0}, "train_images must be"),
    (ImageTokenData, {"eval_images": True}, "eval_images must be"),
    (image_tokens, {}, "head dimension divisible by 4, got 6"),
    (image_tokens, {"heads": 2, "rope_theta": 1.0}, "rope_theta"),
    (glue, {"task": "sst3"}, "unknown GLUE task 'sst3'; choose one of cola"),
    (glue, {"max_length": 2}, "max_length"),
    (glue, {"held_out": 1.0}, "held_out"),
    (glue, {"train_rows": 1}, "train_rows"),
    (glue, {"scored": "train"}, "scored"),
    (glue, {"pad": "left"}, "pad"),
    (InstructionData, {"template": "vicuna"}, "unknown template"),
    (InstructionData, {"held_out": 0.0}, "held_out"),
    (InstructionData, {"max_length": 2}, "max_length"),
    (InstructionData, {"rows": 1}, "rows"),
    (InstructionData, {"eval_rows": 0}, "eval_rows"),
]


@pytest.mark.parametrize(("make", "settings", "words"), WRONG)
def test_wrong_settings_are_named(make, settings, words):
    with pytest.raises(UserError) as caught:
        make(**settings)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
