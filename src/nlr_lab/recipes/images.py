"""Images from scratch: ViT with NOBLE branches, image tokens, and ViT and ConvNeXt with sine low-rank weights.

NOBLE's ViT (noble.txt, section 4.2.1) has Mixup and CutMix, as in the first half of Table 3; `--mixup 0 --cutmix 0` is
its second half. Image tokens (section 4.2.2) have the language model's backbone, warm-up and decay. Sine low-rank
weights (sine_lowrank.txt, appendix A.2) are both linears of every MLP of a ViT, and the pointwise linears of the last
stage of a ConvNeXt. Beside the sine stand the dense model, the sigmoid and the ReLU of the low-rank product, and plain
low rank; sine and plain low rank at both Kaiming inits, since the paper names none and the init moves results as much.
"""

from typing import Any

from nlr_lab.tasks.images.augmentation import Augmentation
from nlr_lab.tasks.images.pretraining import ConvNextBackbone, ImagePretrainingTask, VitBackbone
from nlr_lab.tasks.images.sources import ImageSource
from nlr_lab.tasks.images.tokens import ImageTokenData, ImageTokenTask
from nlr_lab.training.recipe import Recipe, TrainConfig

from . import BASELINES, EACH_EPOCH, FAST, as_published
from .language import glm

_IMAGENET: dict[str, Any] = {
    "source": "ILSVRC/imagenet-1k",
    "held_out": 0.0,  # papers score the validation images, and have no others
    "size": 224,
    "mean": (0.485, 0.456, 0.406),
    "std": (0.229, 0.224, 0.225),
}
_MLPS = r".*mlp\.fc[12]"
_LAST = r".*stages\.3\..*pwconv[12]"
_UNMIXED: dict[str, Any] = {"randaugment": 0, "mixup": 0.0, "cutmix": 0.0}
_COSINE: dict[str, Any] = {"weight_decay": 0.05, "schedule": "cosine"}
_TINY_VIT = VitBackbone(layers=4, width=64, heads=4, hidden=256, patch=2, channels=1)


def vit_demo() -> Recipe:
    """A vision transformer small enough for two CPU cores, on scikit-learn's embedded digits.

    Command: `nlr compare vit-demo --max-minutes 9`, or `nlr train vit-demo`.
    Hardware: 2 CPU cores, 1 GB of memory, no network.
    Time: two and a half minutes for an arm on one core.
    Expect: about 0.86 of the 359 test digits right; a training loss of 1.7 on varied and mixed images, of 0.7 on images
    as they are. 840 steps are few for blended labels: this shows the tool at work.
    """
    return Recipe(
        task=ImagePretrainingTask(
            images=ImageSource(source="digits", size=8),
            backbone=_TINY_VIT,
            augmentation=Augmentation(crop="shift"),
            plain_rows=400,
        ),
        arm="noble:rank=8",
        train=TrainConfig(
            epochs=40, batch_size=64, lr=2e-3, warmup_share=0.055, eval_every=80, save_every=400, **_COSINE
        ),
        arms=(*BASELINES, "noble:rank=8"),
    )


def vit_small() -> Recipe:
    """The paper's ViT-S/16 on ImageNet-1k: 22,050,664 parameters, 90 epochs at batch 1024 (section 4.2.1).

    Command: `torchrun --nproc-per-node 8 -m nlr_lab train vit-small --arm noble:rank=64`, and the
    paper's other half with `--mixup 0 --cutmix 0`; or `nlr compare vit-small --seeds 1`. A local copy by `--source`.
    Hardware: not printed; several GPUs, and 16 CPU cores for each to decode and vary the images.
    Time: not measured yet.
    Expect: the paper's top-1 and training loss: 74.40 % and 2.462 for the baseline, 74.51 % and 2.423 at rank 64;
    without Mixup and CutMix 67.17 % and 0.622, 67.31 % and 0.591. Not repeated by us at this size.
    """
    task = _imagenet(VitBackbone(layers=12, width=384, heads=6, hidden=1536, patch=16), plain_rows=10_000)
    large: dict[str, Any] = {"dataloader_workers": 16, **_COSINE, **FAST, **EACH_EPOCH}
    train = TrainConfig(epochs=90, batch_size=1024, lr=3e-4, warmup_share=5 / 90, **large)
    return Recipe(task=task, arm="noble:rank=64", train=train, arms=(*BASELINES, "noble:rank=64"), seeds=1)


