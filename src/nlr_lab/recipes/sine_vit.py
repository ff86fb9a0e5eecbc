"""Vision transformers with sine low-rank MLPs (sine_lowrank.txt, section 4.2 and appendix A.2.2).

Both linears of every MLP are factored. Beside the sine, at the paper's frequency for the rank, stand the dense model,
the sigmoid and the ReLU of the low-rank product, and plain low rank; sine and plain low rank at both Kaiming inits: the
init moves results as much as the sine does, and the paper names none.
The optimizer's other settings and the augmentation are not printed either; they are those of our ViT recipes.
"""

from nlr_lab.tasks.images.augmentation import Augmentation
from nlr_lab.tasks.images.backbones import VitBackbone
from nlr_lab.tasks.images.data import ImageSource
from nlr_lab.tasks.images.pretraining import ImagePretrainingTask
from nlr_lab.training.recipe import Recipe

from . import RECIPES
from .sine_weights import cifar100_task, demo_training, digits_task, training, weight_arm, weight_arms

_MLPS = r".*mlp\.fc[12]"


def sine_vit_demo() -> Recipe:
    """A small vision transformer with sine low-rank MLPs, on scikit-learn's embedded digits.

    Command: `nlr compare sine-vit-demo --max-minutes 9`, or `nlr train sine-vit-demo`.
    Hardware: 2 CPU cores, 1 GB of memory, no network.
    Time: about a minute of one core for an arm: 420 steps of 0.08 s of CPU time on a busy machine, and evaluations.
    Expect: most of the 359 test digits right in every arm. It shows the tool at work, and is no evidence.
    """
    return Recipe(
        name="sine-vit-demo",
        description=RECIPES["sine-vit-demo"].summary,
        task=digits_task(VitBackbone(layers=4, width=64, heads=4, hidden=256, patch=2, channels=1)),
        arm=weight_arm("sine-lowrank", 2, _MLPS, "omega=300"),
        train=demo_training(lr=2e-3),
        arms=weight_arms(2, 300, _MLPS),
        seeds=3,
    )


def sine_vit_cifar100() -> Recipe:
    """ViT-Small with patches of 4 on CIFAR-100: 21,376,996 parameters, and 7,267,300 at rank 1.

    Command: `nlr compare sine-vit-cifar100`, or `nlr train sine-vit-cifar100`; another rank by its arm, as in
    `nlr train sine-vit-cifar100 --arm 'sine-lowrank:rank=5,omega=500,include=.*mlp\\.fc[12]'`; a local copy by
    `--source cifar100.npz`.
    Hardware: one GPU of 24 GB.
    Time: not measured by us.
    Expect: the paper's top-1 at rank 1 by omega: 55.0 (100), 56.8 (300), 58.1 (500), 57.5 (700). Not repeated by us.
    """
    return Recipe(
        name="sine-vit-cifar100",
        description=RECIPES["sine-vit-cifar100"].summary,
        task=cifar100_task(VitBackbone(layers=12, width=384, heads=6, hidden=1536, patch=4)),
        arm=weight_arm("sine-lowrank", 1, _MLPS, "omega=500"),
        train=training(epochs=200, batch_size=512, lr=1e-3),
        arms=weight_arms(1, 500, _MLPS),
        seeds=3,
    )


def sine_vit_base() -> Recipe:
    """ViT-Base with patches of 16 on ImageNet-1k, both linears of every MLP at rank 150.

    Command: `torchrun --nproc-per-node 8 -m nlr_lab train sine-vit-base`; other ranks by the arm
    (`omega=vit-base-imagenet` takes the paper's frequency for the rank).
    Hardware: the paper's is not printed; several GPUs, and 16 CPU cores for each to decode and vary the images.
    Time: not measured by us.
    Expect: the paper shows curves and prints no numbers for this model. Not repeated by us.
    """
    return Recipe(
        name="sine-vit-base",
        description=RECIPES["sine-vit-base"].summary,
        task=ImagePretrainingTask(
            images=ImageSource(
                source="ILSVRC/imagenet-1k",
                held_out=0.0,
                size=224,
                mean=(0.485, 0.456, 0.406),
                std=(0.229, 0.224, 0.225),
            ),
            backbone=VitBackbone(layers=12, width=768, heads=12, hidden=3072, patch=16),
            augmentation=Augmentation(crop="resized", flip=True),
            shorter=256,
            meta_classes=1000,
        ),
        arm=weight_arm("sine-lowrank", 150, _MLPS, "omega=150"),
        train=training(epochs=300, batch_size=1024, lr=3e-4),
        arms=weight_arms(150, 150, _MLPS),
        seeds=1,
    )
