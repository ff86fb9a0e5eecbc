"""Settings that make no sense, of every part of the workbench, are one clear line that names the field."""

import functools
import re

import pytest

from nlr_lab.bench.settings import OpBenchConfig, TrafficBenchConfig, TrainBenchConfig
from nlr_lab.evaluation.generation import Sampling
from nlr_lab.fields.settings import FieldConfig, FitConfig, NerfSettings, OccupancySettings, RadianceConfig
from nlr_lab.plan.estimate import PlanConfig
from nlr_lab.plan.presets import HARDWARE
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
from nlr_lab.training import TrainConfig
from refusals import assert_refused

GLM = {"layers": 2, "width": 64, "heads": 4, "hidden": 96}
VIT = {"layers": 2, "width": 16, "heads": 2, "hidden": 32, "patch": 4}
STAGES = {"depths": (1, 2), "widths": (8, 16), "patch": 2}


glue = functools.partial(GlueData, task="cola")
glm = functools.partial(GlmBackbone, **GLM)
vit = functools.partial(VitBackbone, **VIT)
convnext = functools.partial(ConvNextBackbone, **STAGES)
train = functools.partial(TrainConfig, steps=12, batch_size=4, lr=1e-3)
plan = functools.partial(PlanConfig, hardware=HARDWARE["h100"], batch_size=64, steps=1000)
step = functools.partial(TrainBenchConfig, width=32, heads=2, hidden=48, ranks=(4,))


def pretraining(size=8, backbone=None, **fields):
    return ImagePretrainingTask(images=ImageSource(size=size), backbone=backbone or vit(), **fields)


def nerf(**settings):
    return NerfSettings(**settings).prepare()


def shape(**settings):
    return OccupancySettings(**settings).prepare()


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
    (train, {"steps": (0, -5, 1.5), "batch_size": (0,), "gradient_accumulation": (3,), "warmup_steps": (13, -1)}),
    (train, {"lr": (0.0, -1.0, INFINITE, NAN, "fast"), "betas": ((0.9,), (0.9, 1.0)), "weight_decay": (-1,)}),
    (train, {"schedule": ("step",), "optimizer": ("sgd",), "max_grad_norm": (-1.0,), "seed": (-1, 2**31)}),
    (train, {"min_lr_share": (-0.1, NAN), "decay_share": (-0.1, 1.5)}),
    (train, {"label_smoothing": (-0.1, 1.0, NAN), "embedding_noise": (-1.0, NAN)}),
    (train, dict.fromkeys(("epochs", "eval_every", "save_every", "keep_checkpoints", "log_every", "threads"), (0,))),
    (train, {"eval_batch_size": (0,), "dataloader_workers": (-1,), "warmup_share": (1.0,)}),
    (FieldConfig, {"width": (0,), "hidden_layers": (-1,), "spread": (0.0,), "activation": ("tanh",)}),
    (FieldConfig, {"factored": ("some",)}),
    (RadianceConfig, {"spread": (0.0,), "activation": ("siren",), "density": ("tanh",), "layers": (0,)}),
    (FitConfig, {"steps": (0,), "lr": (0.0,), "schedule": ("step",), "end": (1.5,), "seed": (2**31,)}),
    (FitConfig, {"betas": ((0.9, NAN), (0.9,))}),
    (nerf, {"rays": (0,), "samples": (1,), "fine_samples": (-1,)}),
    (shape, {"points": (0,), "up": ("w",), "azimuth": (NAN,), "picture_height": (3,), "resolution": (1,)}),
    (Sampling, {"max_new_tokens": (0,), "temperature": (-1.0,), "top_k": (-1,)}),
    (plan, {"gpus": (0,), "utilization": (1.5,), "memory": (NAN,), "steps": (0,)}),
    (step, {"ranks": ((), (0,)), "threads": (0,), "activation": ("step",)}),
    (OpBenchConfig, {"operators": (("sine", "sine"),)}),
    (TrafficBenchConfig, {"utilization": (0.0,)}),
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
    (train, {"steps": -3}, "steps must be a positive integer, or 0 with epochs, got -3"),
    (train, {"epochs": 1, "steps": 0, "warmup_share": 0.1, "warmup_steps": 3}, "warmup_share"),
    (train, {"min_lr_share": 1.0}, "min_lr_share must be below 1"),
    (train, {"schedule": "constant", "min_lr_share": 0.1}, "does nothing with schedule='constant'; omit it"),
    (train, {"min_lr_share": 0.1, "warmup_steps": 12}, "min_lr_share needs steps after the warm-up"),
    (train, {"schedule": "wsd"}, "decay_share must be above 0"),
    (train, {"decay_share": 0.2}, "omitted with any other"),
    (train, {"schedule": "wsd", "decay_share": 0.5, "warmup_steps": 7}, "must not exceed steps (12) together"),
    (train, {"compile_mode": "reduce-overhead"}, "set compile too"),
    (train, {"compile_fullgraph": True}, "set compile too"),
    (train, {"compile": True, "compile_mode": "fast"}, "compile_mode"),
    (
        train,
        {"compile": True, "compile_mode": "max-autotune", "gradient_accumulation": 2},
        "gradient_accumulation to 1",
    ),
    (FitConfig, {"schedule": "exponential", "end": 0.0}, "end must be a share"),
    (FitConfig, {"schedule": "constant", "end": 0.3}, "end does nothing with schedule='constant'; omit it"),
    (FitConfig, {"warmup_steps": 50, "steps": 10}, "warmup_steps (50) must not exceed steps (10)"),
    (nerf, {"downscale": 40}, "views of 1 x 1 pixels; SSIM needs 11 x 11"),
    (nerf, {"frame_downscale": 41}, "frames cannot be 41 times smaller"),
    (nerf, {"source": "/nowhere"}, "there is no file or folder"),
    (shape, {"field": FieldConfig(in_features=2)}, "in_features 3 and out_features 1"),
    (shape, {"held_out": 100_000}, "held_out 100000, mesh_resolution 128: so many"),
    (shape, {"mesh_resolution": 20_000}, "mesh_resolution 20000: so many"),
    (shape, {"source": "nothing.obj"}, "there is no mesh 'nothing.obj'"),
    (plan, {"gpus": 7}, "a batch of 64 sequences does not split over 7 GPUs"),
    (step, {"ranks": (32,)}, "rank 32 is too high"),
    (step, {"width": 30, "heads": 4}, "must be a multiple of 2 x heads"),
    (step, {"kv_heads": 3}, "kv_heads must divide"),
    (step, {"clock": "cuda"}, "the clock 'cuda' is for --device cuda"),
    (step, {"methods": ("magic",)}, "unknown method 'magic'"),
    (OpBenchConfig, {"hidden": 32, "ranks": (4,), "groups": 7}, "7 groups do not divide 32"),
    (TrafficBenchConfig, {"ranks": (1024,)}, "rank 1024 is too high"),
]


@pytest.mark.parametrize(("make", "settings", "words"), WRONG)
def test_wrong_settings_are_named(make, settings, words):
    assert_refused(re.escape(words), make, **settings)