def image_tokens_demo() -> Recipe:
    """Handwritten digits as 4 x 4 grids of patches; everything is embedded.

    Command: `nlr train image-tokens-demo`, then `nlr generate runs/image-tokens-demo`; or
    `nlr compare image-tokens-demo`.
    Hardware: 2 CPU cores, 1 GB of memory, no network.
    Time: about a minute for an arm; the 128 mean patches are fitted on first use, some seconds.
    Expect: an evaluation loss near 2.3 nats a token in every arm, and pictures in which many digits can be read. 1,438
    images are learned by heart after 300 steps: this shows the task at work and tells no arms apart.
    """
    tokens = ImageTokenData(source="digits", size=8, patch=2, codes=128, classes=10, eval_images=359)
    return Recipe(
        task=ImageTokenTask(tokens=tokens, backbone=glm(4, 128, 4, 344)),
        arm="noble:rank=16",
        train=TrainConfig(steps=300, batch_size=32, lr=2e-3, warmup_steps=30, eval_every=20, save_every=150),
        arms=(*BASELINES, "noble:rank=16"),
    )


def image_tokens_cifar10() -> Recipe:
    """CIFAR-10 as 8 x 8 grids of 512 mean patches, small enough for a CPU.

    Command: `nlr compare image-tokens-cifar10 --tune-lr 5e-4 1e-3 2e-3`, or `nlr train image-tokens-cifar10`; a local
    copy by `--source cifar10.npz`.
    Hardware: 2 CPU cores and 2 GB of memory, or any GPU.
    Time: encoding takes two minutes, once; then about 5 minutes an arm (a step takes 0.30 s of one core without
    branches, 0.39 s at rank 24).
    Expect: losses not measured yet. The 64 tokens of an image keep 22.6 dB of it.
    """
    tokens = ImageTokenData(source="uoft-cs/cifar10", size=32, patch=4, codes=512, classes=10, eval_images=512)
    return Recipe(
        task=ImageTokenTask(tokens=tokens, backbone=glm(4, 192, 6, 512)),
        arm="noble:rank=24",
        train=TrainConfig(steps=1200, batch_size=16, lr=1e-3, warmup_steps=100, eval_every=60, save_every=300),
        arms=(*BASELINES, "noble:rank=12", "noble:rank=24", "noble:rank=48"),
    )


def image_tokens_base() -> Recipe:
    """The paper's image token model: the base language model on 1,024 codes of amused-512 an image (section 4.2.2).

    Command: `torchrun --nproc-per-node 8 -m nlr_lab train image-tokens-base --arm noble:rank=64`, or
    `nlr compare image-tokens-base --seeds 1`; a folder of images by `--source imagenet/`.
    Hardware: several large GPUs, and `pip install '.[images]'`. ImageNet-1k is encoded once by one GPU,
    in parts that survive an interruption; the tokens are 2.6 GB in the cache.
    Time: not measured by us; sequences are as long as those of llm-base, whose steps take 309 to 373 ms on 8 H100.
    Expect: the paper's evaluation losses, 6.723 for the baseline and 6.699 / 6.690 / 6.682 at rank 64 / 128 / 256. Not
    repeated by us at this size.
    """
    codes: dict[str, Any] = {"tokenizer": "amused/amused-512", "patch": 16, "codes": 8192}
    tokens = ImageTokenData(source="ILSVRC/imagenet-1k", size=512, classes=1000, eval_images=2048, **codes)
    task = ImageTokenTask(tokens=tokens, backbone=glm(12, 1024, 8, 2752))
    return as_published(task, steps=250_000, batch_size=64, lr=3e-4, warmup_steps=2000)


