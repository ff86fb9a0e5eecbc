"""The folder of one fit: may it be written to, and what is in it.

out/fit.json                     settings, hash of the data, versions, machine, git state
out/checkpoints/step-000500/     model.safetensors, optimizer.safetensors, state.json, manifest.json (hashes);
                                 removed when the fit is finished
out/model/model.safetensors      the fitted field
out/pictures/                    what the problem writes
out/result.json                  scores, curve, sizes; the last file of a finished fit
"""

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nlr_lab.runtime.environment import provenance
from nlr_lab.runtime.settings import flatten
from nlr_lab.runtime.storage import (
    FolderLock,
    clear_folder,
    holds_former,
    read_json,
    remove_temporaries,
    write_json,
)
from nonlinear_lowrank.errors import UserError

SETTINGS, RESULT, PICTURES, CHECKPOINTS = "fit.json", "result.json", "pictures", "checkpoints"

# SETTINGS goes last: while it is there, the folder can still be resumed or overwritten.
_OURS = (RESULT, "model", PICTURES, CHECKPOINTS, SETTINGS)
OF_PICTURES = ("frames", "frame_downscale", "picture_height", "azimuth", "elevation", "up", "mesh_resolution")
"""Settings of a problem that change its pictures and meshes and no number."""
# Settings that a resumed fit may have otherwise: they change no number, or only by rounding.
_FREE = {
    *("train.save_every", "train.keep_checkpoints", "train.threads", "train.device"),
    *(f"problem.{name}" for name in OF_PICTURES),
    # of where the data lie: what they are, the fingerprint says
    *("problem.name", "problem.source"),
}


class FitFolder:
    """One fit's folder.

    Args:
        path: new, empty, or an earlier fit's.
        settings: what is to be fitted in it; nested JSON values.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path, self.settings = path, json.loads(json.dumps(settings))
        self.checkpoints = path / CHECKPOINTS

    def check(self, *, resume: bool, overwrite: bool) -> dict[str, Any] | None:
        """Raise UserError for a folder that may not be used; change nothing.

        Returns:
            The contents of result.json when a finished fit is resumed, else None.
        """
        if not holds_former(self.path, SETTINGS, "fit", resume=resume, overwrite=overwrite):
            return None
        before = flatten(read_json(self.path / SETTINGS, settings=dict)["settings"])
        for name, value in flatten(self.settings).items():
            if name in _FREE or before.get(name) == value:
                continue
            if name == "problem.fingerprint":
                raise UserError(
                    f"the fit in {self.path} was started on other data; bring it back or choose another folder"
                )
            raise UserError(
                f"the fit in {self.path} was started with {name} {before.get(name)!r}, not {value!r}; "
                "resume with the former, or choose another folder"
            )
        kinds = {"score": str, "metrics": dict, "curve": list, "parameters": int, "seconds": float, "files": list}
        return read_json(self.path / RESULT, **kinds) if (self.path / RESULT).is_file() else None

    @contextlib.contextmanager
    def opened(self, *, overwrite: bool) -> Iterator[None]:
        """Make the folder this fit's while it runs; raise UserError where another process fits in it."""
        self.path.mkdir(parents=True, exist_ok=True)
        lock = FolderLock(self.path)
        try:
            if overwrite:
                clear_folder(self.path, *_OURS)
            remove_temporaries(self.path)
            remove_temporaries(self.checkpoints)
            if not (self.path / SETTINGS).is_file():
                write_json(self.path / SETTINGS, {"settings": self.settings, **provenance()})
            yield
        finally:
            lock.release()

    def shows_otherwise(self) -> bool:
        """Return whether the pictures that are there were asked for with other settings."""
        return _of_pictures(read_json(self.path / SETTINGS, settings=dict)) != _of_pictures(vars(self))

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Write the last file of a fit: while it is missing, the fit is not finished."""
        write_json(self.path / RESULT, result)
        if self.shows_otherwise():
            about = read_json(self.path / SETTINGS, settings=dict)
            about["settings"]["problem"].update(_of_pictures(vars(self)))
            write_json(self.path / SETTINGS, about)


def _of_pictures(about: Mapping[str, Any]) -> dict[str, Any]:
    problem = about["settings"]["problem"]
    return {name: problem[name] for name in OF_PICTURES if name in problem}
