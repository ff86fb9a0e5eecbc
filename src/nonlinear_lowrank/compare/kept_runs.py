"""The finished runs of a comparison in one file of lines, beside its record: what a study goes on from elsewhere.

    {"marker": "compare.json", "content": {...}}                              the settings that all runs share
    {"run": "runs/lora-r1/lr-0.001/seed-0/result.json", "content": {...}}     one finished run

Checkpoints and models are not in it, so a run that was half done begins anew.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..storage import is_free, is_inside, read_json, write_json
from .folder import first_difference, write_text

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

    def restore(self, settings: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> None:
        """Writes to the folder those kept runs that it lacks.

        Args:
            settings: what all runs of the comparison share, flat.
            defaults: what the file means where it is older than a setting.

        Raises:
            UserError: the file is damaged, or its runs have other settings. Nothing has been written then.
        """
        if not self.file.exists():
            return
        lines = list(self._lines())
        kept = next((line["content"] for line in lines if line.get("marker") == self.marker), None)
        if kept is None or not isinstance(kept.get("settings"), dict):
            raise UserError(f"{self.file} does not say what its runs are of; move it away to begin anew")
        now = json.loads(json.dumps(settings))  # tuples are lists in the file
        if (found := first_difference(kept["settings"], now, defaults)) is not None:
            name, old, new = found
            raise UserError(
                f"{name} was {old!r} for the runs in {self.file} and is {new!r} now; use the former value, "
                "or move the file away to begin anew"
            )
        if not self._is_theirs(kept, now, defaults):
            return  # the folder is refused next, by what it holds
        missing = [line for line in lines if "run" in line and not (self.out / line["run"]).exists()]
        self.out.mkdir(parents=True, exist_ok=True)
        if not (self.out / self.marker).exists():
            write_json(self.out / self.marker, kept)
        for line in missing:
            path = self.out / line["run"]
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, line["content"])

    def collect(self) -> None:
        """Writes the file anew from the finished runs of the folder; it is whole at any moment."""
        found = sorted(path for name in _RESULTS for path in self.out.glob(f"runs/**/{name}"))
        lines: list[dict[str, Any]] = [{"marker": self.marker, "content": read_json(self.out / self.marker)}]
        for path in found:
            content = {key: value for key, value in read_json(path).items() if key not in _SHARED}
            lines.append({"run": path.relative_to(self.out).as_posix(), "content": content})
        write_text(self.file, "".join(json.dumps(line) + "\n" for line in lines))

    def _is_theirs(self, kept: Mapping[str, Any], now: Mapping[str, Any], defaults: Mapping[str, Any] | None) -> bool:
        """Whether the folder is new, or holds runs like those kept."""
        if not (self.out / self.marker).exists():
            return is_free(self.out, resume=True, overwrite=False)
        there = read_json(self.out / self.marker, settings=dict)
        same = first_difference(there["settings"], now, defaults) is None
        return same and there.get("fingerprint") == kept.get("fingerprint")

    def _lines(self) -> Iterator[dict[str, Any]]:
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
