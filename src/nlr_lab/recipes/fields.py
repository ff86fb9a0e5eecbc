"""Neural fields (coordinate networks): images (not in the papers; after sine_lowrank.txt, section 4.4), radiance fields
(section 4.3 and appendix A.2.4; docs/fields.md), and shapes, which points a closed mesh has inside (4.4 and A.2.5).
Each is compared dense, low-rank and sine low-rank at the same ranks, both Kaiming inits tried for every arm, so that
a rate-distortion curve of each kind comes out.
"""

from nlr_lab.fields.settings import (
    FieldRecipe,
    FitConfig,
    ImageSettings,
    NerfSettings,
    OccupancySettings,
    RadianceConfig,
)


def _arms(*ranks: int) -> tuple[str, ...]:
    """Dense, then low-rank and sine side by side."""
    return ("dense", *(f"{kind}:rank={rank}" for rank in ranks for kind in ("low-rank", "sine")))


def image_demo() -> FieldRecipe:
    """A piece of an embedded photograph, 64 pixels by side, in a network of four layers.

    Command: `nlr fit image-demo`, or `nlr compare image-demo`; another image by `--source photo.png --crop 0`.
    Hardware: one CPU core, 1 GB of memory, no network.
    Time: ten seconds a fit, three minutes and a half for the comparison's 21 fits.
    Expect: more dB from rank 1 to rank 20; sine at rank 5 gave 24.3 dB after 200 steps (here 150). No evidence.
    """
    return FieldRecipe(
        problem=ImageSettings(source="china", crop=192, size=64, points=1024),
        method="sine:rank=5,omega=50",
        train=FitConfig(steps=150, lr=3e-3, eval_every=30, save_every=50),
        arms=_arms(1, 5, 20),
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
        problem=ImageSettings(points=16384),
        method="sine:rank=20,omega=20",
        train=FitConfig(steps=10_000, lr=3e-3, save_every=1000),
        arms=_arms(1, 2, 5, 20),
        seeds=3,
        tune_lr=(1e-3, 3e-3, 1e-2),
    )


def nerf_demo() -> FieldRecipe:
    """Three balls in formulas, 24 views of 40 x 40, in a network of four layers.

    Command: `nlr fit nerf-demo`, or `nlr compare nerf-demo`.
    Hardware: one CPU core, 1 GB of memory, no network.
    Time: 40 s of CPU time a fit; under five minutes for the comparison, seven arms at one init and one seed.
    Expect: 33 dB on the held-out views. It shows the tool at work, and is not evidence.
    """
    field = RadianceConfig(width=128, layers=4, view_width=64, spread=0.15)
    return FieldRecipe(
        problem=NerfSettings(source="demo", rays=128, samples=24, field=field),
        method="sine:rank=8,omega=100",
        train=FitConfig(steps=500, lr=2e-3, warmup_steps=25, eval_every=250, save_every=100),
        arms=tuple(f"{arm}{',' if ':' in arm else ':'}init=kaiming_sqrt5" for arm in _arms(1, 5, 20)),
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
        problem=NerfSettings(source="fern_252x189.npz", rays=256, samples=32),
        method="dense",
        train=FitConfig(steps=3000, lr=1e-3, warmup_steps=150, eval_every=1500, save_every=250),
        arms=_arms(1, 5, 30),
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
        problem=NerfSettings(source="nerf_llff_data/fern", downscale=8, rays=1024, samples=64, fine_samples=64),
        method="sine:rank=5",
        train=FitConfig(steps=500_000, lr=5e-4, schedule="exponential", end=0.01, eval_every=50_000, save_every=5_000),
        arms=_arms(1, 5, 10, 30, 60),
        seeds=1,
    )


def occupancy_demo() -> FieldRecipe:
    """A knot, inside or outside, on a lattice of 64^3.

    Command: `nlr fit occupancy-demo`, or `nlr compare occupancy-demo --max-minutes 4`.
    Hardware: one CPU core, 1 GB of memory, no network; the extra `fields`.
    Time: under a minute a fit; the comparison stops before five minutes.
    Expect: an IoU that rises with the rank. It shows the tool at work, and is not evidence.
    """
    return FieldRecipe(
        problem=OccupancySettings(
            source="knot", resolution=64, points=1024, held_out=32, mesh_resolution=48, picture_height=240
        ),
        method="sine:rank=5,omega=50",
        train=FitConfig(steps=150, lr=3e-3, eval_every=30, save_every=50),
        arms=_arms(1, 5, 20),
        seeds=1,
    )


def occupancy() -> FieldRecipe:
    """The paper's setting: 512^3 lattice, two hidden 256 x 256 linears, learning rate 1e-3 (A.2.5); s = 0.05 is ours.

    Command: `nlr fit occupancy --source lucy.ply`, or `nlr compare occupancy --source lucy.ply` for table 13. The
    paper's 200 epochs are over an unstated batch; here 20,000 steps of 16,384 points. It prints no s; its released code
    has 0.1, squared errors and other batches: `nlr reproduce sine/table13-released`.
    Hardware: one GPU, or CPU cores and hours; pip install '.[fields]'.
    Time: not measured by us.
    Expect: table 13: Lucy at k = 1 90.7 (sine) and 79.3 (low-rank). studies/occupancy has ours, of shorter fits.
    """
    return FieldRecipe(
        problem=OccupancySettings(resolution=512, points=16384, held_out=128, mesh_resolution=256),
        method="sine:rank=1,omega=occupancy",
        train=FitConfig(steps=20_000, lr=1e-3, save_every=2000),
        arms=_arms(1, 2, 5, 20),
        seeds=3,
        tune_lr=(5e-4, 1e-3, 2e-3),
    )
