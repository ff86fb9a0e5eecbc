"""Shapes in a few thousand numbers: table 13 and figures 6 and 9 of sine_lowrank.txt, on closed meshes.

    python -m studies.occupancy.run MESHES [--stage shapes|long|rates|omega|all] [--work FOLDER]

MESHES is a folder of .npz meshes. Stages:

    shapes     low-rank against sine, omega as published for the rank: every mesh at ranks 1 and 5, the mesh `--full`
               (lucy) also at 2, 20 and dense
    long       ranks 1 and 5 of every mesh for `--long` times as many steps, at the inits and rates of `shapes`
    rates      plain low rank as in `long`, its rates rechosen over so many steps; rates.md has the sines of `long`,
               at the rates of `shapes`, against it
    omega      sine at rank 1 on the mesh `--full`, six frequencies, and low-rank beside them

All runs of a stage have the same number of steps. Each arm takes the best of two inits and three rates (at the edge the
grid grows, at most twice), chosen on one seed; then three other seeds. Finished runs are kept in FOLDER and used again,
a run that was stopped resumes from its checkpoint. Records, reports and pictures are copied to `--out`, beside this
file unless given, mesh by mesh.
"""

import argparse
from collections.abc import Iterable
from pathlib import Path

from nlr_lab.compare.report import markdown_table
from nlr_lab.fields.occupancy import OccupancySettings
from nlr_lab.fields.problem import FieldArm
from nlr_lab.fields.settings import FieldRecipe, FitConfig
from studies.study import (
    difference_cells,
    one_line_errors,
    record_arms,
    run_study,
    score_text,
    study_parser,
    tuned_arms,
)

RANKS = (1, 5)
RATES = (1e-3, 3e-3, 8e-3)
OMEGAS = (25, 50, 100, 200, 400, 800)


def both(ranks: tuple[int, ...]) -> list[str]:
    """The two kinds side by side."""
    return [f"{kind}:rank={rank}" for rank in ranks for kind in ("low-rank", "sine")]


def compare_shape(name: str, mesh: str, arms: Iterable[FieldArm], steps: int, arguments: argparse.Namespace) -> None:
    """One mesh, its arms compared and copied."""
    recipe = FieldRecipe(
        name=f"occupancy-{name}",
        description=f"{mesh}: inside or outside",
        problem=OccupancySettings(
            source=str(arguments.meshes / f"{mesh}.npz"),
            resolution=arguments.resolution,
            points=arguments.points,
            held_out=arguments.held_out,
            mesh_resolution=arguments.resolution,
        ),
        method="sine:rank=1",
        train=FitConfig(
            steps=steps,
            eval_every=max(steps // 5, 1),
            save_every=max(steps // 4, 1),
            threads=arguments.threads,
            compile=True,
        ),
    )
    run_study(
        recipe,
        arguments.work / name,
        arguments.out,
        name,
        arms=list(arms),
        seeds=arguments.seeds,
        tune_lr=RATES,
        timing_rounds=0,
        max_extensions=2,
        command=f"python -m studies.occupancy.run MESHES --stage {arguments.stage} --seeds {arguments.seeds}",
    )


def rates_table(folder: Path, meshes: Iterable[str]) -> str:
    """Sine of the stage `long` over plain low rank of the stage `rates`, paired by seed."""
    head = ("shape", "k", "low rank, rate of `shapes`", "low rank, rate of `rates`", "sine", "late")
    rows: list[tuple[str, ...]] = []
    for mesh in meshes:
        long, chosen = (record_arms(folder / f"{mesh}-{stage}.json") for stage in ("long", "rates"))
        pairs = [(long[f"sine-k{rank}"], chosen[f"low-rank-k{rank}"]) for rank in RANKS]
        for (sine, low), cells in zip(pairs, difference_cells(pairs), strict=True):
            before = long[low["name"]]
            scores = (f"{score_text(before)}, {before['lr']:g}", f"{score_text(low)}, {low['lr']:g}", score_text(sine))
            late = f"{low['late_gain']:+.2f}, {sine['late_gain']:+.2f}"
            rows.append((mesh, str(low["method"]["rank"]), *scores, late, *cells))
    return (
        "# Long runs, plain low rank at rates chosen for them\n\n"
        "IoU in %, mean +- standard deviation (n), and the rate; late: what the last fifth of the steps added to low\n"
        "rank (rate of `rates`) and to the sine; delta: sine minus low rank (rate of `rates`), paired by seed; Holm's\n"
        "correction within a shape.\n\n" + markdown_table((*head, "delta [95 %]", "p", "p (Holm)"), rows) + "\n"
    )


def main() -> None:
    parser = study_parser(__doc__, "occupancy", "meshes")
    parser.add_argument("--stage", choices=("shapes", "long", "rates", "omega", "all"), default="all")
    parser.add_argument("--full", default="lucy", help="the mesh of all ranks and of the sweep")
    parser.add_argument("--only", nargs="*", default=[], help="meshes by name; all of the folder unless given")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--long", type=int, default=4, help="times as many steps in the stage of that name")
    parser.add_argument("--points", type=int, default=1024)
    parser.add_argument("--resolution", type=int, default=128)
    parser.add_argument("--held-out", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    arguments = parser.parse_args()
    meshes = sorted(path.stem for path in arguments.meshes.glob("*.npz"))
    meshes = [name for name in meshes if not arguments.only or name in arguments.only]
    if not meshes or (arguments.full not in meshes and arguments.stage in ("omega", "all")):
        wanted = " or ".join(arguments.only if not meshes and arguments.only else [arguments.full])
        parser.error(f"there is no {wanted}.npz in {arguments.meshes}, or --only leaves it out")
    for folder in (arguments.work, arguments.out):
        folder.mkdir(parents=True, exist_ok=True)
    meshes.sort(key=lambda name: name != arguments.full)
    steps = arguments.steps
    with one_line_errors("error"):
        if arguments.stage in ("shapes", "all"):
            for mesh in meshes:
                arms = ["dense", *both((1, 2, 5, 20))] if mesh == arguments.full else both(RANKS)
                compare_shape(mesh, mesh, map(FieldArm.parse, arms), steps, arguments)
        if arguments.stage in ("long", "all"):
            for mesh in meshes:
                tuned = tuned_arms(arguments.out / f"{mesh}.json")
                compare_shape(
                    f"{mesh}-long",
                    mesh,
                    [arm for arm in tuned if arm.method.rank in RANKS],
                    arguments.long * steps,
                    arguments,
                )
        if arguments.stage in ("rates", "all"):
            for mesh in meshes:
                tuned = tuned_arms(arguments.out / f"{mesh}.json", rates=False)
                low = [arm for arm in tuned if arm.method.kind == "low-rank" and arm.method.rank in RANKS]
                compare_shape(f"{mesh}-rates", mesh, low, arguments.long * steps, arguments)
            (arguments.out / "rates.md").write_text(rates_table(arguments.out, meshes))
        if arguments.stage in ("omega", "all"):
            arms = ["low-rank:rank=1", *(f"sine:rank=1,omega={omega}" for omega in OMEGAS)]
            compare_shape(f"omega-{arguments.full}", arguments.full, map(FieldArm.parse, arms), steps, arguments)


if __name__ == "__main__":
    main()
