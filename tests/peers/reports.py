"""Runs of pytest over other people's tests, and results that are written, or compared with those that were."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree


class Case(NamedTuple):
    """A test that was run."""

    group: str
    """Dotted name of its class or module."""
    name: str
    outcome: str
    """passed, failed or skipped."""
    message: str


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return the options of a script with this docstring."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("folder", type=Path)
    made.add_argument("--check", action="store_true", help="compare with the results that are here, write nothing")
    made.add_argument("--only", nargs="+", default=[], help="check these suites or test cases")
    made.add_argument("-n", default="2", help="processes")
    return made


def parsed(made: argparse.ArgumentParser, names: Collection[str]) -> argparse.Namespace:
    """Return the options of the command line; --only must be of these names."""
    options = made.parse_args()
    if unknown := {*options.only} - {*names}:
        made.error(f"--only must be of {', '.join(names)}, got {', '.join(sorted(unknown))}")
    if options.only and not options.check:
        made.error("--only needs --check: results are written whole")
    return options


def run(folder: Path, workers: str, arguments: Iterable[str | Path], environment: Mapping[str, str]) -> list[Case]:
    """Run pytest in a folder; end the script where it does not come to its end."""
    # Suites are not written for errors of warnings, which newer versions of their dependencies give.
    options = ["-o", "addopts=", "-o", "filterwarnings=", "--tb=short", "-q", "--disable-warnings", "-n", workers]
    whole = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"} | dict(environment)
    with tempfile.TemporaryDirectory() as name:
        report = Path(name) / "report.xml"
        command = [sys.executable, "-m", "pytest", *options, f"--junitxml={report}", *arguments]
        log = subprocess.run(command, cwd=folder, env=whole, capture_output=True, text=True)
        if log.returncode > 1 or not report.exists():
            sys.exit(f"pytest did not finish:\n{log.stdout[-3000:]}{log.stderr[-3000:]}")
        if log.returncode:
            print(log.stdout[-10000:])
        return [_case(each) for each in ElementTree.parse(report).getroot().iter("testcase")]


def _case(element: ElementTree.Element) -> Case:
    found = next((each for each in element if each.tag in ("failure", "error", "skipped")), None)
    outcome = "passed" if found is None else "skipped" if found.tag == "skipped" else "failed"
    message = "" if found is None else found.get("message", "")
    return Case(element.get("classname", ""), element.get("name", ""), outcome, message.partition("\n")[0])


def read(file: Path) -> dict[str, Any]:
    """Return the results in a file, none where there is no file."""
    known: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return known


def check(name: str, found: Any, known: Any, file: Path) -> None:
    """End the script where results are not those known from the file."""
    if found != known:
        sys.exit(f"{name}: not the results of {file}, but\n{json.dumps(found, indent=1)}\n`make peers` writes them")


def write(found: Mapping[str, Any], file: Path, page: Path, text: str) -> None:
    """Write results, and the page that shows them."""
    file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    page.write_text(text, encoding="utf-8")
