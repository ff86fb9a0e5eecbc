"""Radiance fields (sine_lowrank.txt, section 4.3 and appendix A.2.4; docs/nerf.md).

Each is compared dense, low-rank and sine low-rank at the same ranks, omega by the published table for NeRF.
"""

from nlr_lab.fields.nerf import NerfSettings
from nlr_lab.fields.nerf_model import RadianceConfig
from nlr_lab.fields.problem import FieldMethod
from nlr_lab.fields.recipe import FieldRecipe
from nlr_lab.fields.step import FitConfig

from . import RECIPES


def nerf_demo() -> FieldRecipe:
    """Three balls in formulas, 24 views of 40 x 40, in a network of four layers.

    Command: `nlr fit nerf-demo`, or `nlr compare nerf-demo`.
    Hardware: one CPU core, 1 GB of memory, no network.
    Time: 40 s of CPU time a fit; under five minutes for the comparison, seven arms at one init and one seed.
    Expect: 33 dB on the held-out views. It shows the tool at work, and is no evidence.
    """
    return FieldRecipe(
        name="nerf-demo",
        description=RECIPES["nerf-demo"].summary,
        problem=NerfSettings(
            source="demo",
            rays=128,
            samples=24,
            field=RadianceConfig(width=128, layers=4, view_width=64, spread=0.15),
        ),
        method=FieldMethod(kind="sine", rank=8, omega=100.0),
        train=FitConfig(steps=500, lr=2e-3, warmup_steps=25, eval_every=250, save_every=100),
        arms=tuple(f"{arm}{',' if ':' in arm else ':'}init=kaiming_sqrt5" for arm in _arms((1, 5, 20))),
        seeds=1,
    )


def nerf_fern() -> FieldRecipe:
    """A small scene taken from one side, in the paper's network; coarse samples alone.

    Command: `nlr fit nerf-fern --source fern_252x189.npz`, or `nlr compare nerf-fern --source ...`.
    Hardware: 2 CPU cores, 2 GB of memory.
    Time: dense, 17 minutes of 2 idle cores with AVX-512 (0.35 s a step), and some minutes to render the frames.
    Expect: 21.3 dB dense after 3,000 steps (18.8 after 1,500), SSIM 0.56, on the views 0, 8 and 16 (one seed).
    """
    return FieldRecipe(
        name="nerf-fern",
        description=RECIPES["nerf-fern"].summary,
        problem=NerfSettings(source="fern_252x189.npz", rays=256, samples=32),
        method=FieldMethod(),
        train=FitConfig(steps=3000, lr=1e-3, warmup_steps=150, eval_every=1500, save_every=250),
        arms=_arms((1, 5, 30)),
        seeds=3,
        tune_lr=(5e-4, 1e-3, 2e-3),
    )


def nerf_llff() -> FieldRecipe:
    """A scene of LLFF as published: 500,000 steps at 5e-4; rays, samples and decay are NeRF's own for LLFF.

    Command: `nlr fit nerf-llff --source nerf_llff_data/fern`, or `nlr compare nerf-llff --source ...`.
    Hardware: one GPU.
    Time: about a day a fit, by NeRF's own; not run by us.
    Expect: 26.38 dB on fern dense; 23.50 with sine and 20.64 low-rank at k = 5 (published, Table 3).
    """
    return FieldRecipe(
        name="nerf-llff",
        description=RECIPES["nerf-llff"].summary,
        problem=NerfSettings(source="nerf_llff_data/fern", downscale=8, rays=1024, samples=64, fine_samples=64),
        method=FieldMethod(kind="sine", rank=5),
        train=FitConfig(steps=500_000, lr=5e-4, schedule="exponential", end=0.01, eval_every=50_000, save_every=5_000),
        arms=_arms((1, 5, 10, 30, 60)),
        seeds=1,
    )


def _arms(ranks: tuple[int, ...]) -> tuple[str, ...]:
    """Dense, then low-rank and sine side by side."""
    return ("dense", *(f"{kind}:rank={rank}" for rank in ranks for kind in ("low-rank", "sine")))
