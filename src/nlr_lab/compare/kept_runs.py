"""The finished runs of a comparison in one file of lines, beside its record: what a study goes on from elsewhere.

    {"marker": "compare.json", "content": {...}}                              the settings that all runs share
    {"run": "runs/lora-r1/lr-0.001/seed-0/result.json", "content": {...}}     one finished run

Checkpoints and models are not in it, so a run that was half done begins anew.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nlr_lab.runtime.storage import read_json, write_json
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.hub.storage import describe_disk_error, is_inside

from .folder import check_same, listed_sessions, write_text

# Of a run's result: the same in every run, and kept by the marker or the record.
_SHARED = {"data", "versions"}
_RESULTS = ("result.json", "diverged.json")


class KeptRuns:
    """The runs of one folder, and the file that keeps them.

    Args:
        file: the file of lines; its folder exists.
        out: the comparison's folder.
        marker: the name of the file in `out` with the settings that its runs share.
    """

    def __init__(self, file: Path, out: Path, marker: str) -> None:
        self.file, self.out, self.marker = file, out, marker
        self._lines: list[dict[str, Any]] = []
        self._kept: dict[str, Any] = {}  # the marker among the lines

    def check(
        self, settings: Mapping[str, Any], arms: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
    ) -> None:
        """Refuses a file that cannot be gone on with; to be called before the work of preparing data.

        Args:
            settings: what all runs of the comparison share, flat.
            arms: what each arm is, by name.
            defaults: what the file means where it is older than a setting.

        Raises:
            UserError: the file is damaged or its folder is missing, or its runs have other settings.
        """
        if not self.file.parent.is_dir():
            raise UserError(f"there is no folder {self.file.parent} to keep the finished runs in; make it first")
        self._lines = list(self._read()) if self.file.exists() else []
        if not self._lines:
            return
        kept = next((line["content"] for line in self._lines if line.get("marker") == self.marker), None)
        if kept is None or not all(isinstance(kept.get(name), dict) for name in ("settings", "arms")):
            raise UserError(f"{self.file} does not say what its runs are of; move it away to begin anew")
        now = json.loads(json.dumps({"settings": settings, "arms": arms}))  # tuples are lists in the file
        mend = "use the former value, or move the file away to begin anew"
        check_same(f"for the runs in {self.file}", kept, now["settings"], now["arms"], mend, defaults)
        self._kept = kept

    def restore(self, fingerprint: str) -> None:
        """Writes to the folder, which may be gone on with, those of the checked runs that it lacks.

        Args:
            fingerprint: of the prepared data.

        Raises:
            UserError: the runs are of other data, or the folder cannot be written. In the first case nothing has been.
        """
        if not self._lines:
            return
        if self._kept.get("fingerprint") != fingerprint:
            raise UserError(f"the runs in {self.file} are of other data; bring those back, or move the file away")
        missing = [line for line in self._lines if "run" in line and not (self.out / line["run"]).exists()]
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            if not (self.out / self.marker).exists():
                write_json(self.out / self.marker, self._kept)
            elif missing:
                write_json(self.out / self.marker, self._joined(read_json(self.out / self.marker)))
            for line in missing:
                path = self.out / line["run"]
                path.parent.mkdir(parents=True, exist_ok=True)
                write_json(path, line["content"])
        except OSError as error:
            raise UserError(f"cannot write to {self.out}: {describe_disk_error(error)}") from error

    def _joined(self, marker: dict[str, Any]) -> dict[str, Any]:
        """A folder's marker that tells where the kept runs came from too."""
        before, own = listed_sessions(self._kept), listed_sessions(marker)
        known = {"versions": before + [each for each in own if each not in before]}
        return marker | known | {"arms": self._kept["arms"] | marker.get("arms", {})}

    def collect(self) -> None:
        """Writes the file anew from the finished runs of the folder; it is whole at any moment."""
        found = sorted(path for name in _RESULTS for path in self.out.glob(f"runs/**/{name}"))
        lines: list[dict[str, Any]] = [{"marker": self.marker, "content": read_json(self.out / self.marker)}]
        for path in found:
            content = {key: value for key, value in read_json(path).items() if key not in _SHARED}
            lines.append({"run": path.relative_to(self.out).as_posix(), "content": content})
        write_text(self.file, "".join(json.dumps(line) + "\n" for line in lines))

    def _read(self) -> Iterator[dict[str, Any]]:
        text = self.file.read_text(encoding="utf-8", errors="replace")  # what is no text is no JSON either
        for number, each in enumerate(text.splitlines(), start=1):
            fault = f"{self.file}, line {number} is no run of a comparison; bring the file back or move it away"
            try:
                line = json.loads(each)
            except ValueError:
                raise UserError(fault) from None
            if not isinstance(line, dict) or not isinstance(line.get("content"), dict):
                raise UserError(fault)
            # A path out of the folder would overwrite somebody's file.
            if not ("marker" in line or (is_inside(line.get("run")) and line["run"].endswith(_RESULTS))):
                raise UserError(fault)
            yield line
