"""Shapes: which points a closed mesh has inside (sine_lowrank.txt, sections 4.4 and A.2.5)."""

from nlr_lab.fields.occupancy import OccupancySettings
from nlr_lab.fields.problem import FieldMethod
from nlr_lab.fields.recipe import FieldRecipe
from nlr_lab.fields.step import FitConfig

from . import RECIPES


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
        arms=_arms(1, 5, 20),
        seeds=1,
    )


def occupancy() -> FieldRecipe:
    """The paper's setting: 512^3 lattice, two hidden 256 x 256 linears, s = 0.05, rate 1e-3 (A.2.5).

    Command: `nlr fit occupancy --source lucy.ply`, or `nlr compare occupancy --source lucy.ply` for table 13. The
    paper's 200 epochs are over an unstated batch; here 20,000 steps of 16,384 points.
    Hardware: one GPU, or CPU cores and hours; pip install 'nonlinear-lowrank[fields]'.
    Time: not measured by us.
    Expect: table 13: Lucy at k = 1 90.7 (sine) and 79.3 (low-rank). studies/occupancy has ours, of shorter fits.
    """
    return FieldRecipe(
        name="occupancy",
        description=RECIPES["occupancy"].summary,
        problem=OccupancySettings(resolution=512, points=16384, held_out=128, mesh_resolution=256),
        method=FieldMethod(kind="sine", rank=1, omega="occupancy"),
        train=FitConfig(steps=20_000, lr=1e-3, save_every=2000),
        arms=_arms(1, 2, 5, 20),
        seeds=3,
        tune_lr=(5e-4, 1e-3, 2e-3),
    )


def _arms(*ranks: int) -> tuple[str, ...]:
    """Dense, then low-rank and sine side by side."""
    return ("dense", *(f"{kind}:rank={rank}" for rank in ranks for kind in ("low-rank", "sine")))
