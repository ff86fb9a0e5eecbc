"""Fields: images and shapes as coordinate networks (sine_lowrank.txt, section 4.4; images are not in the paper).

Each is compared dense, low-rank and sine low-rank at the same ranks, so that a rate-distortion curve of each kind and
the distance between them come out. Both Kaiming inits are tried for every arm.
"""

from ..fields.image import ImageSettings
from ..fields.occupancy import OccupancySettings
from ..fields.problem import FieldMethod
from ..fields.recipe import FieldRecipe
from ..fields.step import FitConfig
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


def occupancy_demo() -> FieldRecipe:
    """A knot, inside or outside, on a lattice of 64^3.

    Command: `nlr fit occupancy-demo`, or `nlr compare occupancy-demo --max-minutes 4`.
    Hardware: one CPU core, 1 GB of memory, no network; the extra `fields`.
    Time: under a minute a fit; the comparison stops before five minutes.
    Expect: an IoU that rises with the rank. It shows the tool at work, and is no evidence.
    """
    return FieldRecipe(
        name="occupancy-demo",
        description=RECIPES["occupancy-demo"].summary,
        problem=OccupancySettings(
            source="knot", resolution=64, points=1024, held_out=32, mesh_resolution=48, picture_height=240
        ),
        method=FieldMethod(kind="sine", rank=5, omega=50.0),
        train=FitConfig(steps=150, lr=3e-3, eval_every=30, save_every=50),
        arms=_arms((1, 5, 20)),
        seeds=1,
    )


def occupancy() -> FieldRecipe:
    """A closed mesh, inside or outside, in the paper's network (132,865 parameters; 2,817 at rank 1).

    Command: `nlr fit occupancy --source mesh.obj`, or `nlr compare occupancy --source mesh.obj`; the paper's lattice by
    `--resolution 512`.
    Hardware: 2 CPU cores, 2 GB of memory, or any GPU.
    Time: not measured by us; studies/occupancy has what its runs took.
    Expect: the paper's IoU of Lucy by rank (1, 2, 5, 20), low-rank: 79.3, 89.4, 94.8, 96.2; sine: 90.7, 93.2, 95.3,
    96.3; dense 97.8. Not repeated by this recipe.
    """
    return FieldRecipe(
        name="occupancy",
        description=RECIPES["occupancy"].summary,
        problem=OccupancySettings(points=4096),
        method=FieldMethod(kind="sine", rank=1, omega=200.0),
        train=FitConfig(steps=2500, lr=2e-3, eval_every=500, save_every=250),
        arms=_arms((1, 2, 5, 20)),
        seeds=3,
        tune_lr=(1e-3, 2e-3, 4e-3),
    )


def _arms(ranks: tuple[int, ...]) -> tuple[str, ...]:
    """Dense, then low-rank and sine side by side; omega by the published table for shapes."""
    return ("dense", *(f"{kind}:rank={rank}" for rank in ranks for kind in ("low-rank", "sine")))
