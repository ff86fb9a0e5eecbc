"""The folder of a comparison: may it be used, and what is in it beside the runs.

    out/compare.json     the settings that every run in this folder shares, its arms, and the versions they ran under
    out/timing.json      seconds of the interleaved steps
    out/runs/<arm>/[steps-<n>/][<init>/]lr-<lr>/seed-<k>/      one run each, with its result.json
    out/results.json     the record      out/report.md and pictures   made from it

A folder is refused before anything in it is touched. The finished runs can be kept in one file of lines too, beside the
record: what a study resumes from elsewhere. Checkpoints and models are not in it, so a half-done run begins anew.

    {"marker": {...}}                                                         the settings that all runs share
    {"run": "runs/lora-r1/lr-0.001/seed-0/result.json", "content": {...}}     one finished run
"""

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nlr_lab.runtime.environment import machine, versions
from nlr_lab.runtime.storage import (
    FolderLock,
    clear_folder,
    disk_errors,
    holds_former,
    read_json,
    write_json,
    write_text,
)
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.hub.storage import is_inside

from .record import clean

MARKER, RESULTS, REPORT, TIMING, RESULT = "compare.json", "results.json", "report.md", "timing.json", "result.json"
SHORTENED = "steps-"
"""Prefix of the folder, under an arm's, of runs that were shortened for time; the number of steps follows."""


