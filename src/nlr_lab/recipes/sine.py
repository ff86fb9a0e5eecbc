"""Vision transformers and ConvNeXt with sine low-rank weights (sine_lowrank.txt, section 4.2 and appendix A.2).

Of a ViT both linears of every MLP are factored (A.2.2); of a ConvNeXt the pointwise linears of the last stage, two in
each of its three blocks, which hold half of the parameters (A.2.3 and Table 11). Beside the sine, at the paper's
frequency for the rank, stand the dense model, the sigmoid and the ReLU of the low-rank product, and plain low rank;
sine and plain low rank at both Kaiming inits: the init moves results as much as the sine does, and the paper names
none. It prints batch, learning rate and epochs; the optimizer's other settings and the augmentation are those of our
ViT recipes.
"""

from typing import Any

from nlr_lab.tasks.images.augmentation import Augmentation
from nlr_lab.tasks.images.backbones import ConvNextBackbone, VitBackbone
from nlr_lab.tasks.images.data import ImageSource
from nlr_lab.tasks.images.pretraining import ImagePretrainingTask
from nlr_lab.training.recipe import Recipe, TrainConfig

from .shared import EACH_EPOCH, FAST, IMAGENET, named

_MLPS = r".*mlp\.fc[12]"
_LAST = r".*stages\.3\..*pwconv[12]"
_UNMIXED: dict[str, Any] = {"randaugment": 0, "mixup": 0.0, "cutmix": 0.0}


def sine_vit_demo() -> Recipe:
    """A small vision transformer with sine low-rank MLPs, on scikit-learn's embedded digits.

    Command: `nlr compare sine-vit-demo --max-minutes 9`, or `nlr train sine-vit-demo`.
    Hardware: 2 CPU cores, 1 GB of memory, no network.
    Time: about a minute of one core for an arm: 420 steps of 0.08 s of CPU time on a busy machine, and evaluations.
    Expect: most of the 359 test digits right in every arm. It shows the tool at work, and is no evidence.
    """
    backbone = VitBackbone(layers=4, width=64, heads=4, hidden=256, patch=2, channels=1)
    return _demo("sine-vit-demo", backbone, _MLPS, lr=2e-3)


def sine_vit_cifar100() -> Recipe:
    """ViT-Small with patches of 4 on CIFAR-100: 21,376,996 parameters, and 7,267,300 at rank 1.

    Command: `nlr compare sine-vit-cifar100`, or `nlr train sine-vit-cifar100`; another rank by its arm, as in
    `nlr train sine-vit-cifar100 --arm 'sine-lowrank:rank=5,omega=500,include=.*mlp\\.fc[12]'`; a local copy by
    `--source cifar100.npz`.
    Hardware: one GPU of 24 GB.
    Time: not measured by us.
    Expect: the paper's top-1 at rank 1 by omega: 55.0 (100), 56.8 (300), 58.1 (500), 57.5 (700). Not repeated by us.
    """
    task = _cifar100(VitBackbone(layers=12, width=384, heads=6, hidden=1536, patch=4))
    training = _training(epochs=200, batch_size=512, lr=1e-3)
    return _recipe("sine-vit-cifar100", task, training, rank=1, omega=500, where=_MLPS)


def sine_vit_base() -> Recipe:
    """ViT-Base with patches of 16 on ImageNet-1k, both linears of every MLP at rank 150.

    Command: `torchrun --nproc-per-node 8 -m nlr_lab train sine-vit-base`; other ranks by the arm
    (`omega=vit-base-imagenet` takes the paper's frequency for the rank).
    Hardware: the paper's is not printed; several GPUs, and 16 CPU cores for each to decode and vary the images.
    Time: not measured by us.
    Expect: the paper shows curves and prints no numbers for this model. Not repeated by us.
    """
    task = ImagePretrainingTask(
        images=ImageSource(**IMAGENET),
        backbone=VitBackbone(layers=12, width=768, heads=12, hidden=3072, patch=16),
        augmentation=Augmentation(crop="resized", flip=True),
        shorter=256,
        meta_classes=1000,
    )
    training = _training(epochs=300, batch_size=1024, lr=3e-4)
    return _recipe("sine-vit-base", task, training, rank=150, omega=150, where=_MLPS, seeds=1)


