"""What the recipes of sine low-rank image models share: arms, data and training (sine_lowrank.txt, section 4.2)."""

from nlr_lab.tasks.images.augmentation import Augmentation
from nlr_lab.tasks.images.backbones import ConvNextBackbone, VitBackbone
from nlr_lab.tasks.images.data import ImageSource
from nlr_lab.tasks.images.pretraining import ImagePretrainingTask
from nlr_lab.training.recipe import TrainConfig


def weight_arm(method: str, rank: int, where: str, *more: str) -> str:
    """One arm on the linears that match `where`, named by its settings."""
    words = [each.partition("=")[2] for each in more]
    settings = ",".join((f"rank={rank}", *more, f"include={where}"))
    return f"{method}:{settings},name={'-'.join((method, f'r{rank}', *words))}"


def weight_arms(rank: int, omega: int, where: str) -> tuple[str, ...]:
    """The dense model; plain low rank and the sine at both inits; sigmoid and ReLU of the low-rank product."""
    other = "init=kaiming_zero"
    low = [weight_arm("low-rank", rank, where, init) for init in ("init=kaiming_sqrt5", other)]
    controls = [
        weight_arm("sigmoid-low-rank", rank, where, f"omega={omega}"),
        weight_arm("relu-low-rank", rank, where),
    ]
    sine = [weight_arm("sine-lowrank", rank, where, f"omega={omega}", *more) for more in ((), (other,))]
    return ("baseline", *low, *controls, *sine)


def digits_task(backbone: VitBackbone | ConvNextBackbone) -> ImagePretrainingTask:
    """Scikit-learn's embedded digits, 8 x 8 pixels."""
    return ImagePretrainingTask(
        images=ImageSource(source="digits", size=8),
        backbone=backbone,
        augmentation=Augmentation(crop="shift", randaugment=0, mixup=0.0, cutmix=0.0),
    )


def cifar100_task(backbone: VitBackbone | ConvNextBackbone) -> ImagePretrainingTask:
    """CIFAR-100 at its own size, shifted and mirrored."""
    return ImagePretrainingTask(
        images=ImageSource(source="uoft-cs/cifar100", size=32),
        backbone=backbone,
        augmentation=Augmentation(crop="shift", flip=True, randaugment=0, mixup=0.0, cutmix=0.0),
        meta_classes=100,
    )


def demo_training(*, lr: float) -> TrainConfig:
    """A minute of one core on the digits."""
    return TrainConfig(
        epochs=20,
        batch_size=64,
        lr=lr,
        weight_decay=0.05,
        warmup_share=0.05,
        schedule="cosine",
        eval_every=40,
        save_every=200,
        log_every=10,
    )


def training(*, epochs: float, batch_size: int, lr: float) -> TrainConfig:
    """What the paper's sizes share here."""
    return TrainConfig(
        epochs=epochs,
        batch_size=batch_size,
        lr=lr,
        weight_decay=0.05,
        betas=(0.9, 0.999),
        warmup_share=0.025,
        schedule="cosine",
        bf16=True,
        compile=True,
        eval_every=0,
        save_every=0,
        log_every=50,
        dataloader_workers=16,
    )
