"""Run transformers' common tests on plain models and on their augmented twins, and write or check the results.

    python tests/peers/transformers_run.py SDIST_FOLDER [--check [--only Llama_sine]] [-n 2]

SDIST_FOLDER is transformers' source distribution, unpacked, of the version that is installed, with the package
`parameterized` beside its tests. The distribution has the tests common to all models, and not those of generation.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import reports
import transformers

HERE = Path(__file__).parent
OUTCOMES = ("passed", "failed", "skipped")


def run(folder: Path, workers: str, selected: str) -> dict[str, dict[str, tuple[str, str]]]:
    """Run the test cases of `transformers_suite.py` whose names match; return outcome and message by case and test."""
    found: dict[str, dict[str, tuple[str, str]]] = {}
    arguments = ["-k", selected, HERE / "transformers_suite.py"]
    for case in reports.run(folder, workers, arguments, {"PYTHONPATH": str(folder)}):
        found.setdefault(case.group.rpartition(".")[2], {})[case.name] = (case.outcome, case.message)
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
    file = HERE / "transformers_results.json"
    known = reports.read(file)
    options = reports.parsed(reports.parser(__doc__), known)
    # Plain models, the control, run when the results are written.
    found = run(options.folder, options.n, " or ".join(options.only) or ("not plain" if options.check else ""))
    results = summary(found, known if options.check else {})
    for name, each in results.items():
        print(name, each["counts"])
        if options.check:
            reports.check(name, each, known.get(name), file)
    if not options.check:
        reports.write(results, file, HERE / "transformers.md", table(results))


if __name__ == "__main__":
    main()
