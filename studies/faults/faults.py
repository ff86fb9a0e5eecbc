"""Runs that are killed, starved and lied to: how many end as documented, and with the same bits.

    python studies/faults/faults.py [--only kill-adamw ...] [--kills 30] [--seed 0]

Every fault happens to a small run of its own (two layers of width 32, on a CPU), which is then resumed to its end
without the fault; it is survived if only documented messages appeared, the checkpoints from before are whole, and the
final weights equal, bit by bit, those of an undisturbed run. Counts go into faults.json and faults.md
beside this file after each kind; finished kinds are not repeated unless --only names them.
"""

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from random import Random

HERE = Path(__file__).resolve().parent
TESTS = HERE.parents[1] / "tests"
sys.path[:0] = [str(TESTS / "helpers"), str(TESTS / "lab" / "training")]

from nlr_lab.runtime.storage import newest_valid, step_folders  # noqa: E402
from training_helpers import TrainingServer  # noqa: E402

SHORT = {"steps": 12, "save_every": 1, "gradient_accumulation": 2, "eval_every": 5}
KILLED = {
    "adamw": {"arm": "noble:rank=4"},
    "muon": {"arm": "noble:rank=4,depth=1,activation=gelu", "optimizer": "muon"},
    "bf16-workers": {"arm": "noble:rank=4", "bf16": True, "dataloader_workers": 1},
}
Outcome = str | None
"""Reason why it was not survived."""


class Bench:
    """Runs, in processes that can be killed, in a folder that goes away."""

    def __init__(self, folder: Path, random: Random) -> None:
        self.folder, self.random, self._number = folder, random, 0
        self.server = TrainingServer()
        self._whole: dict[str, Path] = {}

    def new(self) -> Path:
        """A folder for a run."""
        self._number += 1
        return self.folder / f"run-{self._number}"

    def whole(self, **settings: object) -> Path:
        """A run to which nothing happens, made once for its settings."""
        key = json.dumps(settings, sort_keys=True)
        if key not in self._whole:
            self._whole[key] = self.folder / f"whole-{len(self._whole)}"
            answer = self.server.run(self._whole[key], **settings)
            assert answer == {"exit": 0, "error": ""}, answer
        return self._whole[key]

    def ends_the_same(self, out: Path, whole: Path, **settings: object) -> Outcome:
        """Resume it to its end."""
        answer = self.server.run(out, **settings)
        if answer != {"exit": 0, "error": ""}:
            return f"does not go on: {answer}"
        files = sorted(each.relative_to(whole) for each in (whole / "model").rglob("*") if each.is_file())
        different = [str(each) for each in files if (whole / each).read_bytes() != (out / each).read_bytes()]
        shutil.rmtree(out)
        return f"other bits in {different}" if different else None


def kill(settings: dict, sent: signal.Signals = signal.SIGKILL) -> Callable[[Bench, int], Outcome]:
    """A signal: while a checkpoint is written, right after one, or anywhere."""

    def one(bench: Bench, number: int) -> Outcome:
        whole, out = bench.whole(**settings), bench.new()
        folder = out / "checkpoints"
        while True:  # a run that was over before is not counted
            shutil.rmtree(out, ignore_errors=True)
            bench.server.start(out, **settings)
            step = bench.random.randint(1, settings["steps"] - 1)
            if settings["save_every"] > 1:  # the signal's own checkpoint is the only one
                moment, delay = folder.parent.exists, bench.random.uniform(0, 1.5)
            elif number % 3 == 0:
                file = bench.random.choice(
                    ("model.safetensors", "optimizer/shard-00001-model-00001-of-00001.safetensors", "state.json")
                )
                moment, delay = (folder / f".tmp-step-{step:06d}" / file).exists, bench.random.uniform(0, 0.002)
            elif number % 3 == 1:
                moment, delay = (folder / f"step-{step:06d}").exists, bench.random.uniform(0, 0.02)
            else:
                moment, delay = folder.parent.exists, bench.random.uniform(0, 1.5)
            killed = bench.server.kill_when(moment, delay, sent)
            if killed:
                return bench.ends_the_same(out, whole, **settings)

    return one


def no_space(bench: Bench, number: int) -> Outcome:
    """A file may have so many bytes, as on a disk that fills up while it is written."""
    whole, out = bench.whole(**SHORT), bench.new()
    limit = bench.random.randint(2_000, 200_000)
    answer = bench.server.run(out, **SHORT, limit=limit)
    if answer["exit"] == 0:  # everything fitted
        return bench.ends_the_same(out, whole, **SHORT)
    if answer["exit"] != 2 or "no space left" not in answer["error"]:
        return f"with {limit} bytes: {answer}"
    _, damaged = newest_valid(out / "checkpoints")
    return f"damaged: {damaged}" if damaged else bench.ends_the_same(out, whole, **SHORT)


def read_only(bench: Bench, number: int) -> Outcome:
    """A place that cannot be written to, also for the superuser: below a file, and in the kernel's own folders."""
    for place in ("/proc/run", "/dev/null/run", "/sys/run"):
        answer = bench.server.run(Path(place), **SHORT)
        if answer["exit"] != 2 or place not in answer["error"]:
            return f"{place}: {answer}"
    return None


def clock(bench: Bench, number: int) -> Outcome:
    """The time of day jumps by up to 400 days, back and on, at every look."""
    settings = {**SHORT, "arm": "training_helpers:jump_clock", "seed": number}
    whole, out = bench.whole(**settings), bench.new()
    if (answer := bench.server.run(out, fault=True, **settings)) != {"exit": 0, "error": ""}:
        return f"{answer}"
    return bench.ends_the_same(out, whole, **settings)  # already finished: it must only stay untouched


