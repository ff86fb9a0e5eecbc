"""Run transformers' common tests on plain models and on their augmented twins, and write or check the results.

    python tests/peers/transformers_run.py SDIST_FOLDER [--check] [-n 2]

SDIST_FOLDER is transformers' source distribution, unpacked, of the version that is installed, with the package
`parameterized` beside its tests. The distribution has the tests common to all models, and not those of generation.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import transformers

HERE = Path(__file__).parent
OUTCOMES = ("passed", "failed", "skipped")


def run(folder: Path, workers: str, selected: str) -> ElementTree.Element:
    """Run the test cases of `transformers_suite.py` whose names match; return pytest's report."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)}
    # The suite was not written for errors of warnings.
    options = ["-o", "addopts=", "-o", "filterwarnings=", "--tb=no", "-q", "-n", workers, "-k", selected]
    with tempfile.TemporaryDirectory() as name:
        report = Path(name) / "report.xml"
        command = [sys.executable, "-m", "pytest", *options, f"--junitxml={report}", HERE / "transformers_suite.py"]
        log = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        if not report.exists() or log.returncode > 1:
            sys.exit(f"pytest did not finish:\n{log.stdout[-3000:]}{log.stderr[-3000:]}")
        return ElementTree.parse(report).getroot()


def outcomes(report: ElementTree.Element) -> dict[str, dict[str, tuple[str, str]]]:
    """Return, by test case and test, the outcome and the first line of its message."""
    found: dict[str, dict[str, tuple[str, str]]] = {}
    for test in report.iter("testcase"):
        element = next((each for each in test if each.tag in ("failure", "error", "skipped")), None)
        outcome = "passed" if element is None else "skipped" if element.tag == "skipped" else "failed"
        message = "" if element is None else element.get("message", "").partition("\n")[0]
        found.setdefault(test.get("classname", "").rpartition(".")[2], {})[test.get("name", "")] = (outcome, message)
    return {name: found[name] for name in sorted(found)}


def summary(found: dict[str, dict[str, tuple[str, str]]], known: dict[str, Any]) -> dict[str, Any]:
    """Return each case's counts and failures, and what the plain model passes: all of it, or what a twin does not."""
    result = {}
    for name, tests in found.items():
        count = Counter(outcome for outcome, _ in tests.values())
        passed = sorted(test for test, (outcome, _) in tests.items() if outcome == "passed")
        result[name] = {
            "counts": {outcome: count[outcome] for outcome in OUTCOMES},
            "failed": {test: message for test, (outcome, message) in sorted(tests.items()) if outcome == "failed"},
        }
        if name.endswith("_plain"):
            result[name]["passed"] = " ".join(passed)
    for name, each in result.items():
        control = f"{name.partition('_')[0]}_plain"
        if name != control:
            wanted = (result if control in result else known)[control]["passed"].split()
            others = {test: ": ".join(found[name].get(test, ("absent", ""))) for test in wanted}
            each["plain only"] = {test: what for test, what in others.items() if not what.startswith("passed")}
    return result


def table(results: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    rows = [(*name.split("_"), "/".join(map(str, each["counts"].values())), each) for name, each in results.items()]
    alone = [
        f"- {name}, {test}: {what}"
        for name, each in results.items()
        for test, what in each.get("plain only", {}).items()
    ]
    failed = [f"- {name}, {test}: {what}" for name, each in results.items() for test, what in each["failed"].items()]
    return "\n".join(
        [
            f"# transformers {transformers.__version__}'s common tests with augmented twins",
            "",
            f"{' / '.join(OUTCOMES)} of the tests of `ModelTesterMixin`, for plain models and for the classes that the "
            "Auto classes load once a model is augmented. Skipped: by the suite. Not here: the tests of generation and "
            "of exports, and the tests of single models, which the source distribution lacks. Written by `make peers`, "
            "checked by `make test-peers`.",
            "",
            "| family | method | tests | passed by the plain model only |",
            "|---|---|---|---|",
            *(
                f"| {family} | {method} | {count} | {len(each.get('plain only', ()))} |"
                for family, method, count, each in rows
            ),
            "",
            "## Passed by the plain model only",
            "",
            *(alone or ["None."]),
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
    parser.add_argument(
        "--check", action="store_true", help="run the twins, and compare with transformers_results.json"
    )
    parser.add_argument("-n", default="2", help="processes")
    options = parser.parse_args()
    file = HERE / "transformers_results.json"
    known = json.loads(file.read_text(encoding="utf-8")) if options.check else {}
    # Plain models, the control, run when the results are written.
    found = outcomes(run(options.folder, options.n, "not plain" if options.check else ""))
    results = summary(found, known)
    for name, each in results.items():
        print(name, each["counts"])
        if options.check and each != known.get(name):
            sys.exit(f"{name}: not the results of {file}, but\n{json.dumps(each, indent=1)}\n`make peers` writes them")
    if not options.check:
        file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        (HERE / "transformers.md").write_text(table(results), encoding="utf-8")


if __name__ == "__main__":
    main()
