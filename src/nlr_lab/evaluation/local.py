"""Tasks over files of one's own, by name."""

import difflib
from collections.abc import Sequence
from pathlib import Path

from nonlinear_lowrank.errors import UserError

from . import commonsense, mmlu
from .task_file import LocalTasks


def is_local(name: str) -> bool:
    """Return whether a task of that name reads its questions from a folder (lm-eval has none of such a name).

    Raises:
        UserError: it is like one of ours but none; the message names the nearest.
    """
    known = (*commonsense.NAMES, *mmlu.NAMES)
    if name not in known and (name.endswith("_local") or name.startswith((mmlu.ALL, commonsense.ALL))):
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
        raise UserError(f"there is no local task {name!r}; did you mean {near[0]!r}?")
    return name in known


def find_local_tasks(names: Sequence[str], folder: str | Path, *, shots: int | None = None) -> LocalTasks:
    """Read and check the rows of local tasks, before any model is loaded.

    Args:
        names: as `is_local` knows them, e.g. "mmlu_local", "mmlu_local_stem", "piqa_local".
        folder: see `mmlu.find` and `commonsense.find`; with both kinds, it holds `mmlu` and `commonsense`.
        shots: examples in front of each question of MMLU; None: five. The commonsense tests have none.

    Raises:
        UserError: a file is missing, or a row is malformed; the message names file and line.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise UserError(f"no such folder: {folder} (--data)")
    found = []
    if set(names) & set(commonsense.NAMES):
        found.append(commonsense.find(names, folder))
    if set(names) & set(mmlu.NAMES):
        found.append(mmlu.find(names, folder, shots))
    return LocalTasks(
        tasks=[task for each in found for task in each.tasks], groups=[group for each in found for group in each.groups]
    )