class Folder:
    """One comparison's folder.

    Args:
        path: new, empty, or an earlier comparison's.
        settings: that all runs share.
        arms: the settings of each arm.
        pictures: files that belong to it beside ours.
        kept: a file outside that keeps finished runs.
    """

    def __init__(
        self,
        path: Path,
        settings: Mapping[str, Any],
        arms: Mapping[str, Any],
        pictures: Sequence[str],
        kept: Path | None,
    ) -> None:
        self.path, self.marker, self.kept = path, path / MARKER, kept
        self.now: dict[str, Any] = clean({"settings": settings, "arms": arms})
        # The marker goes last: while it is there, the folder can still be continued or overwritten.
        self._ours = (TIMING, RESULTS, REPORT, *pictures, "runs", MARKER)
        self._kept_marker: dict[str, Any] = {}
        self._kept_runs: list[dict[str, Any]] = []

    def check(self, *, resume: bool, overwrite: bool) -> None:
        """Raise UserError for a folder or kept runs that cannot be resumed from or replaced; change nothing."""
        if self.kept is not None:
            self._read_kept(self.kept)
            fix = "use the former value, or move the file away to begin anew"
            self._check_same(f"for the runs in {self.kept}", self._kept_marker, fix)
        if holds_former(self.path, MARKER, "comparison", resume=resume, overwrite=overwrite):
            fix = "use the former value, another folder, or --overwrite"
            self._check_same(f"in {self.path}", read_json(self.marker, settings=dict, arms=dict), fix)

    def _check_same(self, where: str, former: Mapping[str, Any], fix: str) -> None:
        """Raise UserError that names the first setting, or part of an arm, that runs were made with otherwise.

        Where data lie (`...source`) is no difference: what they are, the fingerprint says.
        """
        if not former:
            return
        pairs = [("", former["settings"], self.now["settings"])]
        pairs += [(f" of arm {name!r}", former["arms"].get(name, arm), arm) for name, arm in self.now["arms"].items()]
        for of, before, after in pairs:
            for name in sorted({*before, *after}):
                old, new = before.get(name, "(absent)"), after.get(name, "(absent)")
                if old != new and not name.endswith("source"):
                    raise UserError(f"{name}{of} was {old!r} {where} and is {new!r} now; {fix}")

    def check_data(self, fingerprint: str) -> None:
        """Raise UserError for other data than the runs in the folder, or the kept ones, were made on."""
        if self._kept_marker and self._kept_marker.get("fingerprint") != fingerprint:
            raise UserError(f"the runs in {self.kept} are of other data; bring those back, or move the file away")
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
            arms = (read_json(self.marker).get("arms", {}) if self.marker.exists() else {}) | self.now["arms"]
            own = {"fingerprint": fingerprint, "arms": arms, "versions": self._sessions()}
            write_json(self.marker, clean(self.now | own))
        try:
            yield
        finally:
            lock.release()

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
        seen, notes = self._sessions(), []
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
        if record.get("arms") != self.now["arms"] or record.get("machine") != machine(threads):
            return None
        return record["times"] if all(len(series) >= rounds for series in record["times"].values()) else None

    def save_times(self, times: dict[str, list[float]], threads: int | None) -> None:
        """Keep step times for a later session, with what they are times of."""
        write_json(self.path / TIMING, {"arms": self.now["arms"], "machine": machine(threads), "times": times})

    # --- kept runs -------------------------------------------------------------------------------------------

    def _read_kept(self, file: Path) -> None:
        """Read the file; raise UserError where it is damaged, or its folder is missing."""
        if not file.parent.is_dir():
            raise UserError(f"there is no folder {file.parent} to keep the finished runs in; make it first")
        # What is no text is no JSON either.
        text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
        for number, each in enumerate(text.splitlines(), start=1):
            try:
                line = json.loads(each)
                if number == 1 and all(isinstance(line["marker"][name], dict) for name in ("settings", "arms")):
                    self._kept_marker = line["marker"]
                    continue
                # A path out of the folder would overwrite somebody's file.
                if not is_inside(line["run"]) or not line["run"].endswith(RESULT) or not line["content"]:
                    raise ValueError("no run of ours")
            except (ValueError, KeyError, TypeError, AttributeError):
                fix = "bring the file back or move it away"
                raise UserError(f"{file}, line {number} is not of a comparison; {fix}") from None
            self._kept_runs.append(line)

    def restore_runs(self) -> None:
        """Write kept runs that the folder lacks to it; its marker then names where they came from too."""
        missing = [line for line in self._kept_runs if not (self.path / line["run"]).exists()]
        if not missing:
            return
        with disk_errors(str(self.path)):
            self.path.mkdir(parents=True, exist_ok=True)
            own = read_json(self.marker) if self.marker.exists() else {}
            sessions = [*self._kept_marker["versions"], *own.get("versions", [])]
            distinct = [each for place, each in enumerate(sessions) if each not in sessions[:place]]
            joined = {"arms": self._kept_marker["arms"] | own.get("arms", {}), "versions": distinct}
            write_json(self.marker, {**self._kept_marker, **own, **joined})
            for line in missing:
                path = self.path / line["run"]
                path.parent.mkdir(parents=True, exist_ok=True)
                write_json(path, line["content"])

    def keep_runs(self) -> None:
        """Write the file of kept runs, if there is one, anew from the finished ones; it is whole at any moment."""
        if self.kept is None:
            return
        lines: list[dict[str, Any]] = [{"marker": read_json(self.marker)}]
        for path in sorted(self.path.glob(f"runs/**/{RESULT}")):
            # Data and versions are the same in every run, and kept by the marker or the record.
            content = {key: value for key, value in read_json(path).items() if key not in ("data", "versions")}
            lines.append({"run": path.relative_to(self.path).as_posix(), "content": content})
        write_text(self.kept, "".join(json.dumps(line) + "\n" for line in lines))


def record_text(results: Mapping[str, Any]) -> str:
    """Return a record as JSON, with each pair of a curve on one line."""
    return re.sub(r"\[\s+([^\s\[\]]+),\s+([^\s\[\]]+)\s+\]", r"[\1, \2]", json.dumps(results, indent=1)) + "\n"


def begun(run: Path) -> bool:
    """Return whether there is something to resume; a torn result is removed, so that the run can write it anew."""
    (run / RESULT).unlink(missing_ok=True)
    return run.exists() and any(run.iterdir())
