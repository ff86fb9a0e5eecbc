"""Radiance fields, low-rank against sine: Table 3 of sine_lowrank.txt in small.

    python studies/nerf/run.py FERN LEGO [--stage fern|spread|lego|size|all] [--threads 1] [--work FOLDER]

FERN is an LLFF scene and LEGO a Blender one, as `nlr fit nerf-fern --source` takes them. Stages:

    fern   all arms, each at its best of two inits and three rates or more, three seeds; pictures at half size
    spread all arms of `fern` at a narrower and a wider Gaussian: the 0.2 of the other stages was chosen for dense
           weights; low-rank products begin smaller, sines larger
    lego   all arms, as in `fern`, on a second scene, five held-out views
    size   fern at its full size, 256 rays x 32 samples, 3,000 steps: all arms once, at the init and rate of `fern`

What is finished is kept in FOLDER and used again: run it again to go on. Records, reports and pictures are copied
beside this file.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from nonlinear_lowrank.compare.field_plan import FieldArm
from nonlinear_lowrank.compare.study import absolute, one_line_errors, run_study, study_parser, tuned_arms
from nonlinear_lowrank.fields.nerf import NerfSettings
from nonlinear_lowrank.fields.nerf_model import RadianceConfig
from nonlinear_lowrank.fields.step import FitConfig
from nonlinear_lowrank.recipes import get_recipe

HERE = Path(__file__).parent
LOWER = (2.5e-4, 5e-4, 1e-3)  # fern's best were at the lower edge of its own
RATES = {"fern": (5e-4, 1e-3, 2e-3), "spread": LOWER, "lego": LOWER}
SMALL = {"downscale": 2, "rays": 64, "samples": 32, "frames": 0}
SPREADS = (0.1, 0.3)
LEGO_VIEWS = (100, 105, 110, 115, 120)  # of 100 training views and 25 test views


def stage(
    name: str,
    problem: NerfSettings,
    steps: int,
    arms: Sequence[FieldArm] | None,
    seeds: int,
    options: argparse.Namespace,
) -> None:
    """One table."""
    config = FitConfig(
        steps=steps,
        warmup_steps=steps // 20,
        eval_every=max(steps // 2, 1),
        save_every=100,
        threads=options.threads,
        device="cpu",
        compile=True,
    )
    run_study(
        replace(get_recipe("nerf-fern"), name=f"nerf-{name}", problem=problem, train=config),
        options.work / name,
        options.into,
        name,
        arms=arms,
        seeds=seeds,
        tune_lr=RATES.get(name.split("-")[0], ()),
        timing_rounds=0,
        max_extensions=2,
        command=f"python studies/nerf/run.py FERN LEGO --stage {name.split('-')[0]}",
    )


def main() -> None:
    parser = study_parser(__doc__, "nerf")
    parser.add_argument("fern", type=absolute)
    parser.add_argument("lego", type=absolute)
    parser.add_argument("--stage", choices=("fern", "spread", "lego", "size", "all"), default="all")
    parser.add_argument("--steps", type=int, default=600, help="of the runs at half size")
    parser.add_argument("--full-steps", type=int, default=3000, help="of the runs at full size")
    parser.add_argument("--into", type=Path, default=HERE, help="where records, reports and pictures are copied to")
    options = parser.parse_args()
    scenes = {
        "fern": NerfSettings(source=str(options.fern), **SMALL),
        "lego": NerfSettings(source=str(options.lego), held_out=LEGO_VIEWS, **SMALL),
    }
    wanted = ("fern", "spread", "lego", "size") if options.stage == "all" else (options.stage,)
    with one_line_errors():
        for name in wanted:
            if name == "size":
                arms = tuned_arms(options.into / "fern.json")
                settings = NerfSettings(source=str(options.fern), frames=0)
                stage(name, settings, options.full_steps, arms, 1, options)
            elif name == "spread":
                for spread in SPREADS:
                    settings = replace(scenes["fern"], field=RadianceConfig(spread=spread))
                    stage(f"spread-{spread}", settings, options.steps, None, options.seeds, options)
            else:
                stage(name, scenes[name], options.steps, None, options.seeds, options)


if __name__ == "__main__":
    main()
