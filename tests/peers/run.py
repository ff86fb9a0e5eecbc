"""Run peft's own tests with each adapter of this library and with LoRA, and write or check the results.

    python tests/peers/run.py SDIST_FOLDER [--check] [--peers sine-lora noble] [-n 2]

SDIST_FOLDER is peft's source distribution, unpacked, of the version that is installed; the wheel has no tests.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import models
import peft

HERE = Path(__file__).parent
PEERS = ("lora", "sine-lora", "sine-dora", "noble", "nora", "nora++")
SUITES = (
    "custom_models",
    "decoder_models",
    "encoder_decoder_models",
    "feature_extraction_models",
    "seq_classifier",
    "target_parameters",
    "config",
)
OUTCOMES = ("passed", "failed", "refused", "skipped")


def run(folder: Path, peer: str, cache: Path, workers: str) -> ElementTree.Element:
    """Run the suites with one adapter; return pytest's report."""
    report = cache / f"{peer}.xml"
    environment = os.environ | {
        "NLR_PEER": peer,
        "HF_HUB_CACHE": str(cache),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(HERE),
    }
    # peft's settings make errors of warnings that newer versions of its dependencies give. One test downloads.
    options = ["-o", "addopts=", "-o", "filterwarnings=", "--tb=no", "-q", "-n", workers, "-p", "plugin"]
    files = [f"tests/test_{suite}.py" for suite in SUITES]
    command = [sys.executable, "-m", "pytest", *options, "-k", "not from_pretrained_cache_dir", f"--junitxml={report}"]
    log = subprocess.run([*command, *files], cwd=folder, env=environment, capture_output=True, text=True)
    if not report.exists():
        sys.exit(f"pytest did not finish for {peer}:\n{log.stdout[-3000:]}{log.stderr[-3000:]}")
    return ElementTree.parse(report).getroot()


def without_numbers(message: str) -> str:
    """Return a message that is the same on every machine and for every module."""
    return re.sub(r"\b\d+(\.\d+)?\b", "N", message)


def results(report: ElementTree.Element) -> dict[str, Any]:
    """Return the counts of OUTCOMES by suite, how often what was refused, and the failed tests with their errors."""
    counts = {suite: Counter(dict.fromkeys(OUTCOMES, 0)) for suite in SUITES}
    refused: Counter[str] = Counter()
    failed = {}
    for case in report.iter("testcase"):
        found = next((each for each in case if each.tag in ("failure", "error", "skipped")), None)
        message = "" if found is None else found.get("message", "")
        outcome = "passed" if found is None else "skipped" if found.tag == "skipped" else "failed"
        if message.startswith("refused: "):
            outcome = "refused"
            refused[without_numbers(message.removeprefix("refused: "))] += 1
        suite = case.get("classname", "").split(".")[1].removeprefix("test_")
        counts[suite][outcome] += 1
        if outcome == "failed":
            failed[f"{suite}, {case.get('name')}"] = without_numbers(message.partition("\n")[0])
    return {
        "counts": {suite: dict(count) for suite, count in counts.items()},
        "refused": dict(sorted(refused.items())),
        "failed": dict(sorted(failed.items())),
    }


def table(found: dict[str, Any]) -> str:
    """Return results by adapter as Markdown."""
    rows = [[suite, *("/".join(map(str, found[peer]["counts"][suite].values())) for peer in found)] for suite in SUITES]
    refused = [f"- {peer}, {count}: {what}" for peer in found for what, count in found[peer]["refused"].items()]
    failed = [f"- {peer}, {test}: {what}" for peer in found for test, what in found[peer]["failed"].items()]
    return "\n".join(
        [
            f"# peft {peft.__version__}'s tests with each adapter",
            "",
            f"{' / '.join(OUTCOMES)}. Refused: this library's one-line error, listed below. Skipped: by the suite. "
            "Written by `make peers`, checked by `make test-peers`.",
            "",
            f"| tests | {' | '.join(found)} |",
            "|---" * (len(found) + 1) + "|",
            *(f"| {' | '.join(row)} |" for row in rows),
            "",
            "## Refused",
            "",
            *refused,
            "",
            "## Failed",
            "",
            *(failed or ["None."]),
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--check", action="store_true", help="compare with results.json instead of writing it")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=PEERS)
    parser.add_argument("-n", default="2", help="processes")
    options = parser.parse_args()
    (options.folder / "tests" / "__init__.py").touch()  # its tests import each other relatively
    file = HERE / "results.json"
    known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    with tempfile.TemporaryDirectory() as name:
        cache = Path(name)
        models.write(cache)
        for peer in options.peers:
            found = results(run(options.folder, peer, cache, options.n))
            print(peer, {outcome: sum(each[outcome] for each in found["counts"].values()) for outcome in OUTCOMES})
            if options.check and found != known.get(peer):
                sys.exit(
                    f"{peer}: not the results of {file}, but\n{json.dumps(found, indent=1)}\n`make peers` writes them"
                )
            known[peer] = found
    if not options.check:
        file.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
        (HERE / "table.md").write_text(table({peer: known[peer] for peer in PEERS}), encoding="utf-8")


if __name__ == "__main__":
    main()
