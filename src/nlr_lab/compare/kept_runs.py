"""The finished runs of a comparison in one file of lines, beside its record: what a study resumes from elsewhere.

    {"marker": {...}}                                                         the settings that all runs share
    {"run": "runs/lora-r1/lr-0.001/seed-0/result.json", "content": {...}}     one finished run

Checkpoints and models are not in it, so a run that was half done begins anew.
"""

import json
from pathlib import Path
from typing import Any

from nlr_lab.runtime.storage import disk_errors, read_json, write_json, write_text
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.hub.storage import is_inside

# Of a run's result: the same in every run, and kept by the marker or the record.
_SHARED = {"data", "versions"}
_RESULT = "result.json"


class KeptRuns:
    """The runs of one folder, and the file that keeps them.

    Args:
        file: the file of lines; its folder exists.
        out: the comparison's folder.
    """

    def __init__(self, file: Path, out: Path) -> None:
        self.file, self.out = file, out
        self.marker: dict[str, Any] = {}
        """Settings and arms that the file has of its runs; empty where it has none."""
        self._runs: list[dict[str, Any]] = []

    def read(self) -> None:
        """Read the file; raise UserError where it is damaged, or its folder is missing."""
        if not self.file.parent.is_dir():
            raise UserError(f"there is no folder {self.file.parent} to keep the finished runs in; make it first")
        if not self.file.exists():
            return
        text = self.file.read_text(encoding="utf-8", errors="replace")  # what is no text is no JSON either
        for number, each in enumerate(text.splitlines(), start=1):
            try:
                line = json.loads(each)
                if number == 1 and all(isinstance(line["marker"][name], dict) for name in ("settings", "arms")):
                    self.marker = line["marker"]
                    continue
                # A path out of the folder would overwrite somebody's file.
                if not is_inside(line["run"]) or not line["run"].endswith(_RESULT) or not line["content"]:
                    raise ValueError("no run of ours")
            except (ValueError, KeyError, TypeError, AttributeError):
                raise UserError(
                    f"{self.file}, line {number} is not of a comparison; bring the file back or move it away"
                ) from None
            self._runs.append(line)

    def restore(self, marker: Path) -> None:
        """Write to the folder those of the runs that it lacks; its marker then names where they came from too."""
        missing = [line for line in self._runs if not (self.out / line["run"]).exists()]
        if not missing:
            return
        with disk_errors(str(self.out)):
            self.out.mkdir(parents=True, exist_ok=True)
            own = read_json(marker) if marker.exists() else {}
            sessions = [*self.marker["versions"], *own.get("versions", [])]
            joined = {
                "arms": self.marker["arms"] | own.get("arms", {}),
                "versions": [each for place, each in enumerate(sessions) if each not in sessions[:place]],
            }
            write_json(marker, {**self.marker, **own, **joined})
            for line in missing:
                path = self.out / line["run"]
                path.parent.mkdir(parents=True, exist_ok=True)
                write_json(path, line["content"])

    def collect(self, marker: Path) -> None:
        """Write the file anew from the finished runs of the folder; it is whole at any moment."""
        lines: list[dict[str, Any]] = [{"marker": read_json(marker)}]
        for path in sorted(self.out.glob(f"runs/**/{_RESULT}")):
            content = {key: value for key, value in read_json(path).items() if key not in _SHARED}
            lines.append({"run": path.relative_to(self.out).as_posix(), "content": content})
        write_text(self.file, "".join(json.dumps(line) + "\n" for line in lines))
