"""Radiance fields, low-rank against sine: Table 3 of sine_lowrank.txt in small.

    python studies/nerf/run.py FERN LEGO [--stage fern|lego|size|all] [--work FOLDER]

FERN is an LLFF scene and LEGO a Blender one, as `nlr fit nerf-fern --source` takes them. Stages:

    fern   all arms, each at its best of two inits and three rates, three seeds; pictures at half size
    lego   the same on a second scene, five held-out views
    size   fern at its full size, 256 rays x 32 samples, 3,000 steps: all arms once, at the init and rate of `fern`

Init and rate are chosen on a seed of its own, at as many steps. Finished runs are kept in FOLDER and used again, and a
run that was stopped goes on from its checkpoint; `STAGE.json` and `STAGE.md` are written beside this file.
"""

import argparse
import statistics
from dataclasses import dataclass, replace
from pathlib import Path

from nonlinear_lowrank import UserError
from nonlinear_lowrank.fields.fit import FitConfig, FitResult, fit
from nonlinear_lowrank.fields.nerf import NerfProblem, NerfSettings
from nonlinear_lowrank.fields.problem import FieldMethod
from nonlinear_lowrank.storage import write_json

HERE = Path(__file__).parent
RANKS = (1, 5, 30)
ARMS = {
    "dense": FieldMethod(),
    **{f"low-rank {rank}": FieldMethod(kind="low-rank", rank=rank) for rank in RANKS},
    **{f"sine {rank}": FieldMethod(kind="sine", rank=rank, omega="nerf") for rank in RANKS},
}
INITS = ("kaiming_sqrt5", "kaiming_zero")
RATES = (5e-4, 1e-3, 2e-3)
TUNING_SEED = 1000
SMALL = {"rays": 64, "samples": 32, "frames": 0}
LEGO_VIEWS = (100, 105, 110, 115, 120)  # of 100 training views and 25 test views


@dataclass(frozen=True)
class Cell:
    """An arm's settings."""

    arm: str
    init: str
    lr: float


class Stage:
    """The runs of one scene at one size."""

    def __init__(self, name: str, settings: NerfSettings, steps: int, threads: int, work: Path) -> None:
        self.name, self.problem = name, settings.prepare()
        self.steps, self.threads, self.work = steps, threads, work

    def run(self, cell: Cell, seed: int) -> FitResult:
        """A fit, or the finished one of before."""
        out = self.work / self.name / cell.arm.replace(" ", "-") / f"{cell.init}-{cell.lr:g}-seed{seed}"
        out.parent.mkdir(parents=True, exist_ok=True)
        config = FitConfig(
            steps=self.steps,
            lr=cell.lr,
            warmup_steps=self.steps // 20,
            seed=seed,
            eval_every=self.steps,
            save_every=100,
            threads=self.threads,
            device="cpu",
        )
        method = replace(ARMS[cell.arm], init=cell.init)
        found = fit(
            self.problem, method, config, out, resume=out.exists(), quiet=True, pictures=seed == 0, title=cell.arm
        )
        said = f"{self.name}  {cell.arm:12} {cell.init} {cell.lr:g} seed {seed}"
        print(f"{said}: {found.value:.2f} dB, {found.seconds:.0f} s", flush=True)
        return found

    def tuned(self) -> dict[str, dict[Cell, float]]:
        """PSNR of every arm at every init and rate."""
        cells = {arm: [Cell(arm, init, lr) for init in INITS for lr in RATES] for arm in ARMS}
        return {arm: {cell: self.run(cell, TUNING_SEED).value for cell in some} for arm, some in cells.items()}

    def report(self, best: dict[str, Cell], tuning: dict[str, dict[Cell, float]], seeds: int) -> None:
        """Runs the seeds and writes the record and the table."""
        rows, lines = [], ["| arm | parameters | init | rate | PSNR, dB | SSIM | n |", "|---|---|---|---|---|---|---|"]
        for arm, cell in best.items():
            runs = [self.run(cell, seed) for seed in range(seeds)]
            psnr, ssim = ([run.metrics[name] for run in runs] for name in ("psnr", "ssim"))
            spread = f" +- {statistics.stdev(psnr):.2f}" if seeds > 1 else ""
            rows.append(
                {
                    "arm": arm,
                    "parameters": runs[0].parameters,
                    "init": cell.init,
                    "lr": cell.lr,
                    "psnr": psnr,
                    "ssim": ssim,
                    "seconds": [run.seconds for run in runs],
                    "tuning": [{"init": each.init, "lr": each.lr, "psnr": at} for each, at in tuning[arm].items()],
                }
            )
            lines.append(
                f"| {arm} | {runs[0].parameters:,} | {cell.init} | {cell.lr:g} | {statistics.mean(psnr):.2f}{spread} | "
                f"{statistics.mean(ssim):.3f} | {seeds} |"
            )
        problem: NerfProblem = self.problem
        scene = problem.scene
        about = {
            "scene": scene.name,
            "fingerprint": problem.fingerprint,
            "views": list(scene.images.shape),
            "held_out": list(scene.held_out),
            "rays": problem.settings.rays,
            "samples": problem.settings.samples,
            "steps": self.steps,
        }
        write_json(HERE / f"{self.name}.json", {**about, "arms": rows})
        (HERE / f"{self.name}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
        print("\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fern")
    parser.add_argument("lego")
    parser.add_argument("--stage", choices=("fern", "lego", "size", "all"), default="all")
    parser.add_argument("--steps", type=int, default=600, help="of the small runs")
    parser.add_argument("--full-steps", type=int, default=3000, help="of the runs at full size")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--work", type=Path, default=Path("runs/nerf"))
    arguments = parser.parse_args()
    scenes = {
        "fern": NerfSettings(source=arguments.fern, downscale=2, **SMALL),
        "lego": NerfSettings(source=arguments.lego, downscale=2, held_out=LEGO_VIEWS, **SMALL),
    }
    wanted = ("fern", "lego", "size") if arguments.stage == "all" else (arguments.stage,)
    try:
        for name in wanted:
            scene = "fern" if name == "size" else name
            stage = Stage(scene, scenes[scene], arguments.steps, arguments.threads, arguments.work)
            tuning = stage.tuned()
            best = {arm: max(found, key=found.__getitem__) for arm, found in tuning.items()}
            if name == "size":
                settings = NerfSettings(source=arguments.fern, frames=0)
                stage = Stage("size", settings, arguments.full_steps, arguments.threads, arguments.work)
            stage.report(best, tuning, 1 if name == "size" else arguments.seeds)
    except UserError as error:
        raise SystemExit(f"{error}") from None


if __name__ == "__main__":
    main()
