"""Vision transformers from scratch, with and without NOBLE branches (noble.txt, section 4.2.1).

Mixup and CutMix are on, as in the first half of the paper's Table 3; `--mixup 0 --cutmix 0` is its second half. Every
evaluation also takes the loss of some training images without any augmentation: with Mixup and CutMix on, the loss
of training is that of blended labels, which no model can bring to zero.
"""

from typing import Any

from nlr_lab.tasks.images.augmentation import Augmentation
from nlr_lab.tasks.images.backbones import VitBackbone
from nlr_lab.tasks.images.data import ImageSource
from nlr_lab.tasks.images.pretraining import ImagePretrainingTask
from nlr_lab.training.recipe import Recipe, TrainConfig

from .shared import BASELINES, EACH_EPOCH, FAST, IMAGENET, named


def vit_demo() -> Recipe:
    """A vision transformer small enough for two CPU cores, on scikit-learn's embedded digits.

    Command: `nlr compare vit-demo --max-minutes 9`, or `nlr train vit-demo`.
    Hardware: 2 CPU cores, 1 GB of memory, no network.
    Time: two and a half minutes for an arm on one core.
    Expect: about 0.86 of the test digits right; a training loss of 1.7 on varied and mixed images, of 0.7 on images as
    they are. 840 steps are few for blended labels: this shows the tool at work, and on 359 test images a difference
    of one in a hundred is four images.
    """
    return named(
        Recipe,
        "vit-demo",
        task=ImagePretrainingTask(
            images=ImageSource(source="digits", size=8),
            backbone=VitBackbone(layers=4, width=64, heads=4, hidden=256, patch=2, channels=1),
            augmentation=Augmentation(crop="shift"),
            plain_rows=400,
        ),
        arm="noble:rank=8",
        train=_training(epochs=40, batch_size=64, lr=2e-3, warmup_share=0.055, eval_every=80, save_every=400),
        arms=(*BASELINES, "noble:rank=8"),
    )


def vit_small() -> Recipe:
    """The paper's ViT-S/16 on ImageNet-1k: 22,050,664 parameters, 90 epochs at batch 1024 (section 4.2.1).

    Command: `torchrun --nproc-per-node 8 -m nlr_lab train vit-small --arm noble:rank=64`, and the
    paper's other half with `--mixup 0 --cutmix 0`; or `nlr compare vit-small --seeds 1`. A local copy by `--source`.
    Hardware: the paper's is not printed; several GPUs, and 16 CPU cores for each to decode and vary the images.
    Time: not measured yet.
    Expect: the paper's top-1 and training loss: 74.40 % and 2.462 for the baseline, 74.51 % and 2.423 at rank 64;
    without Mixup and CutMix 67.17 % and 0.622, 67.31 % and 0.591. Not repeated by us at this size.
    """
    return named(
        Recipe,
        "vit-small",
        task=ImagePretrainingTask(
            images=ImageSource(**IMAGENET),
            backbone=VitBackbone(layers=12, width=384, heads=6, hidden=1536, patch=16),
            augmentation=Augmentation(crop="resized", flip=True),
            shorter=256,
            plain_rows=10_000,
            meta_classes=1000,
        ),
        arm="noble:rank=64",
        train=_training(
            epochs=90, batch_size=1024, lr=3e-4, warmup_share=5 / 90, dataloader_workers=16, **FAST, **EACH_EPOCH
        ),
        arms=(*BASELINES, "noble:rank=64"),
        seeds=1,
    )


def _training(**settings: Any) -> TrainConfig:
    return TrainConfig(weight_decay=0.05, schedule="cosine", **settings)
