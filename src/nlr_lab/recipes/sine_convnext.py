"""ConvNeXt with sine low-rank weights (sine_lowrank.txt, appendix A.2.3 and Table 11).

Only the pointwise linears of the last stage are factored, two in each of its three blocks: they hold half of the
parameters. Arms are those of `sine_vit`. The paper prints batch, rate and epochs; the rest is as in `sine_vit`.
"""

from nlr_lab.tasks.images.backbones import ConvNextBackbone
from nlr_lab.training.recipe import Recipe

from . import RECIPES
from .sine_weights import cifar100_task, demo_training, digits_task, training, weight_arm, weight_arms

_LAST = r".*stages\.3\..*pwconv[12]"


def sine_convnext_demo() -> Recipe:
    """A small ConvNeXt with sine low-rank weights in its last stage, on scikit-learn's embedded digits.

    Command: `nlr compare sine-convnext-demo --max-minutes 9`, or `nlr train sine-convnext-demo`.
    Hardware: 2 CPU cores, 1 GB of memory, no network.
    Time: about a minute of one core for an arm: 420 steps of 0.07 s of CPU time on a busy machine, and evaluations.
    Expect: most of the 359 test digits right in every arm. It shows the tool at work, and is no evidence.
    """
    return Recipe(
        name="sine-convnext-demo",
        description=RECIPES["sine-convnext-demo"].summary,
        task=digits_task(ConvNextBackbone(depths=(1, 1, 2, 1), widths=(16, 32, 64, 128), patch=1, channels=1)),
        arm=weight_arm("sine-lowrank", 2, _LAST, "omega=300"),
        train=demo_training(lr=4e-3),
        arms=weight_arms(2, 300, _LAST),
        seeds=3,
    )


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
    return Recipe(
        name="sine-convnext-cifar100",
        description=RECIPES["sine-convnext-cifar100"].summary,
        task=cifar100_task(ConvNextBackbone(depths=(3, 3, 9, 3), widths=(96, 192, 384, 768))),
        arm=weight_arm("sine-lowrank", 1, _LAST, "omega=400"),
        train=training(epochs=150, batch_size=512, lr=5e-3),
        arms=weight_arms(1, 400, _LAST),
        seeds=3,
    )