def sine_convnext_demo() -> Recipe:
    """A small ConvNeXt with sine low-rank weights in its last stage, on scikit-learn's embedded digits.

    Command: `nlr compare sine-convnext-demo --max-minutes 9`, or `nlr train sine-convnext-demo`.
    Hardware: 2 CPU cores, 1 GB of memory, no network.
    Time: about a minute of one core for an arm: 420 steps of 0.07 s of CPU time on a busy machine, and evaluations.
    Expect: most of the 359 test digits right in every arm. It shows the tool at work, and is no evidence.
    """
    backbone = ConvNextBackbone(depths=(1, 1, 2, 1), widths=(16, 32, 64, 128), patch=1, channels=1)
    return _demo("sine-convnext-demo", backbone, _LAST, lr=4e-3)


def sine_convnext_cifar100() -> Recipe:
    """ConvNeXt-Tiny on CIFAR-100: 27,897,028 parameters, and 13,764,292 at rank 1.

    Command: `nlr compare sine-convnext-cifar100`, or `nlr train sine-convnext-cifar100`; another rank by its arm, as in
    `nlr train sine-convnext-cifar100 --arm 'sine-lowrank:rank=5,omega=300,include=.*stages\\.3\\..*pwconv[12]'`;
    a local copy by `--source cifar100.npz`.
    Hardware: one GPU of 24 GB.
    Time: not measured by us.
    Expect: the paper's top-1: 62.3 dense; 59.5 / 59.5 / 62.1 plain low rank and 61.5 / 62.0 / 62.8 sine at rank 1 / 5 /
    20 and omega 400 / 300 / 300. Not repeated by us; its image size is not printed and is CIFAR's own 32 here.
    """
    task = _cifar100(ConvNextBackbone(depths=(3, 3, 9, 3), widths=(96, 192, 384, 768)))
    training = _training(epochs=150, batch_size=512, lr=5e-3)
    return _recipe("sine-convnext-cifar100", task, training, rank=1, omega=400, where=_LAST)


def _recipe(
    name: str, task: ImagePretrainingTask, train: TrainConfig, *, rank: int, omega: int, where: str, seeds: int = 3
) -> Recipe:
    def arm(method: str, *more: str) -> str:
        """One arm on the linears that match `where`, named by its settings."""
        settings = ",".join((f"rank={rank}", *more, f"include={where}"))
        return f"{method}:{settings},name={'-'.join((method, f'r{rank}', *(each.split('=')[1] for each in more)))}"

    at, other = f"omega={omega}", "init=kaiming_zero"
    sine = arm("sine-lowrank", at)
    low = (arm("low-rank", "init=kaiming_sqrt5"), arm("low-rank", other))
    controls = (arm("sigmoid-low-rank", at), arm("relu-low-rank"))
    arms = ("baseline", *low, *controls, sine, arm("sine-lowrank", at, other))
    return named(Recipe, name, task=task, arm=sine, train=train, arms=arms, seeds=seeds)


def _demo(name: str, backbone: VitBackbone | ConvNextBackbone, where: str, *, lr: float) -> Recipe:
    task = ImagePretrainingTask(
        images=ImageSource(source="digits", size=8),
        backbone=backbone,
        augmentation=Augmentation(crop="shift", **_UNMIXED),
    )
    settings: dict[str, Any] = {"warmup_share": 0.05, "schedule": "cosine", "eval_every": 40, "save_every": 200}
    training = TrainConfig(epochs=20, batch_size=64, lr=lr, weight_decay=0.05, **settings)
    return _recipe(name, task, training, rank=2, omega=300, where=where)


def _cifar100(backbone: VitBackbone | ConvNextBackbone) -> ImagePretrainingTask:
    """CIFAR-100 at its own size, shifted and mirrored."""
    return ImagePretrainingTask(
        images=ImageSource(source="uoft-cs/cifar100", size=32),
        backbone=backbone,
        augmentation=Augmentation(crop="shift", flip=True, **_UNMIXED),
        meta_classes=100,
    )


def _training(**settings: Any) -> TrainConfig:
    cosine: dict[str, Any] = {"weight_decay": 0.05, "betas": (0.9, 0.999), "warmup_share": 0.025, "schedule": "cosine"}
    return TrainConfig(dataloader_workers=16, **cosine, **FAST, **EACH_EPOCH, **settings)
