"""Tiny tasks that train from scratch, and recipes for them."""

import json
import random

import torch
from safetensors.torch import load_file

import finetune_helpers
from cli_helpers import python_prints
from nlr_lab.runtime.storage import step_folders
from nlr_lab.tasks.images.augmentation import Augmentation
from nlr_lab.tasks.images.pretraining import ConvNextBackbone, ImagePretrainingTask, VitBackbone
from nlr_lab.tasks.images.sources import ImageSource
from nlr_lab.tasks.text.data import TextData
from nlr_lab.tasks.text.language_model import EncoderBackbone, MaskedLanguageModelTask
from nlr_lab.training import run_training
from training_helpers import cut_back, tiny_recipe

LAST_STAGE = r"sine-lowrank:rank=2,omega=30,include=.*stages\.1\..*pwconv[12]"
STAGES = {"depths": (1, 2), "widths": (8, 16), "patch": 2, "channels": 1}
VIT = {"layers": 2, "width": 16, "heads": 2, "hidden": 32, "patch": 4, "channels": 1}
TEXT_SIZES = {"layers": 2, "width": 32, "heads": 2, "hidden": 48}


def image_task(root, augmentation=None, backbone=None, convnext=None, **fields):
    """A ViT, or a ConvNeXt where `convnext` is given, on grey images whose bright corner is their class."""
    if not (root / "images.npz").exists():
        finetune_helpers.image_file(root / "images.npz")
    images = ImageSource(**{"source": str(root / "images.npz"), "size": 8, **fields.pop("images", {})})
    chosen = VitBackbone(**VIT | (backbone or {})) if convnext is None else ConvNextBackbone(**STAGES | convnext)
    fields = {"plain_rows": 10, "augmentation": Augmentation(**(augmentation or {})), **fields}
    return ImagePretrainingTask(images=images, backbone=chosen, **fields)


def masked_task(source="stdlib", sizes=None, **fields):
    """A masked language model with a WordPiece of 300 tokens."""
    text = {"tokenizer": "wordpiece", "vocab_size": 300, "sequence_length": 16, "eval_sequences": 7, **fields}
    return MaskedLanguageModelTask(
        text=TextData(source=str(source), valid_fraction=0.1, **text),
        backbone=EncoderBackbone(embedding_std=1.0, **TEXT_SIZES | (sizes or {})),
    )


def corpus(folder):
    """A file of 60 texts, about 400 sequences of 16 tokens."""
    order = random.Random(random.getrandbits(32))
    words = ["".join(order.choices("abcdefghijklmn", k=order.randint(2, 5))) for _ in range(200)]
    texts = [" ".join(order.choices(words, k=60)) for _ in range(60)]
    path = folder / "corpus.txt"
    path.write_text("\n<|endoftext|>\n".join(texts))
    return path


def recipe(task, arm="noble:rank=4", **train):
    return tiny_recipe(task, arm, **{"steps": 6, "eval_every": 3, "save_every": 3, "log_every": 1, **train})


def assert_resumes_exactly(own, whole, cut):
    """Compare a finished run with a copy that lost its last checkpoint and is resumed."""
    folders = sorted(step_folders(whole / "checkpoints"))
    cut_back(whole, cut, folders[-2])
    run_training(own, cut, resume=True, quiet=True)
    one, two = (load_file(folder / "model" / "model.safetensors") for folder in (whole, cut))
    assert all(torch.equal(one[name], two[name]) for name in one)
    records = [json.loads((folder / "result.json").read_text()) for folder in (whole, cut)]
    assert records[0] | {"seconds": 0} == records[1] | {"seconds": 0}


LOAD = """
import sys, torch, transformers, nonlinear_lowrank
torch.set_num_threads(1)
model = getattr(transformers, sys.argv[2]).from_pretrained(sys.argv[1]).eval()
with torch.no_grad():
    torch.save(model(**torch.load(sys.argv[1] + "/../inputs.pt")).logits, sys.argv[1] + "/../logits.pt")
print(type(model).__name__)
"""


def logits_in_a_fresh_process(folder, auto, inputs):
    """The class that transformers loads a saved model as elsewhere, and its logits there."""
    torch.save(inputs, folder.parent / "inputs.pt")
    return python_prints(LOAD, folder, auto).strip(), torch.load(folder.parent / "logits.pt")
