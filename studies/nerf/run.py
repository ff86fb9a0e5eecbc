"""Radiance fields, low-rank against sine: Table 3 of sine_lowrank.txt in small.

    python -m studies.nerf.run FERN LEGO [--stage fern|spread|lego|size|all] [--threads 1] [--work FOLDER]

FERN is an LLFF scene and LEGO a Blender one, as `nlr fit nerf-fern --source` takes them. Stages:

    fern   all arms, each at its best of two inits and three rates or more, three seeds; pictures at half size
    lego   all arms, as in `fern`, on a second scene, five held-out views
    spread sine and plain low rank on both scenes with a narrower and a wider Gaussian, tuned alike: the 0.2 of the
           other stages was chosen for dense weights, and products of two factors begin smaller. spread.md compares the
           two at the best Gaussian of each
    size   fern at its full size, 256 rays x 32 samples, 3,000 steps: all arms once, at the init and rate of `fern`

What is finished is kept in FOLDER and used again: rerun it to continue. Records, reports and pictures are copied
beside this file.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from nlr_lab.compare.report import markdown_table
from nlr_lab.fields.nerf import NerfSettings
from nlr_lab.fields.problem import FieldArm
from nlr_lab.fields.settings import FitConfig, RadianceConfig
from nlr_lab.recipes import get_recipe
from studies.study import (
    absolute,
    difference_cells,
    one_line_errors,
    record_arms,
    run_study,
    score_text,
    study_parser,
    tuned_arms,
)

HERE = Path(__file__).parent
LOWER = (2.5e-4, 5e-4, 1e-3)  # fern's best were at the lower edge of its own
RATES = {"fern": (5e-4, 1e-3, 2e-3), "lego": LOWER}
SMALL = {"downscale": 2, "rays": 64, "samples": 32, "frames": 0}
RANKS = (1, 5, 30)
SPREADS = (0.1, 0.4)
LEGO_VIEWS = (100, 105, 110, 115, 120)  # of 100 training views and 25 test views


def stage(
    name: str,
    problem: NerfSettings,
    steps: int,
    arms: Sequence[FieldArm] | None,
    seeds: int,
    options: argparse.Namespace,
    rates: tuple[float, ...] = (),
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
        tune_lr=rates,
        timing_rounds=0,
        max_extensions=2,
        command=f"python -m studies.nerf.run FERN LEGO --stage {options.stage}",
    )


def spread_table(folder: Path) -> str:
    """Sine over plain low rank, each with the s that was best for it on the tuning seed, paired by seed."""
    spreads = sorted((0.2, *SPREADS))
    head = ["scene", "k"]
    for kind in ("low rank", "sine"):
        head += [*(f"{kind}, s = {each}" for each in spreads), "best s"]
    rows: list[tuple[str, ...]] = []
    pairs = []
    for scene in ("fern", "lego"):
        records = {spread: f"{scene}.json" if spread == 0.2 else f"{scene}-{spread}.json" for spread in spreads}
        arms = {spread: record_arms(folder / record) for spread, record in records.items()}
        for rank in RANKS:
            cells = [scene, str(rank)]
            chosen = []
            for kind in ("low-rank", "sine"):
                found = {spread: of[f"{kind}-k{rank}"] for spread, of in arms.items()}
                best = max(found, key=lambda spread: max(each["score"] or 0 for each in found[spread]["tuning"]))
                cells += [*map(score_text, found.values()), str(best)]
                chosen.append(found[best])
            pairs.append((chosen[1], chosen[0]))
            rows.append(tuple(cells))
    rows = [(*row, *cells) for row, cells in zip(rows, difference_cells(pairs), strict=True)]
    return (
        "# Narrower and wider Gaussians\n\n"
        "PSNR in dB, mean +- standard deviation (n); delta: sine minus low rank, each with the s that was best for it\n"
        "on the tuning seed, paired by seed; Holm's correction over the six.\n\n"
        + markdown_table((*head, "delta [95 %]", "p", "p (Holm)"), rows)
        + "\n"
    )


def main() -> None:
    parser = study_parser(__doc__, "nerf")
    parser.add_argument("fern", type=absolute)
    parser.add_argument("lego", type=absolute)
    parser.add_argument("--stage", choices=("fern", "lego", "spread", "size", "all"), default="all")
    parser.add_argument("--steps", type=int, default=600, help="of the runs at half size")
    parser.add_argument("--full-steps", type=int, default=3000, help="of the runs at full size")
    parser.add_argument("--into", type=Path, default=HERE, help="where records, reports and pictures are copied to")
    options = parser.parse_args()
    scenes = {
        "fern": NerfSettings(source=str(options.fern), **SMALL),
        "lego": NerfSettings(source=str(options.lego), held_out=LEGO_VIEWS, **SMALL),
    }
    wanted = ("fern", "lego", "spread", "size") if options.stage == "all" else (options.stage,)
    with one_line_errors():
        for name in wanted:
            if name == "size":
                arms = tuned_arms(options.into / "fern.json")
                settings = NerfSettings(source=str(options.fern), frames=0)
                stage(name, settings, options.full_steps, arms, 1, options)
            elif name == "spread":
                arms = [FieldArm.parse(f"{kind}:rank={rank}") for rank in RANKS for kind in ("low-rank", "sine")]
                for spread in SPREADS:
                    for scene, problem in scenes.items():
                        narrow = replace(problem, field=RadianceConfig(spread=spread))
                        stage(f"{scene}-{spread}", narrow, options.steps, arms, options.seeds, options, LOWER)
                (options.into / "spread.md").write_text(spread_table(options.into))
            else:
                stage(name, scenes[name], options.steps, None, options.seeds, options, RATES[name])


if __name__ == "__main__":
    main()
