"""Run peft's own tests with each adapter of this library and with LoRA, and write or check the results.

    python tests/peers/run.py SDIST_FOLDER [--check [--only config]] [--peers sine-lora noble] [-n 2]

SDIST_FOLDER is peft's source distribution, unpacked, of the version that is installed; the wheel has no tests.
"""

import re
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import models
import peft
import reports

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


def run(folder: Path, peer: str, cache: Path, workers: str, suites: Sequence[str]) -> list[reports.Case]:
    """Run suites with one adapter."""
    environment = {"NLR_PEER": peer, "HF_HUB_CACHE": str(cache), "PYTHONPATH": str(HERE)}
    files = [f"tests/test_{suite}.py" for suite in suites]
    # One test downloads; one holds Llama 4 to 1e-6, which is not met on every processor (upstream: not under Windows).
    chosen = "not from_pretrained_cache_dir and not (test_disable_adapter and Llama4)"
    return reports.run(folder, workers, ["-p", "plugin", "-k", chosen, *files], environment)


def without_numbers(message: str) -> str:
    """Return a message that is the same on every machine and for every module."""
    return re.sub(r"\b\d+(\.\d+)?\b", "N", message)


def results(cases: list[reports.Case]) -> dict[str, Any]:
    """Return the counts of OUTCOMES by suite, how often what was refused, and the failed tests with their errors."""
    counts = {suite: Counter(dict.fromkeys(OUTCOMES, 0)) for suite in SUITES}
    refused: Counter[str] = Counter()
    failed = {}
    for case in cases:
        suite, message = case.group.split(".")[1].removeprefix("test_"), without_numbers(case.message)
        outcome = "refused" if message.startswith("refused: ") else case.outcome
        counts[suite][outcome] += 1
        if outcome == "refused":
            refused[message.removeprefix("refused: ")] += 1
        if outcome == "failed":
            failed[f"{suite}, {case.name}"] = message
    return {
        "counts": {suite: dict(count) for suite, count in counts.items()},
        "refused": dict(sorted(refused.items())),
        "failed": dict(sorted(failed.items())),
    }


def part(found: dict[str, Any], suites: Sequence[str]) -> dict[str, Any]:
    """Return, of an adapter's results, what is told of single suites."""
    failed = {test: message for test, message in found["failed"].items() if test.partition(",")[0] in suites}
    return {"counts": {suite: found["counts"][suite] for suite in suites}, "failed": failed}


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
    parser = reports.parser(__doc__)
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=PEERS)
    options = reports.parsed(parser, SUITES)
    suites = options.only or SUITES
    (options.folder / "tests" / "__init__.py").touch()  # its tests import each other relatively
    file = HERE / "results.json"
    known = reports.read(file)
    with tempfile.TemporaryDirectory() as name:
        models.write(Path(name))
        for peer in options.peers:
            found = results(run(options.folder, peer, Path(name), options.n, suites))
            counts = found["counts"].values()
            print(peer, {outcome: sum(each[outcome] for each in counts) for outcome in OUTCOMES})
            if options.only:
                reports.check(peer, part(found, suites), part(known[peer], suites), file)
            elif options.check:
                reports.check(peer, found, known.get(peer), file)
            known[peer] = found
    if not options.check:
        reports.write(known, file, HERE / "table.md", table({peer: known[peer] for peer in PEERS}))


if __name__ == "__main__":
    main()
