"""Tasks over rows of a user's files: lm-eval's task file and the questions."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from .rows import DataFile


@dataclass(frozen=True, kw_only=True)
class LocalTask:
    """One task of lm-eval whose questions lie here."""

    name: str
    config: dict[str, Any]
    """A task file of lm-eval, but for `task` and what names its data."""
    docs: Sequence[dict[str, Any]]
    """The questions, in the file's order, with the fields that `config` reads; all of the same fields."""
    shots: Sequence[dict[str, Any]] = ()
    """Answered examples to put in front, in this order."""
    published: int
    """Questions of the published test; with another number, a score is not comparable with published ones."""
    files: Sequence[DataFile]
    """Files of the questions and examples."""


@dataclass(frozen=True, kw_only=True)
class LocalGroup:
    """Tasks that are reported together."""

    name: str
    members: Sequence[str]
    """Names of tasks, or of groups that come before this one."""
    pooled: bool
    """Report the share of right answers over all questions, not the mean of the members' shares."""
    published: int
    """Questions of the published tests, also of members that have none here."""
    metric: str = "acc"
    """The name under which it is reported."""


@dataclass(frozen=True, kw_only=True)
class LocalTasks:
    """All that was asked for."""

    tasks: Sequence[LocalTask] = ()
    groups: Sequence[LocalGroup] = ()

    @property
    def files(self) -> list[DataFile]:
        """Every file once, in the order of the tasks."""
        return list(dict.fromkeys(file for task in self.tasks for file in task.files))

    @property
    def hidden(self) -> set[str]:
        """Tasks that a table need not show, being many and part of a group; results have them."""
        pooled = {member for group in self.groups if group.pooled for member in group.members}
        return pooled & {task.name for task in self.tasks}

    def split(self, names: Collection[str]) -> tuple["LocalTasks", "LocalTasks"]:
        """Return the tasks and groups of these names, and the others."""
        inside, outside = (
            LocalTasks(
                tasks=[task for task in self.tasks if (task.name in names) == wanted],
                groups=[group for group in self.groups if (group.name in names) == wanted],
            )
            for wanted in (True, False)
        )
        return inside, outside


@cache
def read_task_file(name: str) -> dict[str, Any]:
    """Return the content of a YAML file of this folder."""
    found: dict[str, Any] = yaml.safe_load(Path(__file__).with_name(name).read_text(encoding="utf-8"))
    return found
