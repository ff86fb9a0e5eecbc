"""Damaged files and settings, tens of thousands: everything that reads must take them or refuse them in words.

    python studies/faults/fuzz.py [--cases 2000] [--guided 5000] [--only "mesh .ply" ...]

Targets, examples and the damage are those of tests/helpers/fuzz_helpers.py. Each target runs in a process of its own,
first with random damage (--cases), then guided by coverage (--guided, libFuzzer by the package atheris: inputs that
reach new branches of this library are damaged further). A fault is any exception but UserError, a case of more than 20
CPU s, more than 512 MiB of memory kept, or a file written; the process may take --memory GiB. Results: fuzz.json and
fuzz.md beside this file, written after each target; finished targets are not repeated unless --only names them.
"""

import argparse
import base64
import json
import platform
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from random import Random

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "tests" / "helpers"))


def main() -> int:
    """Run what is missing; return 1 if there was a fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000, help="random cases of each target")
    parser.add_argument("--guided", type=int, default=5000, help="cases of each target guided by coverage")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--memory", type=int, default=8, help="GiB that a process may take")
    parser.add_argument("--seconds", type=int, default=600, help="of a target and a phase; it stops there")
    parser.add_argument("--only", nargs="+", help="repeat these targets")
    parser.add_argument("--inside", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        return inside(options, *options.inside)
    from fuzz_helpers import TARGETS

    names = [target.name for target in TARGETS]
    if unknown := set(options.only or ()) - set(names):
        parser.error(f"no target {unknown.pop()!r}; there are {', '.join(names)}")
    place = HERE / "fuzz.json"
    results = json.loads(place.read_text()) if place.exists() else {}
    for name in options.only or [each for each in names if each not in results]:
        results[name] = {phase: run(options, name, phase) for phase in ("random", "guided")}
        place.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n")
        (HERE / "fuzz.md").write_text(report(results, names))
        print(f"{name}: {results[name]}", flush=True)
    return 1 if any(phase["faults"] for each in results.values() for phase in each.values()) else 0


def run(options: argparse.Namespace, name: str, phase: str) -> dict:
    """One phase of one target, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--inside", name, phase, folder, "--seed", str(options.seed)]
        command += ["--cases", str(options.cases), "--guided", str(options.guided)]
        command += ["--memory", str(options.memory), "--seconds", str(options.seconds)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=2 * options.seconds + 120)
        place = Path(folder, "result.json")
        found = json.loads(place.read_text()) if place.exists() else {"cases": 0, "taken": 0, "faults": {}}
        if done.returncode and not found["faults"]:
            found["faults"] = {f"the process ended with {done.returncode}: {done.stderr[-500:]}": 1}
        if phase == "guided":
            covered = re.findall(r"cov: (\d+)", done.stderr)
            found["branches"] = [int(covered[0]), int(covered[-1])] if covered else None
        return found


def inside(options: argparse.Namespace, name: str, phase: str, folder: str) -> int:
    """The cases of one phase; its numbers go into result.json."""
    import torch
    import transformers

    if phase == "guided":
        import atheris

        # To the end: readers are imported when they are first called.
        atheris.instrument_imports(include=["nonlinear_lowrank"]).__enter__()
    import fuzz_helpers

    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    target = next(each for each in fuzz_helpers.TARGETS if each.name == name)
    place, random = Path(folder, "work"), Random(f"{options.seed} {name} {phase}")
    place.mkdir()
    examples = target.examples(place)
    for example in examples:  # what is imported on first use is not the case's time
        (place / target.file).write_bytes(example)
        target.read(place / target.file)
    resource.setrlimit(resource.RLIMIT_AS, (options.memory << 30, options.memory << 30))
    found: dict = {"cases": 0, "taken": 0, "faults": Counter(), "inputs": {}, "seconds": 0.0, "seed": options.seed}
    began = time.monotonic()

    def write() -> None:
        found["seconds"] = round(time.monotonic() - began, 1)
        Path(folder, "result.json").write_text(json.dumps(found))

    def one(data: bytes) -> None:
        found["cases"] += 1
        try:
            found["taken"] += fuzz_helpers.try_one(target, place, data)
        except fuzz_helpers.Fault as fault:
            name = re.sub(r"\d+", "#", str(fault))[:200]
            found["faults"][name] += 1
            found["inputs"].setdefault(name, base64.b64encode(data[:100_000]).decode())  # the first, to repeat it

    if phase == "random":
        while found["cases"] < options.cases and time.monotonic() - began < options.seconds:
            one(fuzz_helpers.damage(random.choice(examples), random))
        write()
        return 0

    corpus = Path(folder, "corpus")
    corpus.mkdir()
    for index, example in enumerate(examples):
        (corpus / str(index)).write_bytes(example)

    def counted(data: bytes) -> None:
        one(data)
        if found["cases"] % 100 == 0:
            write()

    def mutate(data: bytes, longest: int, seed: int) -> bytes:
        own = Random(seed)
        return (atheris.Mutate(data, longest) if own.random() < 0.3 else fuzz_helpers.damage(data, own))[:longest]

    arguments = [sys.argv[0], f"-runs={options.guided}", f"-max_total_time={options.seconds}", "-max_len=65536"]
    arguments += [f"-seed={options.seed + 1}", "-rss_limit_mb=0", str(corpus)]
    atheris.Setup(arguments, counted, custom_mutator=mutate)
    import atexit

    atexit.register(write)
    atheris.Fuzz()
    return 0


def report(results: dict, names: list[str]) -> str:
    """The table."""
    lines = [
        "| target | random cases | taken | faults | guided cases | branches reached, first and last | faults |",
        "|---|---|---|---|---|---|---|",
    ]
    total: Counter = Counter()
    for name in names:
        if name not in results:
            continue
        first, second = results[name]["random"], results[name]["guided"]
        counts = [sum(phase["faults"].values()) for phase in (first, second)]
        total.update(cases=first["cases"] + second["cases"], faults=sum(counts))
        reached = " to ".join(map(str, second["branches"])) if second.get("branches") else "-"
        lines.append(
            f"| {name} | {first['cases']:,} | {first['taken']:,} | {counts[0]} | {second['cases']:,} | {reached} | "
            f"{counts[1]} |"
        )
    about = ", ".join(f"{each} {version(each)}" for each in ("torch", "transformers", "numpy"))
    lines += ["", f"{total['cases']:,} cases, {total['faults']} faults. Python {platform.python_version()}, {about}."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