def not_a_number(what: str) -> Callable[[Bench, int], Outcome]:
    """It stops, names the step, and no checkpoint holds such a weight."""

    def one(bench: Bench, number: int) -> Outcome:
        out, at = bench.new(), bench.random.randint(2, 11)
        settings = {**SHORT, "gradient_accumulation": 1, "arm": f"training_helpers:{what},at={at}"}
        answer = bench.server.run(out, **settings)
        newest, damaged = newest_valid(out / "checkpoints")
        if answer["exit"] != 2 or f"at step {at}" not in answer["error"] or damaged:
            return f"at {at}: {answer}, {damaged}"
        if newest is None or newest.name != f"step-{at - 1:06d}" or max(step_folders(out / "checkpoints")) != at - 1:
            return f"at {at}: the last checkpoint is {newest}"
        return None

    return one


def reader(bench: Bench, number: int) -> Outcome:
    """The data-loading process is killed: the run says so, and resumes from its checkpoint."""
    at = bench.random.randint(1, 11)
    settings = {**SHORT, "dataloader_workers": 1, "arm": f"training_helpers:lose_reader,at={at}"}
    whole, out = bench.whole(**settings), bench.new()
    answer = bench.server.run(out, fault=True, **settings)
    if answer["exit"] != 2 or "data-loading process died" not in answer["error"]:
        return f"at {at}: {answer}"
    _, damaged = newest_valid(out / "checkpoints")
    return f"damaged: {damaged}" if damaged else bench.ends_the_same(out, whole, **settings)


def rank(bench: Bench, number: int) -> Outcome:
    """One of two processes is killed; torchrun starts both again from the last checkpoint."""
    import test_distributed

    at = bench.random.randint(4, 11)
    script = bench.folder / f"rank-{number}.py"
    script.write_text(test_distributed.ELASTIC.replace("at=7", f"at={at}"))
    weights = {}
    for name, dies in (("die", "1"), ("live", "")):
        out = bench.folder / f"rank-{number}-{name}"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += ["--max-restarts", "1", str(script), str(out)]
        environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS / "helpers"), "NLR_TEST_DIES": dies}
        environment |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        done = subprocess.run(
            command, env={**os.environ, **environment}, capture_output=True, text=True, check=False, timeout=900
        )
        if done.returncode:
            return f"at {at}, {name}: {done.stderr[-300:]}"
        if (out / "restarts").read_text() != ("1" if dies else "0"):
            return f"at {at}, {name}: was not started again"
        weights[name] = (out / "model" / "model.safetensors").read_bytes()
    return None if weights["die"] == weights["live"] else f"at {at}: other bits"


KINDS: dict[str, tuple[Callable[[Bench, int], Outcome], int, str]] = {
    **{
        f"kill-{name}": (kill({**SHORT, **settings}), 0, f"SIGKILL at a random moment, {name}")
        for name, settings in KILLED.items()
    },
    **{
        name.lower(): (kill({**SHORT, "save_every": 12}, signal.Signals[name]), 0, f"{name} at a random moment")
        for name in ("SIGTERM", "SIGINT")
    },
    "rank": (rank, 5, "one of two processes killed under torchrun, `--max-restarts 1`"),
    "no-space": (no_space, 20, "no space left, at a random byte of a random file"),
    "read-only": (read_only, 1, "folders that cannot be written to (three)"),
    "clock": (clock, 5, "the clock jumps by up to 400 days at every look"),
    "nan-loss": (not_a_number("poison"), 10, "a loss that is no number, at a random step"),
    "nan-gradient": (not_a_number("poison_gradient"), 10, "a gradient that is no number, its loss being one"),
    "reader": (reader, 10, "the process that reads data killed at a random step"),
}


def main() -> int:
    """Do what is missing; return 1 if something was not survived."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30, help="signals of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=KINDS, help="repeat these kinds")
    options = parser.parse_args()
    place = HERE / "faults.json"
    results = json.loads(place.read_text()) if place.exists() else {}
    for name in options.only or [each for each in KINDS if each not in results]:
        one, count, what = KINDS[name]
        began, failures = time.monotonic(), []
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(Path(folder), Random(f"{options.seed} {name}"))
            for number in range(count or options.kills):
                if (why := one(bench, number)) is not None:
                    failures.append(why)
                    print(f"{name} {number}: {why}", flush=True)
        results[name] = {
            "what": what,
            "tried": count or options.kills,
            "failures": failures,
            "seed": options.seed,
            "minutes": round((time.monotonic() - began) / 60, 1),
        }
        place.write_text(json.dumps(results, indent=1) + "\n")
        (HERE / "faults.md").write_text(report(results))
        print(f"{name}: {results[name]['tried'] - len(failures)} of {results[name]['tried']}", flush=True)
    return 1 if any(each["failures"] for each in results.values()) else 0


def report(results: dict) -> str:
    """The table."""
    lines = ["| fault | ended as documented, of tried |", "|---|---|"]
    for name in KINDS:
        if name in results:
            found = results[name]
            lines.append(f"| {found['what']} | {found['tried'] - len(found['failures'])} of {found['tried']} |")
    lines += [f"- {name}: {why}" for name, found in results.items() for why in found["failures"]]
    lines += ["", f"Python {platform.python_version()}, torch {version('torch')}, {platform.system()}, CPU."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
