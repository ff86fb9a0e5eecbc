"""Photographs in coordinate networks: sine low-rank against plain low-rank weights at k = 1 and 5, and dense ones.

    python -m studies.images.run KODAK [--images kodim05 ...] [--seeds 3] [--steps 4000] [--threads 1] [--work FOLDER]
                                 [--inits-from FOLDER] [--compile]

KODAK is a folder with photographs of the Kodak set (kodim01.png and so on; all that are there unless --images names
some). Of each, 128 x 128 pixels out of the middle. The network is the paper's for shapes, 2 -> 256 -> 256 -> 256 -> 3
with Gaussian activations (s = 0.05), its two square linears factored. Every arm takes the same steps with the same
pixels in them; it runs at the best of two Kaiming inits and three learning rates (at the edge the grid grows, at most
twice), chosen on a seed of its own, and then with three other seeds. omega is the published one for shapes at the
rank, 200 and 50. With --inits-from each arm has the init that it had in a record there, of fewer steps, and is tuned
over learning rates alone: a third fewer fits.

What is finished is kept in FOLDER and used again: rerun it to continue. Each photograph's record, report and pictures
are copied beside this file, and summary.md has the table of all that are there.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

from nlr_lab.compare.report import estimate_text, p_text
from nlr_lab.fields.image import ImageSettings
from nlr_lab.fields.problem import FieldArm
from nlr_lab.fields.settings import FitConfig
from nlr_lab.recipes import get_recipe
from studies.study import (
    absolute,
    one_line_errors,
    run_study,
    score_text,
    study_parser,
    tuned_arms,
)

HERE = Path(__file__).parent
ARMS = ("dense", "low-rank:rank=1", "sine:rank=1,omega=200", "low-rank:rank=5", "sine:rank=5,omega=50")
RATES = (1e-3, 3e-3, 1e-2)


def study(photograph: Path, options: argparse.Namespace) -> None:
    """One photograph, all arms."""
    name, steps = photograph.stem, options.steps
    settings = f"--images {name} --seeds {options.seeds} --steps {steps}"
    if options.inits_from:
        arms = tuned_arms(options.inits_from / f"{name}.json", rates=False)
        settings += f" --inits-from {options.inits_from.name}"
    else:
        arms = [FieldArm.parse(text) for text in ARMS]
    config = FitConfig(
        steps=steps,
        eval_every=max(steps // 5, 1),
        save_every=500,
        threads=options.threads,
        device="cpu",
        compile=options.compile,
    )
    problem = ImageSettings(source=str(photograph), crop=128, points=1024)
    run_study(
        replace(get_recipe("image"), name="images", problem=problem, train=config),
        options.work / name,
        options.into,
        name,
        arms=arms,
        seeds=options.seeds,
        tune_lr=RATES,
        timing_rounds=0,
        max_extensions=2,
        command=f"python -m studies.images.run KODAK {settings}" + " --compile" * options.compile,
    )


def summary(into: Path) -> str:
    """The table of all photographs whose records are there."""
    records = [json.loads(path.read_text()) for path in sorted(into.glob("*.json"))]
    lines = [
        "PSNR in dB, mean +- standard deviation over seeds (n); the delta is sine minus low rank, paired by seed, with",
        "its 95 % interval. `late` is what the last fifth of the steps added, the most of any arm.",
        "",
        "| photograph | dense | k | low-rank | sine | delta | p (Holm) | late |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for record in records:
        arms = {arm["name"]: arm for arm in record["arms"]}
        late = max((arm["late_gain"] for arm in record["arms"] if arm["late_gain"] is not None), default=0.0)
        for other, pairs in record["against"].items():
            for name, pair in pairs.items():
                low, sine = arms[other], arms[name]
                scores = (score_text(arms["dense"]), sine["settings"]["rank"], score_text(low), score_text(sine))
                shown = (estimate_text(pair["delta"], "+.2f"), p_text(pair["p_holm"]), f"{late:+.2f}")
                lines.append("| " + " | ".join(map(str, (record["problem"], *scores, *shown))) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = study_parser(__doc__, "images", "kodak")
    parser.add_argument("--images", nargs="+", default=[])
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--into", type=Path, default=HERE, help="where records, reports and pictures are copied to")
    parser.add_argument("--inits-from", type=absolute, help="a folder with records of runs of fewer steps")
    parser.add_argument("--compile", action="store_true")
    arguments = parser.parse_args()
    photographs = [arguments.kodak / f"{name}.png" for name in arguments.images]
    photographs = photographs or sorted(arguments.kodak.glob("kodim*.png"))
    if not photographs:
        raise SystemExit(f"there is no kodim*.png in {arguments.kodak}")
    with one_line_errors():
        for each in photographs:
            study(each, arguments)
            (arguments.into / "summary.md").write_text(summary(arguments.into), encoding="utf-8")
    print(summary(arguments.into))


if __name__ == "__main__":
    main()
