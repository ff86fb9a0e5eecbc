"""Shapes in a few thousand numbers: table 13 and figures 6 and 9 of sine_lowrank.txt, on closed meshes.

    python studies/occupancy/run.py MESHES [--work FOLDER] [--stage ranks|omega|all]

MESHES is a folder of .npz meshes. Stages:

    ranks      low-rank against sine, omega as published for the rank: every mesh at ranks 1 and 5, the mesh `--full`
               (lucy) also at 2, 20 and dense. Each arm at the best of two inits and three rates, chosen by the IoU of
               seed 0, then three other seeds
    omega      sine at rank 1 on the mesh `--full`: six frequencies, each at the best of three rates at the init that
               `ranks` chose, then three other seeds

Every run has the same number of steps. Finished runs are kept in FOLDER and used again, a run that was stopped goes on
from its last checkpoint. Records, tables and pictures are written beside this file after each stage (`--out`).
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from PIL import Image

from nonlinear_lowrank import UserError
from nonlinear_lowrank.compare.statistics import paired_mean
from nonlinear_lowrank.environment import machine, versions
from nonlinear_lowrank.fields.fit import FitConfig, FitResult, fit
from nonlinear_lowrank.fields.occupancy import OccupancyProblem, OccupancySettings
from nonlinear_lowrank.fields.problem import FieldMethod
from nonlinear_lowrank.storage import write_json

matplotlib.use("Agg")

INITS = ("kaiming_sqrt5", "kaiming_zero")
RATES = (1e-3, 2e-3, 4e-3)
OMEGAS = (25.0, 50.0, 100.0, 200.0, 400.0, 800.0)
PUBLISHED = {  # table 13, Lucy
    ("dense", None): 97.8,
    **{("low-rank", rank): iou for rank, iou in ((1, 79.3), (2, 89.4), (5, 94.8), (20, 96.2))},
    **{("sine", rank): iou for rank, iou in ((1, 90.7), (2, 93.2), (5, 95.3), (20, 96.3))},
}


@dataclass(frozen=True)
class Arm:
    """One entry of a table: the linears, but for their init."""

    mesh: str
    kind: str
    rank: int | None
    omega: float | None = None

    @property
    def label(self) -> str:
        parts = [self.mesh, self.kind]
        parts += [f"k{self.rank}"] if self.rank else []
        parts += [f"w{self.omega:g}"] if self.omega else []
        return "-".join(parts)

    def method(self, init: str) -> FieldMethod:
        return FieldMethod(kind=self.kind, rank=self.rank, omega=self.omega, init=init)  # type: ignore[arg-type]


class Study:
    """Runs arms of a study, each run in a folder of its own."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.problems = arguments, {}

    def problem(self, mesh: str) -> OccupancyProblem:
        if mesh not in self.problems:
            a = self.arguments
            settings = OccupancySettings(
                source=str(a.meshes / f"{mesh}.npz"),
                resolution=a.resolution,
                points=a.points,
                held_out=a.held_out,
                mesh_resolution=a.resolution,
            )
            self.problems = {mesh: settings.prepare()}  # one at a time in memory
        return self.problems[mesh]

    def run(self, arm: Arm, init: str, rate: float, seed: int) -> FitResult:
        a = self.arguments
        out = a.work / arm.label / f"{init}-{rate:g}-seed{seed}"
        out.parent.mkdir(parents=True, exist_ok=True)
        config = FitConfig(
            steps=a.steps,
            lr=rate,
            seed=seed,
            eval_every=max(a.steps // 4, 1),
            save_every=a.steps // 4,
            threads=a.threads,
        )
        return fit(
            self.problem(arm.mesh), arm.method(init), config, out, resume=out.exists(), pictures=False, quiet=True
        )

    def judged(self, arm: Arm, inits: tuple[str, ...]) -> dict[str, Any]:
        """The arm at its best init and rate, over the seeds."""
        tried = {(init, rate): self.run(arm, init, rate, 0) for init in inits for rate in RATES}
        init, rate = max(tried, key=lambda setting: tried[setting].value)
        found = [self.run(arm, init, rate, seed) for seed in range(1, self.arguments.seeds + 1)]
        scores = [each.value for each in found]
        record = {
            "mesh": arm.mesh,
            "kind": arm.kind,
            "rank": arm.rank,
            "omega": getattr(found[0].model.hidden[0], "sine_config", None)
            and found[0].model.hidden[0].sine_config.omega,
            "parameters": found[0].parameters,
            "init": init,
            "lr": rate,
            "at_edge": rate in (RATES[0], RATES[-1]),
            "tried": [{"init": i, "lr": r, "iou": each.value} for (i, r), each in tried.items()],
            "seeds": scores,
            "iou": float(np.mean(scores)),
            "sd": float(np.std(scores, ddof=1)) if len(scores) > 1 else None,
            # What the last quarter of the steps still brought: near 0 at a plateau.
            "last_quarter": float(
                np.mean([each.value - each.curve[-2]["iou"] for each in found if len(each.curve) > 1])
            ),
            "seconds": float(np.mean([each.seconds for each in found])),
        }
        print(f"{arm.label}: {record['iou']:.2f} (n = {len(scores)}; {init}, {rate:g})", flush=True)
        return record


def ranks(study: Study, meshes: list[str], full: str) -> Iterator[dict[str, Any]]:
    """The arms of the first stage."""
    for mesh in meshes:
        for rank in (1, 5) if mesh != full else (1, 2, 5, 20):
            for kind in ("low-rank", "sine"):
                yield study.judged(Arm(mesh, kind, rank), INITS)
        if mesh == full:
            yield study.judged(Arm(mesh, "dense", None), INITS)


def omegas(study: Study, meshes: list[str], full: str) -> Iterator[dict[str, Any]]:
    """The arms of the second."""
    best = study.judged(Arm(full, "sine", 1), INITS)
    for omega in OMEGAS:
        yield study.judged(Arm(full, "sine", 1, omega), (best["init"],))


def rank_table(records: list[dict[str, Any]], full: str) -> str:
    """Low-rank against sine, paired by seed."""
    by_arm = {(each["mesh"], each["rank"], each["kind"]): each for each in records}
    lines = [
        "| mesh | k | parameters | low-rank IoU, % | sine IoU, % | sine - low-rank [95 %] | n | published (Lucy) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (mesh, rank, kind), sine in by_arm.items():
        if kind != "sine":
            continue
        low = by_arm[mesh, rank, "low-rank"]
        apart = paired_mean([s - p for s, p in zip(sine["seeds"], low["seeds"], strict=True)])
        interval = "" if apart.low is None else f" [{apart.low:+.2f}, {apart.high:+.2f}]"
        known = f"{PUBLISHED['low-rank', rank]} / {PUBLISHED['sine', rank]}" if mesh == "lucy" else ""
        lines.append(
            f"| {mesh} | {rank} | {sine['parameters']:,} | {shown(low)} | {shown(sine)} | {apart.value:+.2f}{interval} "
            f"| {apart.n} | {known} |"
        )
    for each in records:
        if each["kind"] == "dense":
            known = PUBLISHED["dense", None] if full == "lucy" else ""
            lines.append(
                f"| {each['mesh']} | dense | {each['parameters']:,} | {shown(each)} | | | {len(each['seeds'])} "
                f"| {known} |"
            )
    return "\n".join(lines)


def omega_table(records: list[dict[str, Any]], full: str) -> str:
    """IoU by frequency."""
    lines = ["| omega | IoU, % | init | rate | n |", "|---|---|---|---|---|"]
    lines += [
        f"| {each['omega']:g} | {shown(each)} | {each['init']} | {each['lr']:g} | {len(each['seeds'])} |"
        for each in records
    ]
    return "\n".join(lines)


def shown(record: dict[str, Any]) -> str:
    """Mean and spread."""
    return f"{record['iou']:.2f}" + ("" if record["sd"] is None else f" +- {record['sd']:.2f}")


def picture_strip(study: Study, records: list[dict[str, Any]], full: str, file: Path) -> None:
    """Figure 6: the true shape, then low-rank and sine at each rank, one above the other; seed 1."""
    problem, rows = study.problem(full), {"low-rank": [], "sine": []}
    for each in records:
        if each["mesh"] == full and each["kind"] in rows and each["rank"] in (1, 2, 5):
            arm = Arm(full, each["kind"], each["rank"])
            rows[each["kind"]].append(problem.picture(study.run(arm, each["init"], each["lr"], 1).model))
    truth = problem.picture(None)
    Image.fromarray(np.vstack([np.hstack([truth, *row]) for row in rows.values()])).save(file)


def omega_plot(study: Study, records: list[dict[str, Any]], full: str, file: Path) -> None:
    """Figure 9."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(5, 3.2), layout="constrained")
    x, y, sd = ([each[key] or 0 for each in records] for key in ("omega", "iou", "sd"))
    axes.errorbar(x, y, sd, marker="o", capsize=3)
    axes.set(xscale="log", xlabel="omega", ylabel="IoU, %", title=f"{full}, sine, k = 1", xticks=x)
    axes.set_xticklabels([f"{value:g}" for value in x])
    axes.minorticks_off()
    figure.savefig(file, dpi=150)
    plt.close(figure)


@dataclass(frozen=True)
class Stage:
    arms: Callable[..., Iterator[dict[str, Any]]]
    table: Callable[..., str]
    picture: Callable[..., None]


STAGES = {"ranks": Stage(ranks, rank_table, picture_strip), "omega": Stage(omegas, omega_table, omega_plot)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("meshes", type=Path)
    parser.add_argument("--stage", choices=(*STAGES, "all"), default="all")
    parser.add_argument("--full", default="lucy", help="the mesh of all ranks and of the sweep")
    parser.add_argument("--only", nargs="*", help="meshes by name; all of the folder unless given")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--points", type=int, default=2048)
    parser.add_argument("--resolution", type=int, default=128)
    parser.add_argument("--held-out", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--work", type=Path, default=Path("runs/occupancy"))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    arguments = parser.parse_args()
    meshes = sorted(path.stem for path in arguments.meshes.glob("*.npz"))
    meshes = [name for name in meshes if not arguments.only or name in arguments.only]
    if arguments.full not in meshes:
        parser.error(f"there is no {arguments.full}.npz in {arguments.meshes}, or --only leaves it out")
    meshes.sort(key=lambda name: name != arguments.full)
    arguments.out.mkdir(parents=True, exist_ok=True)
    study = Study(arguments)
    for name in STAGES if arguments.stage == "all" else [arguments.stage]:
        stage = STAGES[name]
        try:
            records = list(stage.arms(study, meshes, arguments.full))
        except UserError as error:
            raise SystemExit(f"error: {error}") from None
        counted = ("steps", "points", "resolution", "held_out", "seeds")
        settings = {key: getattr(arguments, key) for key in counted}
        about = {"settings": settings, "machine": machine(arguments.threads), "versions": versions()}
        write_json(arguments.out / f"{name}.json", {**about, "arms": records})
        table = stage.table(records, arguments.full)
        (arguments.out / f"{name}.md").write_text(f"{table}\n", encoding="utf-8")
        stage.picture(study, records, arguments.full, arguments.out / f"{name}.png")
        print(table)


if __name__ == "__main__":
    main()