def sine_vit_demo() -> Recipe:
    """A small vision transformer with sine low-rank MLPs, on scikit-learn's embedded digits.

    Command: `nlr compare sine-vit-demo --max-minutes 9`, or `nlr train sine-vit-demo`.
    Hardware: 2 CPU cores, 1 GB of memory, no network.
    Time: about a minute of one core for an arm: 420 steps of 0.08 s of CPU time on a busy machine, and evaluations.
    Expect: most of the 359 test digits right in every arm. It shows the tool at work, and is not evidence.
    """
    return _sine_demo(_TINY_VIT, _MLPS, lr=2e-3)


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
    training = _sine_training(epochs=200, batch_size=512, lr=1e-3)
    return _sine_recipe(task, training, rank=1, omega=500, where=_MLPS)


def sine_vit_base() -> Recipe:
    """ViT-Base with patches of 16 on ImageNet-1k, both linears of every MLP at rank 150.

    Command: `torchrun --nproc-per-node 8 -m nlr_lab train sine-vit-base`; other ranks by the arm
    (`omega=vit-base-imagenet` takes the paper's frequency for the rank).
    Hardware: as vit-small.
    Time: not measured by us.
    Expect: the paper shows curves and prints no numbers for this model. Not repeated by us.
    """
    task = _imagenet(VitBackbone(layers=12, width=768, heads=12, hidden=3072, patch=16))
    training = _sine_training(epochs=300, batch_size=1024, lr=3e-4)
    return _sine_recipe(task, training, rank=150, omega=150, where=_MLPS, seeds=1)


def sine_convnext_demo() -> Recipe:
    """A small ConvNeXt with sine low-rank weights in its last stage, on scikit-learn's embedded digits.

    Command: `nlr compare sine-convnext-demo --max-minutes 9`, or `nlr train sine-convnext-demo`.
    Hardware: 2 CPU cores, 1 GB of memory, no network.
    Time: about a minute of one core for an arm: 420 steps of 0.07 s of CPU time on a busy machine, and evaluations.
    Expect: most of the 359 test digits right in every arm. It shows the tool at work, and is not evidence.
    """
    backbone = ConvNextBackbone(depths=(1, 1, 2, 1), widths=(16, 32, 64, 128), patch=1, channels=1)
    return _sine_demo(backbone, _LAST, lr=4e-3)


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
    training = _sine_training(epochs=150, batch_size=512, lr=5e-3)
    return _sine_recipe(task, training, rank=1, omega=400, where=_LAST)


def _sine_recipe(
    task: ImagePretrainingTask, train: TrainConfig, *, rank: int, omega: int, where: str, seeds: int = 3
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
    return Recipe(task=task, arm=sine, train=train, arms=arms, seeds=seeds)


def _sine_demo(backbone: VitBackbone | ConvNextBackbone, where: str, *, lr: float) -> Recipe:
    task = ImagePretrainingTask(
        images=ImageSource(source="digits", size=8),
        backbone=backbone,
        augmentation=Augmentation(crop="shift", **_UNMIXED),
    )
    every: dict[str, Any] = {"eval_every": 40, "save_every": 200}
    training = TrainConfig(epochs=20, batch_size=64, lr=lr, warmup_share=0.05, **_COSINE, **every)
    return _sine_recipe(task, training, rank=2, omega=300, where=where)


def _imagenet(backbone: VitBackbone, **settings: Any) -> ImagePretrainingTask:
    varied = Augmentation(crop="resized", flip=True)
    images, how = ImageSource(**_IMAGENET), {"shorter": 256, "meta_classes": 1000, **settings}
    return ImagePretrainingTask(images=images, backbone=backbone, augmentation=varied, **how)


def _cifar100(backbone: VitBackbone | ConvNextBackbone) -> ImagePretrainingTask:
    """CIFAR-100 at its own size, shifted and mirrored."""
    return ImagePretrainingTask(
        images=ImageSource(source="uoft-cs/cifar100", size=32),
        backbone=backbone,
        augmentation=Augmentation(crop="shift", flip=True, **_UNMIXED),
        meta_classes=100,
    )


def _sine_training(**settings: Any) -> TrainConfig:
    shared: dict[str, Any] = {**_COSINE, **FAST, **EACH_EPOCH}
    return TrainConfig(dataloader_workers=16, betas=(0.9, 0.999), warmup_share=0.025, **shared, **settings)
