"""The folder of a comparison: may it be used, and what is in it beside the runs.

    out/compare.json     the settings that every run in this folder shares, its arms, and the versions they ran under
    out/timing.json      seconds of the interleaved steps
    out/runs/<arm>/[steps-<n>/][<init>/]lr-<lr>/seed-<k>/      one run each, with its result.json
    out/results.json     the record      out/report.md and pictures   made from it

A folder is refused before anything in it is touched.
"""

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nlr_lab.runtime.environment import machine, versions
from nlr_lab.runtime.storage import FolderLock, clear_folder, disk_errors, holds_former, read_json, write_json
from nonlinear_lowrank.errors import UserError

from .kept_runs import KeptRuns
from .plan import Plan
from .record import clean

MARKER, RESULTS, REPORT, TIMING = "compare.json", "results.json", "report.md", "timing.json"
SHORTENED = "steps-"
"""How the folder begins, under an arm's, of runs that were shortened for time; the number of steps follows."""


class Folder:
    """One comparison's folder.

    Args:
        path: new, empty, or an earlier comparison's.
        plan: what is to be compared in it.
        pictures: files that belong to it beside ours.
        kept_runs: a file outside that keeps finished runs.
    """

    def __init__(self, path: Path, plan: Plan, pictures: Sequence[str], kept_runs: Path | None) -> None:
        self.path, self.plan, self.marker = path, plan, path / MARKER
        # The marker goes last: while it is there, the folder can still be continued or overwritten.
        self._ours = (TIMING, RESULTS, REPORT, *pictures, "runs", MARKER)
        self.kept = None if kept_runs is None else KeptRuns(kept_runs, path)

    def check(self, *, resume: bool, overwrite: bool) -> None:
        """Raise UserError for a folder or kept runs that cannot be resumed from or replaced; change nothing."""
        if self.kept is not None:
            self.kept.read()
            fix = "use the former value, or move the file away to begin anew"
            self._check_same(f"for the runs in {self.kept.file}", self.kept.marker, fix)
        if holds_former(self.path, MARKER, "comparison", resume=resume, overwrite=overwrite):
            fix = "use the former value, another folder, or --overwrite"
            self._check_same(f"in {self.path}", read_json(self.marker, settings=dict, arms=dict), fix)

    def _check_same(self, where: str, former: Mapping[str, Any], fix: str) -> None:
        """Raise UserError that names the first setting, or part of an arm, that runs were made with otherwise.

        Where data lie (`...source`) is no difference: what they are, the fingerprint says.
        """
        if not former:
            return
        now = clean({"settings": self.plan.settings, "arms": self.plan.arm_settings})
        pairs = [("", former["settings"], now["settings"])]
        pairs += [(f" of arm {name!r}", former["arms"].get(name, arm), arm) for name, arm in now["arms"].items()]
        for of, before, after in pairs:
            for name in sorted({*before, *after}):
                old, new = before.get(name, "(absent)"), after.get(name, "(absent)")
                if old != new and not name.endswith("source"):
                    raise UserError(f"{name}{of} was {old!r} {where} and is {new!r} now; {fix}")

    def check_data(self, fingerprint: str) -> None:
        """Raise UserError for other data than the runs in the folder, or the kept ones, were made on."""
        if self.kept is not None and self.kept.marker and self.kept.marker.get("fingerprint") != fingerprint:
            raise UserError(f"the runs in {self.kept.file} are of other data; bring those back, or move the file away")
        if self.marker.exists() and read_json(self.marker).get("fingerprint") != fingerprint:
            raise UserError(f"the runs in {self.path} are of other data; bring it back or use another folder")

    @contextlib.contextmanager
    def opened(self, fingerprint: str, *, overwrite: bool) -> Iterator[None]:
        """Hold the folder; with `overwrite` first delete what a former comparison wrote.

        Raises:
            UserError: it cannot be written, or another process compares in it.
        """
        with disk_errors(str(self.path)):
            self.path.mkdir(parents=True, exist_ok=True)
            lock = FolderLock(self.path)
            if overwrite:
                clear_folder(self.path, *self._ours)
            former = read_json(self.marker) if self.marker.exists() else {}
            about = {"settings": self.plan.settings, "fingerprint": fingerprint}
            arms = former.get("arms", {}) | self.plan.arm_settings
            write_json(self.marker, clean({**about, "arms": arms, "versions": self._sessions()}))
        try:
            yield
        finally:
            lock.release()

    def keep_runs(self) -> None:
        """Write the file of kept runs anew, if there is one."""
        if self.kept is not None:
            self.kept.collect(self.marker)

    def restore_runs(self) -> None:
        """Put the kept runs that the folder lacks into it."""
        if self.kept is not None:
            self.kept.restore(self.marker)

    def lengths(self) -> list[int]:
        """Return to how many steps runs were shortened, longest first."""
        found = {path.name.removeprefix(SHORTENED) for path in self.path.glob(f"runs/*/{SHORTENED}*")}
        return sorted((int(each) for each in found if each.isdecimal()), reverse=True)

    def _sessions(self) -> list[dict[str, str]]:
        """The versions and processors that the runs were made under, this session's last."""
        now = {**versions(), "processor": str(machine()["processor"])}
        before = read_json(self.marker)["versions"] if self.marker.exists() else []
        return [session for session in before if session != now] + [now]

    def version_notes(self) -> list[str]:
        """Return a sentence for each package whose version changed between sessions, and for the processor."""
        seen = self._sessions()
        notes = []
        for name in sorted({name for session in seen for name in session}):
            found = list(dict.fromkeys(session.get(name, "absent") for session in seen))
            how = "by several processors" if name == "processor" else f"under several versions of {name}"
            if len(found) > 1:
                notes.append(f"Runs of this folder were made {how}: {', '.join(found)}.")
        return notes

    def load_times(self, rounds: int, threads: int | None) -> dict[str, list[float]] | None:
        """Return step times of an earlier session, if they are of these arms on this kind of machine."""
        if not (self.path / TIMING).exists() or rounds == 0:
            return None
        record = read_json(self.path / TIMING)
        if record.get("arms") != clean(self.plan.arm_settings) or record.get("machine") != machine(threads):
            return None
        times = record["times"]
        return times if all(len(series) >= rounds for series in times.values()) else None

    def save_times(self, times: dict[str, list[float]], threads: int | None) -> None:
        """Keep step times for a later session, with what they are times of."""
        arms = clean(self.plan.arm_settings)
        write_json(self.path / TIMING, {"arms": arms, "machine": machine(threads), "times": times})


def record_text(results: Mapping[str, Any]) -> str:
    """Return a record as JSON, with each pair of a curve on one line."""
    return re.sub(r"\[\s+([^\s\[\]]+),\s+([^\s\[\]]+)\s+\]", r"[\1, \2]", json.dumps(results, indent=1)) + "\n"
