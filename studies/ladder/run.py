"""A ladder of sizes on English novels: does a lead at one width last at the next?

    python -m studies.ladder.run DATA [--stage first|second|third|all|fourth|top|lengths|longest] [--seeds 3]
                                 [--arms ARM ...] [--workers 2] [--work FOLDER]

DATA holds ELTeC's English novels as `train.txt.xz` and `valid.txt.xz`. Every stage continues where it was interrupted,
and all of them share one folder: what smaller rungs predict is written there before a larger one is run. What the
folder has is copied beside this file: results.json, ladder.png, and runs.tar.xz, the finished runs without weights,
which a new folder begins with. Stages, in this order:

    first     widths 32 and 48, 20 tokens a parameter: plain, wide, NOBLE, NOBLE with Muon, CoLA; learning rates tuned
    second    width 64: the arms of `first`
    third     width 96: the arms of `first`
    all       widths 32, 48, 64 and 96, all arms
    fourth    width 128: the arms of `first`
    top       width 192: plain, wide, NOBLE; --seeds 2
    lengths   width 64 at 5 tokens a parameter: the arms of `first`
    longest   width 64 at 80: the same

The settings are those of `nlr scale --scale small` (docs/scale.md).
"""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from nlr_lab.compare.record import RESULTS
from nlr_lab.runtime.storage import read_json, write_json
from nlr_lab.scale.ladder import ARMS, SCALES
from nlr_lab.scale.record import EVIDENCE, evidence
from nlr_lab.scale.report import PICTURE
from nlr_lab.scale.run import run_ladder
from studies.study import kept_runs, one_line_errors, study_parser

HERE = Path(__file__).parent
BY_NAME = {arm.rpartition("name=")[2]: arm for arm in ARMS}
FEW = tuple(BY_NAME[name] for name in ("plain", "wide", "noble", "noble-muon", "cola"))
STAGES: dict[str, dict[str, Any]] = {
    "first": {"widths": (32, 48), "arms": FEW, "next_width": 64},
    "second": {"widths": (64,), "arms": FEW, "next_width": 96},
    "third": {"widths": (96,), "arms": FEW, "next_width": 128},
    "all": {"widths": (32, 48, 64, 96)},
    "fourth": {"widths": (128,), "arms": FEW},
    "top": {"widths": (192,), "arms": FEW[:3]},
    "lengths": {"widths": (64,), "tokens": (5.0,), "arms": FEW},
    "longest": {"widths": (64,), "tokens": (80.0,), "arms": FEW},
}


def main() -> None:
    parser = study_parser(__doc__, "ladder", "data")
    parser.add_argument("--stage", choices=STAGES, default="first")
    parser.add_argument("--workers", type=int, help="runs side by side")
    parser.add_argument("--arms", nargs="+", choices=BY_NAME, help="others than the stage's, plain first")
    given = parser.parse_args()
    stage = dict(STAGES[given.stage])
    if given.arms:
        stage["arms"] = tuple(BY_NAME[name] for name in given.arms)
    small = SCALES["small"]
    files = {
        name: str(given.data / f"{part}.txt.xz") for name, part in (("source", "train"), ("valid_source", "valid"))
    }
    own = {"text": replace(small.text, **files), "seeds": given.seeds, "threads": given.threads}
    with one_line_errors(given.stage), kept_runs(HERE, given.work):
        command = f"python -m studies.ladder.run DATA --stage {given.stage} --seeds {given.seeds}"
        if given.arms:
            command += f" --arms {' '.join(given.arms)}"
        run_ladder(replace(small, **own, **stage), given.work, workers=given.workers, command=command)
    for name in (RESULTS, PICTURE):
        if (given.work / name).exists():
            shutil.copyfile(given.work / name, HERE / name)
    write_json(EVIDENCE, evidence(read_json(HERE / RESULTS)))


if __name__ == "__main__":
    main()
