"""Fields: images as coordinate networks (not in the papers; after sine_lowrank.txt, section 4.4).

Each is compared dense, low-rank and sine low-rank at the same ranks, so that a rate-distortion curve of each kind and
the distance between them come out. Both Kaiming inits are tried for every arm.
"""

from nlr_lab.fields.image import ImageSettings
from nlr_lab.fields.problem import FieldMethod
from nlr_lab.fields.recipe import FieldRecipe
from nlr_lab.fields.step import FitConfig

from . import RECIPES


def image_demo() -> FieldRecipe:
    """A piece of an embedded photograph, 64 pixels by side, in a network of four layers.

    Command: `nlr fit image-demo`, or `nlr compare image-demo`; another image by `--source photo.png --crop 0`.
    Hardware: one CPU core, 1 GB of memory, no network.
    Time: ten seconds a fit, so three minutes and a half for the comparison's 21 fits (seconds of a busy core).
    Expect: more dB from rank 1 to rank 20; sine at rank 5 gave 24.3 dB after 200 steps. It shows the tool at work, and
    is no evidence.
    """
    return FieldRecipe(
        name="image-demo",
        description=RECIPES["image-demo"].summary,
        problem=ImageSettings(source="china", crop=192, size=64, points=1024),
        method=FieldMethod(kind="sine", rank=5, omega=50.0),
        train=FitConfig(steps=150, lr=3e-3, eval_every=30, save_every=50),
        arms=_arms((1, 5, 20)),
        seeds=1,
    )


def image() -> FieldRecipe:
    """A whole photograph, in the network that the paper fits shapes with.

    Command: `nlr fit image --source photo.png`, or `nlr compare image --source photo.png`.
    Hardware: one GPU, or CPU cores and hours.
    Time: not measured by us.
    Expect: not measured by us; studies/images has what Kodak's photographs gave.
    """
    return FieldRecipe(
        name="image",
        description=RECIPES["image"].summary,
        problem=ImageSettings(points=16384),
        method=FieldMethod(kind="sine", rank=20, omega=20.0),
        train=FitConfig(steps=10_000, lr=3e-3, save_every=1000),
        arms=_arms((1, 2, 5, 20)),
        seeds=3,
        tune_lr=(1e-3, 3e-3, 1e-2),
    )


def _arms(ranks: tuple[int, ...]) -> tuple[str, ...]:
    """Dense, then low-rank and sine side by side."""
    return ("dense", *(f"{kind}:rank={rank}" for rank in ranks for kind in ("low-rank", "sine")))
